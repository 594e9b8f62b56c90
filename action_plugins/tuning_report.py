# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a run's record on the controller, print its summary, fail the play where a setting failed.

An action plugin, so that recording costs no module call on any host.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import jinja2
from ansible.plugins.action import ActionBase

# On the controller, Ansible does not put module_utils on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

from gpu_tuning import report
from gpu_tuning.rows import Row

TEMPLATES = Path(__file__).resolve().parent.parent / "roles/tuning_report/templates"


class ActionModule(ActionBase):
    """tuning_report: the result of host_tuning or of a rollback in, record and verdict out."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("done", "restored", "strict", "lenient", "reports_root"))

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return msg (lines for people), failed, and record (the folder written, or null)."""
        result = super().run(tmp, task_vars)
        if "restored" in self._task.args:
            return {**result, **_rolled_back(self._task.args["restored"])}
        host = str((task_vars or {}).get("inventory_hostname", "host"))
        return {**result, **self._summed_up(self._task.args, host)}

    def _summed_up(self, arguments: dict[str, Any], host: str) -> dict[str, Any]:
        done = arguments["done"]
        if "rows" not in done:
            # Nothing was to be done, or its own task has failed and said why.
            return {"skipped": True}
        plan = done["plan"]
        rows = _final_rows(done)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        document = report.result_document(host, now, _machine(done), plan["fixes"], rows)
        verdict = _verdict(
            report.lines(document, explain=self._task.check_mode),
            report.failing(rows, arguments.get("strict") or (), arguments.get("lenient") or ()),
        )
        if "record" in plan["steps"] and not self._task.check_mode:
            directory = Path(arguments["reports_root"]) / host
            verdict = _recorded(verdict, directory, document, rows, done["recorded"])
        return verdict


def _rolled_back(restored: dict[str, Any]) -> dict[str, Any]:
    if "rows" not in restored:
        return {"skipped": True}
    rows = report.rows_from(restored["rows"])
    return _verdict(report.rollback_lines(rows), report.failing(rows, strict={row.kind for row in rows}))


def _final_rows(done: dict[str, Any]) -> list[Row]:
    rows, steps = report.rows_from(done["rows"]), done["plan"]["steps"]
    if "verify" not in steps:
        return rows
    if "apply" in steps:
        return report.verified(rows, report.rows_from(done.get("verified_rows") or ()))
    return report.drifted(rows)


def _machine(result: dict[str, Any]) -> dict[str, Any]:
    return {"boot_id": result["boot_id"], "kernel_release": result["kernel_release"]}


def _verdict(lines: list[str], failing: list[Row]) -> dict[str, Any]:
    failed = [f"{row.id}: {row.status}: {row.reason}" for row in failing]
    return {
        "msg": [*lines, *failed],
        "headline": lines[0],
        "differences": failed,
        "failed": bool(failed),
        "changed": False,
        # As debug does: the summary is for people, whatever the verbosity.
        "_ansible_verbose_always": True,
    }


def _recorded(
    verdict: dict[str, Any],
    directory: Path,
    document: dict[str, Any],
    rows: list[Row],
    journalled: dict[str, Any],
) -> dict[str, Any]:
    """Write the record and add its path, or say that there is none and where the values still are."""
    try:
        folder = _write_record(directory, document, rows, journalled)
    except OSError as error:
        lost = f"the record could not be written: {error}: make room there, then run --tags verify,record"
        return {**verdict, "failed": True, "msg": [*verdict["msg"], lost]}
    return {
        **verdict,
        "record": str(folder),
        "msg": [*verdict["msg"], f"record: {folder / 'system-improve.md'}"],
    }


def _write_record(
    directory: Path, document: dict[str, Any], rows: list[Row], journalled: dict[str, Any]
) -> Path:
    """Write the four files into a new folder that gets its name once they are whole."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = _free_name(directory, document["recorded"].replace(":", ""))
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=directory))
    try:
        for name, text in _files(document, rows, journalled).items():
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


def _files(document: dict[str, Any], rows: list[Row], journalled: dict[str, Any]) -> dict[str, str]:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown; cells are escaped by the filter below
    )
    environment.filters["cell"] = _cell
    return {
        "before.json": _json(report.snapshot_document(document, report.found_first(rows, journalled))),
        "after.json": _json(report.snapshot_document(document, report.as_left(rows))),
        "result.json": _json(document),
        "system-improve.md": environment.get_template("system-improve.md.j2").render(
            document, table=report.table(document)
        ),
    }


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _cell(value: Any) -> str:
    """Return a value as the content of one Markdown table cell."""
    return "" if value is None else " ".join(str(value).replace("|", "\\|").split())
