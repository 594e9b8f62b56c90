# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write on the controller what a kernel upgrade found on both boots; costs no module call on the host."""

from __future__ import annotations

import pathlib
import sys
from typing import Any, Optional

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

ROOT = pathlib.Path(__file__).resolve().parents[1]
for _folder in (str(ROOT / "module_utils"), str(ROOT / "plugin_utils")):
    if _folder not in sys.path:
        sys.path.append(_folder)

import kernel_record
import system_record
from gpu_tuning.benchmark.documents import write_json


class ActionModule(ActionBase):
    """kernel_upgrade_record: kernel_boot's record in, kernel-upgrade.json and a section for people out."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False
    _VALID_ARGS = frozenset(("record", "directory"))

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return the paths written: json, and record, the newest system-improve.md or one of its own."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        record, directory = self._task.args["record"], pathlib.Path(self._task.args["directory"])
        if record.get("phase") not in ("done", "failed"):
            return {**result, "skipped": True, "msg": "no upgrade has ended yet"}
        if self._task.check_mode:
            return {**result, "skipped": True, "msg": "check mode: nothing is recorded"}
        document = directory / "kernel-upgrade.json"
        text = system_record.newest(str(directory)) or str(directory / system_record.NAME)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_json(str(document), record)
            document.chmod(0o644)  # for whoever may read the folder, as the other records
            system_record.put_section(text, "kernel_upgrade", kernel_record.section(record))
        except OSError as error:
            raise AnsibleActionFail(f"The record of the upgrade cannot be written: {error}") from error
        return {**result, "json": str(document), "record": text}
