# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a benchmark on the host and show its progress; the host ends it by itself when nobody asks any more."""

from __future__ import annotations

import base64
import json
import pathlib
import shlex
import sys
import tempfile
import time
import zlib
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = pathlib.Path(__file__).resolve().parents[1]
if str(ROOT / "module_utils") not in sys.path:
    sys.path.append(str(ROOT / "module_utils"))

from gpu_tuning.benchmark import bundle
from gpu_tuning.benchmark.fabric import NOTHING_TO_MEASURE

display = Display()

ARGUMENTS = {
    "program": {"type": "str", "required": True, "choices": ["sweep", "fabric"]},
    "spec": {"type": "dict", "required": True},
    "environment": {"type": "dict", "default": {}},
    "work_dir": {"type": "path", "required": True},
    "lease": {"type": "float", "default": 120},
    "interval": {"type": "float", "default": 2},
    "keep": {"type": "bool", "default": False},
    "python": {"type": "str", "default": "python3"},
    "procfs_root": {"type": "str", "default": "/proc"},
    "sysfs_root": {"type": "str", "default": "/sys"},
}


class ActionModule(ActionBase):
    """Send the bundle, start the job, follow it, fetch its result."""

    TRANSFERS_FILES = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Return succeeded, message, run (the result document), fingerprint and where the files are."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        self._host = (task_vars or {}).get("inventory_hostname", "?")
        if self._task.check_mode:
            return {**result, "skipped": True, "msg": f"check mode: the {arguments['program']} would be run"}
        started = self._start(arguments)
        folder = started["folder"]
        try:
            ended = self._follow(folder, arguments)
            found = self._result(folder)
        except BaseException:
            display.display(f"[{self._host}] the benchmark ends by itself within {arguments['lease']:g} s")
            raise
        message = self._message(ended, found)
        code = (ended["outcome"] or {}).get("exit_code")
        keep = arguments["keep"] or (bool(message) and code != NOTHING_TO_MEASURE)
        if not keep:
            self._call("remove", folder)
        result.update(
            changed=True,
            succeeded=not message,
            exit_code=code,
            message=f"{message}\nLogs and partial results: {folder} on {self._host}."
            if message and keep
            else message,
            run=found,
            fingerprint=started["fingerprint"],
            folder=folder if keep else None,
        )
        return result

    def _start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._python = arguments["python"]
        folder = self._make_tmp_path()
        self._bundle = self._connection._shell.join_path(folder, "benchmark.pyz")
        order_file = self._connection._shell.join_path(folder, "order.json")
        order = {
            "base": arguments["work_dir"],
            **{key: arguments[key] for key in ("lease", "program", "spec", "environment")},
            **{key: arguments[key] for key in ("procfs_root", "sysfs_root")},
        }
        self._put(bundle.build(str(ROOT / "roles/gpu_benchmark/files" / bundle.P2P)), self._bundle)
        self._put(json.dumps(order).encode(), order_file)
        self._fixup_perms2((folder, self._bundle, order_file), execute=False)
        started = self._call("start", order_file)
        # the job runs from its own copy, and so do the polls: the temporary folder may go
        self._bundle = self._connection._shell.join_path(started["folder"], "bundle.pyz")
        self._remove_tmp_path(folder)
        return started

    def _put(self, data: bytes, path: str) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self._connection.put_file(file.name, path)

    def _call(self, *arguments: str) -> dict[str, Any]:
        """Run one command of the bundle and return its JSON answer."""
        command = shlex.join([self._python, self._bundle, *arguments])
        found = self._low_level_execute_command(command, sudoable=True)
        text = (found.get("stdout") or "").strip().splitlines()
        try:
            answer = dict(json.loads(text[-1]))
        except (ValueError, IndexError):
            said = (found.get("stderr") or found.get("stdout") or "nothing").strip().splitlines()[-1:]
            raise AnsibleActionFail(
                f"The benchmark's program did not answer on {self._host} ({self._python} said: {said}); "
                "it needs Python 3.9 or newer."
            ) from None
        if "error" in answer:
            raise AnsibleActionFail(f"The benchmark cannot be run on {self._host}: {answer['error']}")
        return answer

    def _follow(self, folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Show progress until the job has ended; a lost connection may come back within the lease."""
        offset, heard = 0, time.monotonic()
        while True:
            try:
                answer = self._call("poll", folder, str(offset))
                heard = time.monotonic()
            except AnsibleConnectionFailure as error:
                if time.monotonic() - heard > arguments["lease"]:
                    raise AnsibleActionFail(
                        f"The connection to {self._host} is lost ({error}); the benchmark has ended by "
                        f"itself, what it measured is in {folder} there."
                    ) from error
                time.sleep(arguments["interval"])
                continue
            for line in answer["text"].splitlines():
                display.display(f"[{self._host}] {line}")
            offset = answer["offset"]
            if answer["state"] != "running":
                return answer
            time.sleep(arguments["interval"])

    def _result(self, folder: str) -> Any:
        packed = self._call("result", folder)["result"]
        return json.loads(zlib.decompress(base64.b64decode(packed))) if packed else None

    def _message(self, ended: dict[str, Any], found: Any) -> str:
        """Return why the run is not whole, empty when it is."""
        if ended["state"] == "lost":
            return "The benchmark was ended from outside (killed, or the host was restarted)."
        outcome = ended["outcome"]
        if outcome["reason"]:
            return f"The benchmark was not finished: {outcome['reason']}."
        if found is None:
            return f"The benchmark left no result (exit code {outcome['exit_code']})."
        if outcome["exit_code"] or found["status"] != "complete":
            return str(found["error"] or f"The benchmark ended with exit code {outcome['exit_code']}.")
        return ""
