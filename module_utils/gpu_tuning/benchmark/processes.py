# SPDX-License-Identifier: GPL-3.0-or-later
"""Start programs so that none of them outlives the benchmark, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from typing import Any, Optional

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(ctypes.c_int(option), ctypes.c_ulong(value))


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that they can be found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: list[str], environment: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; it gets SIGTERM should this process die."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent,
        **streams,
    )


def children(pid: int) -> list[int]:
    """Return the direct children of a process, none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as handle:
                found += [int(child) for child in handle.read().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents before their children."""
    found = children(pid)
    for child in found:
        found += [one for one in descendants(child) if one not in found]
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap() -> None:
    """Collect adopted children that have ended; call it only when no Popen of ours is still waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def stop(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a program and all it started: SIGTERM, ``grace`` seconds, SIGKILL. Needs adopt_orphans()."""
    tree = [process.pid, *descendants(process.pid)]
    _signal_all(tree, signal.SIGTERM)
    try:
        process.wait(timeout=grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_orphans(2.0)


def end_orphans(grace: float) -> None:
    """End every descendant of this process that is left, first kindly."""
    deadline = time.monotonic() + grace
    while True:
        _reap()
        left = descendants(os.getpid())
        if not left:
            return
        _signal_all(left, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)


def ended_by(code: Optional[int]) -> str:
    """Say how a program ended, from subprocess' return code."""
    if code is None:
        return "is running"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
