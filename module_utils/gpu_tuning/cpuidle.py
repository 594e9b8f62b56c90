# SPDX-License-Identifier: GPL-3.0-or-later
"""Idle states of CPUs: cpu*/cpuidle/state*/disable, chosen by exit latency or by name, never by index.

Source: Documentation/admin-guide/pm/cpuidle.rst of the kernel. State numbers and names differ between
drivers and even between the CPUs of one host, so every CPU is looked at for itself.
"""

from __future__ import annotations

import os
import re

from .engine import Kind, Refused, explained, not_applicable, writable
from .journal import Entry
from .kernel_files import read_line, read_text, write_text
from .rows import FAILED, NOT_APPLICABLE, OK, READ_ONLY, WOULD_CHANGE, Row, Value
from .typed import NamedTuple, Optional

ENABLED, DISABLED = "enabled", "disabled"

#: C1 under the names drivers give it: C1, C1_ACPI, NHM-C1, C1-SNB. C1E is a deeper state.
_C1 = re.compile(r"(?:\w+-)?C1(?:[-_]\w+)?\Z")
#: Waiting without sleeping: POLL today, C0 in old kernels, snooze on POWER.
_POLL = ("POLL", "C0", "snooze")


class IdleState(NamedTuple):
    """One state of one CPU: its name and its directory."""

    cpu: int
    name: str
    path: str

    @property
    def latency_us(self) -> Optional[int]:
        """The exit latency, read when asked for: a host has thousands. None where it cannot be read."""
        text = read_line(f"{self.path}/latency") or ""
        return int(text) if text.isdigit() else None


def is_kept(name: str) -> bool:
    """Tell whether a state is POLL or C1: never disabled, for a CPU must be able to wait."""
    return name in _POLL or _C1.match(name) is not None


def checked_names(names: list[str]) -> list[str]:
    """Refuse names that must never be disabled. Raises ValueError."""
    for name in names:
        if is_kept(name):
            raise ValueError(f"{name} is never disabled: POLL and C1 are kept; name deeper states")
    return names


