# SPDX-License-Identifier: GPL-3.0-or-later
"""Group the newest records of all hosts on the controller, and show the odd ones out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional

from ansible.plugins.action import ActionBase

# On the controller, Ansible does not put module_utils on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

from gpu_tuning import fleet


class ActionModule(ActionBase):
    """fleet_report: reports_root in, lines for people out."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("reports_root",))

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return msg (lines for people); a record that cannot be read fails the task after all were tried."""
        result = super().run(tmp, task_vars)
        documents, lost = fleet.newest(Path(self._task.args["reports_root"]))
        words = [*fleet.lines(documents), *lost]
        return {
            **result,
            "msg": words,
            "failed": bool(lost),
            "changed": False,
            "_ansible_verbose_always": True,
        }
