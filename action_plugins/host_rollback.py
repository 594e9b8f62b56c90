# SPDX-License-Identifier: GPL-3.0-or-later
"""Give back in one call of host_settings what the journal recorded, and say what could not be."""

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
from gpu_tuning.policy import ALL, KIND_OF_SECTION


class ActionModule(ActionBase):
    """host_rollback: the host's roots and across_boot in, host_settings' result and a verdict out."""

    _VALID_ARGS = frozenset(("procfs_root", "sysfs_root", "state_root", "across_boot"))
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return rows, msg (lines for people) and failed; any value that is not back fails the task."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        sections: dict[str, dict[str, Any]] = {section: {} for section in KIND_OF_SECTION}
        done = self._execute_module(
            module_name="host_settings",
            module_args={**self._task.args, "state": "restored", **sections},
            task_vars=task_vars or {},
        )
        if "rows" not in done:
            return {**result, **done}
        rows = report.rows_from(done["rows"])
        lines, failing = report.rollback_lines(rows), report.failing(rows, strict=[ALL])
        return {**result, **done, **tuning_record.verdict_of_rows(lines, failing)}