class IdleStates(Kind):
    """The deep idle states of all CPUs below one sysfs."""

    kind = "cpuidle"
    # Another tool may have disabled the same states; enabling those again is not ours to do.
    restores_only_own = True

    def __init__(
        self,
        max_exit_latency_us: Optional[int] = None,
        names: Optional[list[str]] = None,
        sysfs_root: str = "/sys",
    ) -> None:
        """Select by latency (states slower than the limit) or by name; neither only captures."""
        self.limit, self.names = max_exit_latency_us, names
        self.cpus = os.path.join(sysfs_root, "devices/system/cpu")
        self._paths: dict[str, str] = {}

    def capture(self) -> list[Row]:
        """Return a row per selected state and CPU, one per offline CPU, or one that says why none is."""
        found = {cpu: [] if self._offline(cpu) else self._states(cpu) for cpu in self._cpu_numbers()}
        states = [state for of_cpu in found.values() for state in of_cpu]
        rows = [
            self._row_without_states(cpu)
            for cpu, of_cpu in found.items()
            if not of_cpu and (states or self._offline(cpu))
        ]
        selected = [state for state in states if self._selected(state)]
        rows += [self._captured(state) for state in selected]
        return rows if selected else [*rows, self._nothing_selected(states)]

    def _cpu_numbers(self) -> list[int]:
        try:
            names = os.listdir(self.cpus)
        except OSError:
            return []
        return sorted(int(name[3:]) for name in names if re.match(r"cpu\d+\Z", name))

    def _offline(self, cpu: int) -> bool:
        return read_line(f"{self.cpus}/cpu{cpu}/online") == "0"

    def _states(self, cpu: int) -> list[IdleState]:
        """Return a CPU's states in the driver's order; a CPU that goes offline meanwhile has none."""
        directory = f"{self.cpus}/cpu{cpu}/cpuidle"
        try:
            numbers = sorted(int(name[5:]) for name in os.listdir(directory) if name.startswith("state"))
        except OSError:
            return []
        found = []
        for number in numbers:
            path = f"{directory}/state{number}"
            name = read_line(f"{path}/name")
            if name:
                found.append(IdleState(cpu, name, path))
        return found

    def _selected(self, state: IdleState) -> bool:
        if is_kept(state.name):
            return False
        if self.names is not None:
            return state.name in self.names
        if self.limit is None:
            return True
        latency = state.latency_us
        # None: its CPU has gone offline meanwhile, which its row will say.
        return latency is None or latency > self.limit

    def _captured(self, state: IdleState) -> Row:
        target = f"cpu{state.cpu}/{state.name}"
        self._paths[target] = f"{state.path}/disable"
        wanted = DISABLED if self.limit is not None or self.names is not None else None
        row = Row(f"cpuidle:{target}", self.kind, target, desired=wanted)
        try:
            row.before = self.read(row)
        except (OSError, Refused) as error:
            return explained(row, error, "read")
        if wanted in (None, row.before):
            return row
        if not writable(self._paths[target]):
            return row.with_status(READ_ONLY, f"not writable: {self._paths[target]}; run as root on the host")
        return row.with_status(WOULD_CHANGE, self._why(state))

    def _why(self, state: IdleState) -> str:
        if self.names is not None:
            return f"{state.name} is named by the policy (exit latency {state.latency_us} us)"
        return f"exit latency {state.latency_us} us is above the limit of {self.limit} us"

    def _lost(self, row: Row, error: OSError) -> Exception:
        """Return what an error means: that the CPU has gone offline, or just itself."""
        cpu = int(row.target.partition("/")[0][3:])
        if not self._offline(cpu):
            return error
        return Refused(NOT_APPLICABLE, f"CPU offline: cpu{cpu} went offline during the run")

    def _row_without_states(self, cpu: int) -> Row:
        target = f"cpu{cpu}"
        if self._offline(cpu):
            reason = f"CPU offline: {target} is set when it comes online and the play runs again"
        else:
            reason = f"no idle states: {target} has none, unlike other CPUs here"
        return not_applicable(self.kind, target, reason)

    def _nothing_selected(self, states: list[IdleState]) -> Row:
        """Say why no state is selected: none is there, none has the name, or all are quick enough."""
        driver = read_line(os.path.join(self.cpus, "cpuidle/current_driver")) or "none"
        if not states:
            return not_applicable(self.kind, "all", f"no idle states: cpuidle driver is {driver}")
        seen = ", ".join(
            f"{name} {latency} us" for name, latency in sorted({(s.name, s.latency_us or 0) for s in states})
        )
        if self.names is not None:
            wanted = ", ".join(self.names)
            return not_applicable(
                self.kind, "all", f"no such idle state: {wanted}; driver {driver} has {seen}"
            )
        reason = f"no idle state deeper than C1 is slower than {self.limit} us: driver {driver} has {seen}"
        return Row("cpuidle:all", self.kind, "all", status=OK, reason=reason)

    def read(self, row: Row) -> Value:
        """Return "enabled" or "disabled"."""
        path = self._path(row.target)
        try:
            text = read_text(path).strip()
        except OSError as error:
            raise self._lost(row, error) from error
        if not text.isdigit():
            raise Refused(FAILED, f"{path} reads {text!r}, expected 0 or 1")
        return ENABLED if text == "0" else DISABLED

    def write(self, row: Row) -> None:
        """Set the state's disable file, unless its CPU has gone offline meanwhile."""
        try:
            write_text(self._path(row.target), "1\n" if row.desired == DISABLED else "0\n")
        except OSError as error:
            raise self._lost(row, error) from error

    def _path(self, target: str) -> str:
        """Return a state's file; in a rollback the state is looked up by name, since numbers may move."""
        if target not in self._paths:
            cpu = target.partition("/")[0]
            for state in self._states(int(cpu[3:])):
                self._paths[f"cpu{state.cpu}/{state.name}"] = f"{state.path}/disable"
        if target not in self._paths:
            raise Refused(
                FAILED, f"cannot find idle state {target}: is the CPU offline or the driver another?"
            )
        return self._paths[target]

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded state."""
        return Row(f"cpuidle:{entry['target']}", self.kind, entry["target"])

    def restoring(self, entries: dict[str, Entry]) -> list[Row]:
        """Enable again what this tool disabled: all of it, or the states with the given names."""
        if self.names is not None:
            entries = {i: e for i, e in entries.items() if e["target"].partition("/")[2] in self.names}
        return super().restoring(entries)
