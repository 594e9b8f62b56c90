# SPDX-License-Identifier: GPL-3.0-or-later
"""Say how persisting, taking it back or a verification went, write JUnit's report, fail on drift.

An action plugin, so that reporting costs no module call on any host.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Optional

from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[1]
for _folder in (str(ROOT / "module_utils"), str(ROOT / "plugin_utils")):
    if _folder not in sys.path:
        sys.path.append(_folder)

from gpu_tuning import drift, junit, report
from gpu_tuning.rows import CHANGED, OK, WOULD_CHANGE, Row
from tuning_record import verdict


class ActionModule(ActionBase):
    """drift_report: a result of host_persistence in, lines for people, a verdict and a JUnit file out."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("result", "strict", "lenient", "junit_root"))

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return msg (lines for people), failed, and junit (the file written, or null)."""
        result = super().run(tmp, task_vars)
        given = self._task.args
        if "rows" not in (given["result"] or {}):
            # Its own task has failed and said why.
            return {**result, "skipped": True}
        rows = report.rows_from(given["result"]["rows"])
        failing = report.failing(rows, given.get("strict") or (), given.get("lenient") or ())
        differences = drift.lines(failing)
        judged = verdict([headline(rows, failing), *differences, *others(given["result"])], differences)
        if given.get("junit_root"):
            host = str((task_vars or {}).get("inventory_hostname", "host"))
            judged = _written(judged, Path(given["junit_root"]), host, rows, failing)
        return {**result, **judged, "changed": False}


def headline(rows: list[Row], failing: list[Row]) -> str:
    """Count the three facts: value now, in our files, at the next boot; and the files that changed."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_GROUPS.get(row.kind, "now"), []).append(row)
    parts = [
        _counted(name, groups[name]) for name in ("now", "in file", "at boot", "files") if name in groups
    ]
    word = f"{len(failing)} failed" if failing else "no drift"
    return f"{', '.join(part for part in parts if part)}: {word}"


_GROUPS = {"in_file": "in file", "at_boot": "at boot", "owned_file": "files", "daemon": "daemons"}


def _counted(name: str, rows: list[Row]) -> str:
    counts = Counter(row.status for row in rows)
    if name == "files":
        changed = counts[CHANGED] + counts[WOULD_CHANGE]
        return f"files {changed} of {len(rows)} changed" if changed else ""
    asked = [row for row in rows if row.status not in ("not_applicable", "unsupported")]
    right = counts[OK] + counts[CHANGED] + counts[WOULD_CHANGE]
    return f"{name} {right}/{len(asked)}" if asked else f"{name}: {rows[0].reason}"


def others(result: dict[str, Any]) -> list[str]:
    """Name whoever else sets up the host."""
    return [f"also sets up this host: {sentence}" for sentence in result.get("other_tuners") or ()]


def _written(
    judged: dict[str, Any], folder: Path, host: str, rows: list[Row], failing: list[Row]
) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = folder / f"TEST-{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.xml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(junit.document(host, now, rows, failing), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        lost = f"the JUnit report could not be written: {error}"
        return {**judged, "failed": True, "msg": [*judged["msg"], lost]}
    return {**judged, "junit": str(path)}
