# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a module of library/ as Ansible does, main() in a process of its own, without a playbook's second.

The process is a fork of the test's, so that Ansible is imported once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Optional

import ansible.module_utils
from ansible.module_utils import basic

REPO = Path(__file__).resolve().parents[2]


@functools.cache
def load(name: str) -> ModuleType:
    """Import library/``name``.py, its ansible.module_utils.gpu_tuning being this checkout's."""
    ours = str(REPO / "module_utils")
    if ours not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(ours)
    spec = importlib.util.spec_from_file_location(f"library_{name}", REPO / f"library/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class Running:
    """A module that has started: main() is about to be called or has been."""

    pid: int
    output: IO[str]

    def kill(self) -> bool:
        """Send SIGKILL and wait; return whether it came before the module's own end."""
        os.kill(self.pid, signal.SIGKILL)
        return os.WIFSIGNALED(self.wait())

    def wait(self) -> int:
        """Wait for the end and return the process's status."""
        return os.waitpid(self.pid, 0)[1]

    def result(self) -> dict[str, Any]:
        """Wait for the end and return what the module printed as its result."""
        self.wait()
        self.output.seek(0)
        text = self.output.read()
        try:
            return dict(json.loads(text.splitlines()[-1]))
        except (IndexError, ValueError):
            raise AssertionError(f"no result of a module, but: {text}") from None


def start(
    name: str,
    arguments: dict[str, Any],
    check: bool = False,
    prepare: Optional[Callable[[], object]] = None,
) -> Running:
    """Start a module; ``prepare`` runs in its process first (a namespace, another user, a slower write)."""
    module = load(name)
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it outlives this call
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(module, {**arguments, "_ansible_check_mode": check}, prepare, output, started)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    return Running(pid, output)


def run(
    name: str,
    arguments: dict[str, Any],
    check: bool = False,
    prepare: Optional[Callable[[], object]] = None,
) -> dict[str, Any]:
    """Run a module to its end and return its result."""
    return start(name, arguments, check, prepare).result()


def _child(
    module: ModuleType,
    arguments: dict[str, Any],
    prepare: Optional[Callable[[], object]],
    output: IO[str],
    started: int,
) -> None:
    """Never returns: nothing of the test may run twice."""
    status = 1
    try:
        sys.stdout = sys.stderr = output
        if prepare:
            prepare()
        basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode()
        basic._ANSIBLE_PROFILE = "legacy"  # ansible-core 2.19 and later ask for it
        os.write(started, b".")
        module.main()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc(file=output)
    finally:
        output.flush()
        os._exit(status)


def by_id(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a result's rows by their id; two rows with one id are an error."""
    rows = {row["id"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    return rows
