# SPDX-License-Identifier: GPL-3.0-or-later
"""A long benchmark on the measured host that lives only as long as somebody asks after it.

``start`` leaves a supervisor behind and returns; ``poll`` tells what is new and renews the lease; without a
poll for the length of the lease (the controller was interrupted, the connection is gone) the supervisor ends
the benchmark and everything it started. What was measured until then stays in the job's folder.

The folder, mode 0700, with an unpredictable name: ``progress`` (text), ``lease`` (its mtime), ``pid``,
``spec.json``, ``result.json`` (complete or partial) and, at the end, ``outcome.json``. Its ``ballast`` is
room that is given up when the disk is full, so that the cause and the last results can still be written.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any, Optional

from . import processes
from .documents import BALLAST, drop_ballast, write_json, write_text

PREFIX = "gpu-benchmark-"
BALLAST_BYTES = 256 * 1024
GRACE = 90.0  # the sweep has to stop a server that holds hundreds of GB


def start(base: str, lease: float, bundle: str, program: str, spec: dict[str, Any]) -> str:
    """Start ``program`` of the bundle under a lease of ``lease`` seconds; return the job's folder."""
    os.makedirs(base, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    own = os.path.join(folder, "bundle.pyz")
    try:
        shutil.copyfile(bundle, own)
        write_json(os.path.join(folder, "spec.json"), {**spec, "folder": folder})
        write_text(os.path.join(folder, BALLAST), "x" * BALLAST_BYTES)
        _touch(folder)
    except OSError:
        shutil.rmtree(folder)
        raise
    command = [sys.executable, own, program, folder]
    ready, tell_ready = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(ready)
            _detach(folder)
            _supervise(folder, lease, command, tell_ready)
        os._exit(0)
    os.close(tell_ready)
    os.wait()
    os.read(ready, 1)  # returns when the supervisor has written its number
    os.close(ready)
    return folder


def _detach(folder: str) -> None:
    os.chdir("/")
    progress = os.open(os.path.join(folder, "progress"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (progress, 1), (progress, 2)):
        os.dup2(source, target)


def _supervise(folder: str, lease: float, command: list[str], ready: int) -> None:
    """Run the program to its end, or end it; never returns."""
    stopped: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: stopped.append(signal.Signals(number).name))
    processes.adopt_orphans()
    with open(os.path.join(folder, "pid"), "w", encoding="ascii") as handle:
        handle.write(f"{os.getpid()} {_started(os.getpid())}")
    os.close(ready)
    program = processes.start(command, {})
    reason = _watch(folder, lease, program, stopped)
    if reason:
        processes.stop(program, GRACE)
    processes.end_orphans(2.0)
    drop_ballast(folder)
    with contextlib.suppress(OSError):  # poll sees at least that the supervisor is gone
        write_json(os.path.join(folder, "outcome.json"), {"exit_code": program.wait(), "reason": reason})
    os._exit(0)


def _watch(folder: str, lease: float, program: subprocess.Popen[bytes], stopped: list[str]) -> Optional[str]:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(timeout=0.5)
            return None
        if stopped:
            return f"stopped by {stopped[0]}"
        if time.time() - os.stat(os.path.join(folder, "lease")).st_mtime > lease:
            return f"nobody asked after it for {lease:g} s, so it was ended"


def _touch(folder: str) -> None:
    path = os.path.join(folder, "lease")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    os.utime(path)


def _started(pid: int) -> str:
    """Return a process's start time in ticks, so that a reused number is not taken for it; "" once it ended.

    In a container whose init collects no children, one that has ended stays as a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
            fields = handle.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _supervisor(folder: str) -> Optional[int]:
    """Return the supervisor's process number while it lives."""
    try:
        with open(os.path.join(folder, "pid"), encoding="ascii") as handle:
            pid, started = handle.read().split()
    except (OSError, ValueError):
        return None
    return int(pid) if started and _started(int(pid)) == started else None


def poll(folder: str, offset: int) -> dict[str, Any]:
    """Return {state, outcome, text, offset}; state is running, ended or lost (killed, or a reboot)."""
    _touch(folder)
    alive = _supervisor(folder) is not None
    outcome = _outcome(folder)  # after the look at the supervisor: it writes this last
    with open(os.path.join(folder, "progress"), "rb") as handle:
        handle.seek(offset)
        text = handle.read()
    whole = text[: text.rfind(b"\n") + 1] if alive else text
    state = "ended" if outcome else "running" if alive else "lost"
    said = whole.decode(errors="replace")
    return {"state": state, "outcome": outcome, "text": said, "offset": offset + len(whole)}


def _outcome(folder: str) -> Optional[dict[str, Any]]:
    try:
        with open(os.path.join(folder, "outcome.json"), encoding="utf-8") as handle:
            return dict(json.load(handle))
    except (OSError, ValueError):
        return None


def stop(folder: str) -> None:
    """Ask the supervisor to end the job, and wait until it has."""
    pid = _supervisor(folder)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE + 10
    while _supervisor(folder) is not None and time.monotonic() < deadline:
        time.sleep(0.1)


def result(folder: str) -> str:
    """Return result.json compressed and in base64, "" where the job left none."""
    try:
        with open(os.path.join(folder, "result.json"), "rb") as handle:
            return base64.b64encode(zlib.compress(handle.read())).decode()
    except FileNotFoundError:
        return ""


def remove(folder: str) -> None:
    """Remove a job's folder; refuses anything that start() did not make."""
    if not os.path.basename(folder).startswith(PREFIX) or os.path.islink(folder):
        raise ValueError(f"{folder} is no job's folder")
    shutil.rmtree(folder)
