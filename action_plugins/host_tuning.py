# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of a run in one call of host_settings, record it and say how it went.

An action plugin, and a single one: each task costs the controller as much per host as the run itself, and
one that reads all rows of another costs more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional

from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[1]
for _folder in (str(ROOT / "module_utils"), str(ROOT / "plugin_utils")):
    if _folder not in sys.path:
        sys.path.append(_folder)

import tuning_record
from gpu_tuning import report

ROOTS = ("procfs_root", "sysfs_root", "state_root")


class ActionModule(ActionBase):
    """host_tuning: a plan (gpu_tuning.policy.plan), the host's roots and what fails the play in, rows out."""

    _VALID_ARGS = frozenset(("plan", *ROOTS, "strict", "lenient", "reports_root"))
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return host_settings' result with final rows, msg (lines for people), failed, and record, a folder.

        Skipped where no step of the plan needs the host.
        """
        result: dict[str, Any] = super().run(tmp, task_vars)
        given, check_mode = self._task.args, self._task.check_mode
        plan, steps = given["plan"], set(given["plan"]["steps"])
        if steps.isdisjoint(("snapshot", "apply", "verify")):
            return {**result, "skipped": True}
        if steps.isdisjoint(("snapshot", "apply")):
            # Only looks: check mode keeps even the journal as it is.
            self._task.check_mode = True
        arguments = {
            **{root: given[root] for root in ROOTS},
            **plan["sections"],
            "state": "applied" if "apply" in steps else "captured",
            # A later pass over everything, in the same call: calls are what costs time.
            "verify": "verify" in steps,
        }
        done = self._execute_module(
            module_name="host_settings", module_args=arguments, task_vars=task_vars or {}
        )
        if "rows" not in done:
            return {**result, **done}
        rows = tuning_record.final_rows(done, steps)
        host = str((task_vars or {}).get("inventory_hostname", "host"))
        document = tuning_record.document(host, plan["fixes"], done, rows)
        judged = tuning_record.verdict_of_rows(
            report.lines(document, explain=check_mode),
            report.failing(rows, given.get("strict") or (), given.get("lenient") or ()),
        )
        if "record" in steps and not check_mode:
            directory = Path(given["reports_root"]) / host
            judged = tuning_record.recorded(judged, directory, document, rows, done["recorded"])
        done.pop("verified_rows", None)
        return {**result, **done, "rows": document["rows"], **judged}
