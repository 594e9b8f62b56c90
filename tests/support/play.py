# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a playbook of this repo as a user does, and look at what it did."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]

#: Actions that run on the controller without a module.
CONTROLLER_ACTIONS = {
    "ansible.builtin.validate_argument_spec",
    "validate_argument_spec",
    "ansible.builtin.debug",
}


def ansible_playbook() -> str:
    """Return the ansible-playbook under test: the one named, or that of the running Python."""
    named = os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK")
    beside = Path(sys.executable).with_name("ansible-playbook")
    return named or (
        str(beside) if beside.exists() else shutil.which("ansible-playbook") or "ansible-playbook"
    )


@dataclass
class Run:
    """A finished run: exit status, what was printed, every task's result."""

    returncode: int
    output: str
    tasks: list[dict[str, Any]]

    def rows(self, task: str) -> list[dict[str, Any]]:
        """Return the rows of the host_settings task whose name begins like this."""
        return next(t["result"]["rows"] for t in self._finished() if task in t["task"])

    def ids(self, task: str, status: str) -> set[str]:
        """Return the ids of a task's rows that have a status."""
        return {row["id"] for row in self.rows(task) if row["status"] == status}

    @property
    def summary(self) -> list[str]:
        """The lines that the report prints."""
        return next(t["result"]["msg"] for t in self.tasks if "headline" in t["result"])

    @property
    def module_invocations(self) -> int:
        """How many modules ran on the host."""
        return sum(t["action"] not in CONTROLLER_ACTIONS for t in self._finished())

    def recap(self, counter: str) -> int:
        """Return a counter of the play's last line, such as changed or failed."""
        match = re.search(rf"\b{counter}=(\d+)", self.output)
        assert match, self.output
        return int(match.group(1))

    def _finished(self) -> list[dict[str, Any]]:
        return [task for task in self.tasks if task["outcome"] in ("ok", "failed")]


def run_playbook(scratch: Path, playbook: str, *arguments: str, **environment: str) -> Run:
    """Run a playbook from the repo's root with its own inventory; ``scratch`` is for what is collected."""
    collected = scratch / "collected.jsonl"
    scratch.mkdir(parents=True, exist_ok=True)
    collected.unlink(missing_ok=True)
    done = subprocess.run(
        [ansible_playbook(), playbook, *arguments],
        cwd=REPO,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
            "ANSIBLE_CALLBACK_PLUGINS": f"{REPO}/callback_plugins:{REPO}/tests/support/callbacks",
            "ANSIBLE_CALLBACKS_ENABLED": "collect",
            "ANSIBLE_INJECT_FACT_VARS": "false",
            "ANSIBLE_NOCOLOR": "1",
            "GPU_TUNING_COLLECT": str(collected),
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = collected.read_text(encoding="utf-8").splitlines() if collected.exists() else []
    return Run(done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines])


def recorded_host_arguments(host: Path, scratch: Path) -> list[str]:
    """Return the variables that turn a playbook to a recorded host; state and reports go to ``scratch``."""
    roots = {
        "procfs_root": host / "proc",
        "sysfs_root": host / "sys",
        "state_root": scratch / "state",
        "reports_root": scratch / "reports",
    }
    return [f"--extra-vars={name}={path}" for name, path in roots.items()]


def records(scratch: Path) -> list[Path]:
    """Return the folders of all records of localhost, oldest first."""
    return sorted((scratch / "reports/localhost").iterdir())
