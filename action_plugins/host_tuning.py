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
        plan, check_mode = self._task.args["plan"], self._task.check_mode
        if set(plan["steps"]).isdisjoint(("snapshot", "apply", "verify")):
            return {**result, "skipped": True}
        done = self._carried_out(plan, task_vars or {})
        if "rows" in done:
            host = str((task_vars or {}).get("inventory_hostname", "host"))
            done = self._summed_up(plan, done, host, check_mode)
        return {**result, **done}

    def _carried_out(self, plan: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        steps = set(plan["steps"])
        if steps.isdisjoint(("snapshot", "apply")):
            # Only looks: check mode keeps even the journal as it is.
            self._task.check_mode = True
        arguments = {
            **{root: self._task.args[root] for root in ROOTS},
            **plan["sections"],
            "state": "applied" if "apply" in steps else "captured",
            # A later pass over everything, in the same call: calls are what costs time.
            "verify": "verify" in steps,
        }
        done: dict[str, Any] = self._execute_module(
            module_name="host_settings", module_args=arguments, task_vars=task_vars
        )
        return done

    def _summed_up(
        self, plan: dict[str, Any], done: dict[str, Any], host: str, check_mode: bool
    ) -> dict[str, Any]:
        given = self._task.args
        rows = tuning_record.final_rows(done, plan["steps"])
        document = tuning_record.document(host, plan["fixes"], done, rows)
        judged = tuning_record.verdict_of_rows(
            report.lines(document, explain=check_mode),
            report.failing(rows, given.get("strict") or (), given.get("lenient") or ()),
        )
        if "record" in plan["steps"] and not check_mode:
            directory = Path(given["reports_root"]) / host
            judged = tuning_record.recorded(judged, directory, document, rows, done["recorded"])
        done.pop("verified_rows", None)
        return {**done, "rows": document["rows"], **judged}
