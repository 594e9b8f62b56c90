# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of host_settings on the controller: its record, its summary for people, whether it fails the play."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jinja2
from gpu_tuning import report
from gpu_tuning.rows import Row
from markdown_text import plain

TEMPLATES = Path(__file__).resolve().parent.parent / "roles/host_tuning/templates"


def verdict(lines: list[str], differences: list[str]) -> dict[str, Any]:
    """Return a task's result: lines for people, the first of them the headline, and what fails the task."""
    return {
        "msg": lines,
        "headline": lines[0],
        "differences": differences,
        "failed": bool(differences),
    }


def verdict_of_rows(lines: list[str], failing: list[Row]) -> dict[str, Any]:
    """Return the verdict of rows: what is said of all of them, then those that fail the task."""
    failed = [f"{row.id}: {row.status}: {row.reason}" for row in failing]
    return verdict([*lines, *failed], failed)


def final_rows(done: dict[str, Any], steps: list[str]) -> list[Row]:
    """Return the rows of host_settings' result, with what its verifying pass saw."""
    rows = report.rows_from(done["rows"])
    if "verify" not in steps:
        return rows
    if "apply" in steps:
        return report.verified(rows, report.rows_from(done.get("verified_rows") or ()))
    return report.drifted(rows)


def document(host: str, fixes: dict[str, Any], done: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return what result.json will hold."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    machine = {name: done[name] for name in ("boot_id", "kernel_release")}
    return report.result_document(host, now, machine, fixes, rows)


def recorded(
    judged: dict[str, Any],
    directory: Path,
    result: dict[str, Any],
    rows: list[Row],
    journalled: dict[str, Any],
) -> dict[str, Any]:
    """Write the record and add its path to the verdict, or say that there is none and what to do."""
    try:
        folder = _write_record(directory, result, rows, journalled)
    except OSError as error:
        lost = f"the record could not be written: {error}: make room there, then run --tags verify,record"
        return {**judged, "failed": True, "msg": [*judged["msg"], lost]}
    return {
        **judged,
        "record": str(folder),
        "msg": [*judged["msg"], f"record: {folder / 'system-improve.md'}"],
    }


def _write_record(
    directory: Path, result: dict[str, Any], rows: list[Row], journalled: dict[str, Any]
) -> Path:
    """Write the four files into a new folder that gets its name once they are whole."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = _free_name(directory, result["recorded"].replace(":", ""))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=directory))
    try:
        for name, text in _files(result, rows, journalled).items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _free_name(directory: Path, stamp: str) -> Path:
    """Return a folder that does not exist yet: two runs may end within one second."""
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    return next(directory / name for name in names if not (directory / name).exists())


def _files(result: dict[str, Any], rows: list[Row], journalled: dict[str, Any]) -> dict[str, str]:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown; cells are escaped by the filter below
    )
    environment.filters["cell"] = plain
    return {
        "before.json": _json(report.snapshot_document(result, report.found_first(rows, journalled))),
        "after.json": _json(report.snapshot_document(result, report.as_left(rows))),
        "result.json": _json(result),
        "system-improve.md": environment.get_template("system-improve.md.j2").render(
            result, table=report.table(result)
        ),
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
