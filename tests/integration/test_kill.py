# SPDX-License-Identifier: GPL-3.0-or-later
"""SIGKILL at any instant: old or new values, a readable journal, a rollback that gives back every byte.

An instant is chosen in two ways, in turn: among the calls that the run makes, counted, so that a busy machine
does not move it, and by the clock, so that it can be in the middle of a call, too.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support import modules
from support.small_host import ALL_SECTIONS, WANTED, SmallHost, small_host
from support.tree import Entry, changed_paths, manifest

SEED = 20260101
ROUNDS = 50

Manifest = dict[str, Entry]


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    return small_host(memory_path / "host", cpus=32, gpus=8)


def arguments(host: SmallHost, state: str) -> dict[str, Any]:
    return {**(WANTED if state == "applied" else ALL_SECTIONS), **host.roots, "state": state}


def run(host: SmallHost, state: str) -> None:
    result = modules.run("host_settings", arguments(host, state))
    assert result["failed"] is False, result["msg"]


class Calls:
    """Counts the calls and returns within a function, those into C included; the last one allowed is fatal.

    ``function`` is "tuner.run", which does all the work, or "engine.written", a small part of it, which
    writes all and reads all back. What Ansible does before and after takes longer and is left to the clock.
    """

    def __init__(self, function: str, allowed: int = sys.maxsize) -> None:
        self.module, self.name = function.split(".")
        self.allowed = allowed
        self._shared = mmap.mmap(-1, 8)  # the count survives the process

    @property
    def counted(self) -> int:
        return int(struct.unpack_from("Q", self._shared)[0])

    def install(self) -> None:
        """Begin to watch in this process."""
        sys.setprofile(self._wait)

    def _wait(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._is_it(frame):
            sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        count = self.counted + 1
        struct.pack_into("Q", self._shared, 0, count)
        if count >= self.allowed:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "return" and self._is_it(frame):
            sys.setprofile(None)

    def _is_it(self, frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_name == self.name and code.co_filename.endswith(f"gpu_tuning/{self.module}.py")


class Killer:
    """Kills runs of one state at random instants."""

    def __init__(self, host: SmallHost, state: str, seed: int) -> None:
        """Measure runs: how long one takes, and how many calls its parts make."""
        self.host, self.state = host, state
        self.chance, self.killed = random.Random(seed), 0
        begin = time.monotonic()
        run(host, state)
        self.seconds = time.monotonic() - begin
        self.parts = {part: self._calls(part) for part in ("tuner.run", "engine.written")}

    def _calls(self, part: str) -> int:
        run(self.host, "restored" if self.state == "applied" else "applied")
        calls = Calls(part)
        modules.run("host_settings", arguments(self.host, self.state), prepare=calls.install)
        return calls.counted

    def kill_one(self) -> None:
        """Start a run and kill it, in turn after so long, and after so many calls of either part."""
        self.killed += 1
        if self.killed % 3 == 0:
            running = modules.start("host_settings", arguments(self.host, self.state))
            time.sleep(self.chance.uniform(0, self.seconds))
            running.kill()
        else:
            part = ("tuner.run", "engine.written")[self.killed % 3 - 1]
            calls = Calls(part, allowed=self.chance.randint(1, self.parts[part]))
            modules.start("host_settings", arguments(self.host, self.state), prepare=calls.install).wait()


class Tally:
    """Where the kills came: how many settings had their new value."""

    def __init__(self) -> None:
        self.nothing = self.some = self.everything = 0

    def count(self, old: Manifest, now: Manifest, new: Manifest) -> None:
        """Compare one tree with what the run began with and would have ended with."""
        done, wanted = len(changed_paths(old, now)), len(changed_paths(old, new))
        self.nothing += done == 0
        self.some += 0 < done < wanted
        self.everything += done == wanted

    def __str__(self) -> str:
        return f"{self.nothing} before the first write, {self.some} midway, {self.everything} after the last"


def assert_old_or_new(now: Manifest, old: Manifest, new: Manifest) -> None:
    """Compare without the newlines that may for an instant follow a value that is being written."""
    assert now.keys() == old.keys()
    strange = [path for path in now if _value(now[path]) not in (_value(old[path]), _value(new[path]))]
    assert strange == []


def _value(entry: Entry) -> Entry:
    return entry._replace(content=entry.content.rstrip(b"\n")) if isinstance(entry.content, bytes) else entry


def assert_journal_is_readable_or_absent(host: SmallHost) -> None:
    for path in (host.state_root / "journal").glob("*.json"):
        assert json.loads(path.read_text())["entries"]["sysctl:vm.swappiness"]["before"] == "60"


def test_killed_while_applying(host: SmallHost) -> None:
    old, tally = manifest(host.root), Tally()
    killer = Killer(host, "applied", SEED)
    new = manifest(host.root)
    run(host, "restored")
    for number in range(ROUNDS):
        killer.kill_one()
        now = manifest(host.root)
        assert_old_or_new(now, old, new)
        assert_journal_is_readable_or_absent(host)
        tally.count(old, now, new)
        run(host, "restored")
        assert changed_paths(old, manifest(host.root)) == [], number
        assert not list((host.state_root / "journal").glob("*.json"))
    print(f"seed {SEED}, {ROUNDS} kills: {tally}")
    assert tally.some > 0, f"no kill came between the first write and the last: {tally}"


def test_killed_while_restoring(host: SmallHost) -> None:
    """A rollback that was killed is finished by the next."""
    old, tally = manifest(host.root), Tally()
    run(host, "applied")
    new = manifest(host.root)
    killer = Killer(host, "restored", SEED + 1)
    for number in range(ROUNDS // 2):
        run(host, "applied")
        killer.kill_one()
        now = manifest(host.root)
        assert_old_or_new(now, old, new)
        tally.count(new, now, old)
        run(host, "restored")
        assert changed_paths(old, manifest(host.root)) == [], number
    print(f"seed {SEED + 1}, {ROUNDS // 2} kills: {tally}")
    assert tally.some > 0, f"no kill came between the first write and the last: {tally}"


def test_killed_again_and_again_before_a_rollback(host: SmallHost) -> None:
    """The first value wins: a run after a kill never records this tool's own value as the host's."""
    old = manifest(host.root)
    killer = Killer(host, "applied", SEED + 2)
    run(host, "restored")
    for _ in range(4):
        for _ in range(3):
            killer.kill_one()
        run(host, "restored")
        assert changed_paths(old, manifest(host.root)) == []
