# SPDX-License-Identifier: GPL-3.0-or-later
"""What an upgrade must remember across a reboot, in one document on the managed host.

phase: "guarded" (the way back is the default), "armed" (the new kernel boots next, once), "done", "failed".
"""

from __future__ import annotations

import json
import os
from typing import Any

from .boot_files import BootError, content, replace
from .kernel_files import error_text

FILE = "kernel-upgrade.json"
GUARDED, ARMED, DONE, FAILED = "guarded", "armed", "done", "failed"

#: release, parameters, way_back {release, cmdline}, phase, failure, before and after (boot_facts).
State = dict[str, Any]


def path(state_root: str) -> str:
    """Return the document's place."""
    return os.path.join(state_root, FILE)


def load(state_root: str) -> State:
    """Return the document, an empty one where there is none. Raises BootError when it is damaged."""
    data = content(path(state_root))
    if data is None:
        return {}
    try:
        state: State = json.loads(data)
        if not isinstance(state, dict):
            raise ValueError("no object")
        return state
    except ValueError as error:
        raise BootError(f"{path(state_root)} is damaged ({error}): move it aside, then run again") from error


def store(state_root: str, state: State) -> None:
    """Have the document on disk when this returns. Raises BootError."""
    try:
        data = (json.dumps({"version": 1, **state}, indent=1, sort_keys=True) + "\n").encode()
        if content(path(state_root)) != data:
            replace(path(state_root), data, 0o600)
    except OSError as error:
        raise BootError(f"cannot write {path(state_root)}: {error_text(error)}: make room there") from error
