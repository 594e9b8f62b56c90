# SPDX-License-Identifier: GPL-3.0-or-later
"""Capture, apply and restore: the same three steps for every kind of setting.

A kind knows how to find its settings and how to read and write one of them. What is common stands here:
the order (capture all, journal, write all, read all back), what an error means, and the diff.
"""

from __future__ import annotations

import abc
import os
import stat
from collections.abc import Iterable

from .journal import Entry, Journal
from .kernel_files import FORBIDDEN, GONE, error_text
from .rows import (
    CHANGED,
    CLAMPED,
    FAILED,
    NOT_APPLICABLE,
    OK,
    READ_ONLY,
    REJECTED,
    WOULD_CHANGE,
    Row,
    Value,
)
from .typed import Any, Optional

#: Kinds with a row per CPU or cpufreq policy, whose targets are CPU/setting.
PER_CPU = ("cpuidle", "cpufreq")


class Refused(Exception):
    """A read or write that its kind can explain better than an errno: a status and a reason."""

    def __init__(self, status: str, reason: str) -> None:
        """Carry the row's new status and reason."""
        super().__init__(reason)
        self.status, self.reason = status, reason


class Kind(abc.ABC):
    """One kind of setting, bound to its policy and to the roots of one machine."""

    #: The rows' kind, and the first word of their ids.
    kind: str
    #: Restore only what this tool wrote, never what somebody else set to the same value in the meantime.
    restores_only_own = False

    @abc.abstractmethod
    def capture(self) -> list[Row]:
        """Return a row per setting: OK, WOULD_CHANGE (writable, not as desired), or why it cannot be."""

    @abc.abstractmethod
    def read(self, row: Row) -> Value:
        """Return the normalised value now. Raises OSError or Refused."""

    @abc.abstractmethod
    def write(self, row: Row) -> None:
        """Ask the kernel for ``row.desired``. Raises OSError or Refused."""

    @abc.abstractmethod
    def recorded_row(self, entry: Entry) -> Row:
        """Return the row (before, desired and after still None) for a journal entry."""

    def satisfied(self, row: Row, value: Value) -> bool:
        """Tell whether a value read is as good as the desired one."""
        return value == row.desired

    def entry(self, row: Row, about_to_write: bool) -> Entry:
        """Return what the journal keeps of a captured row; ``set`` is what the run is about to write."""
        wanted = row.desired if about_to_write and row.status == WOULD_CHANGE else None
        return {"kind": row.kind, "target": row.target, "before": row.before, "set": wanted}

    def restoring(self, entries: dict[str, Entry]) -> list[Row]:
        """Return a row per journal entry of this kind: desired is the recorded value."""
        return [self._restoring_row(entry) for entry in entries.values()]

    def _restoring_row(self, entry: Entry) -> Row:
        row = self.recorded_row(entry)
        try:
            row.before = self.read(row)
        except (OSError, Refused) as error:
            return explained(row, error, "read")
        row.desired = entry["before"]
        if self.satisfied(row, row.before):
            return row
        if self.restores_only_own and entry["set"] is None:
            row.desired = row.before
            row.reason = "not set by this tool: left as it is"
            return row
        reason = "the recorded value differs"
        if entry["set"] is not None and row.before != entry["set"]:
            reason = f"something else had set it since: it was {row.before}, this tool had set {entry['set']}"
        return row.with_status(WOULD_CHANGE, reason)


def captured(kinds: Iterable[Kind], journal: Optional[Journal] = None) -> list[Row]:
    """Return every kind's rows as they stand, recorded when a journal is given; no setting is written."""
    return [row for _, row in _captured(kinds, journal)]


def applied(kinds: Iterable[Kind], journal: Journal) -> list[Row]:
    """Capture, journal what is about to be written, write, read everything back. Raises JournalError."""
    return written(_captured(kinds, journal, about_to_write=True))


def _captured(
    kinds: Iterable[Kind], journal: Optional[Journal], about_to_write: bool = False
) -> list[tuple[Kind, Row]]:
    found = [(kind, row) for kind in kinds for row in kind.capture()]
    if journal is not None:
        journal.record({r.id: kind.entry(r, about_to_write) for kind, r in found if r.before is not None})
    return found


def restored(kinds: Iterable[Kind], journal: Journal, check: bool) -> list[Row]:
    """Give back the recorded values, and forget those that are back. Raises JournalError."""
    found = []
    for kind in kinds:
        mine = {i: entry for i, entry in journal.entries.items() if entry["kind"] == kind.kind}
        found += [(kind, row) for row in kind.restoring(mine)]
    if check:
        return [row for _, row in found]
    rows = written(found)
    journal.forget([row.id for row in rows if row.status in (OK, CHANGED)])
    return rows


def written(found: list[tuple[Kind, Row]]) -> list[Row]:
    """Write every row that would change, then read every row back: no sample, and nothing in between."""
    tried = [(kind, _write(kind, row)) for kind, row in found]
    return [_read_back(kind, row) for kind, row in tried]


def _write(kind: Kind, row: Row) -> Row:
    if row.status != WOULD_CHANGE:
        return row
    try:
        kind.write(row)
    except (OSError, Refused) as error:
        return explained(row, error, "write")
    return row


def _read_back(kind: Kind, row: Row) -> Row:
    if row.before is None:
        return row
    try:
        row.after = kind.read(row)
    except (OSError, Refused) as error:
        return row if row.status not in (OK, WOULD_CHANGE) else explained(row, error, "read back")
    if row.status != WOULD_CHANGE:
        return row
    if kind.satisfied(row, row.after):
        return row.with_status(CHANGED, row.reason)
    return row.with_status(
        CLAMPED, f"asked for {row.desired}, the kernel took the write and reads {row.after}"
    )


def explained(row: Row, error: Exception, action: str) -> Row:
    """Return the row with the status and the sentence that an error stands for."""
    if isinstance(error, Refused):
        return row.with_status(error.status, error.reason)
    assert isinstance(error, OSError)
    what = f"{action} {error.filename or row.target}"
    if error.errno in GONE:
        return row.with_status(FAILED, f"vanished during the run: cannot {what}: {error_text(error)}")
    if error.errno in FORBIDDEN:
        return row.with_status(READ_ONLY, f"not permitted: cannot {what}: {error_text(error)}")
    if action == "write":
        return row.with_status(
            REJECTED, f"the kernel refused {row.desired} for {row.target}: {error_text(error)}"
        )
    return row.with_status(FAILED, f"cannot {what}: {error_text(error)}")


def writable(path: str) -> bool:
    """Tell whether root may write the file: sees modes, read-only mounts and missing rights.

    Somebody else can only be checking; then the answer is what root's would be, as far as can be seen.
    """
    if os.geteuid() == 0:
        return os.access(path, os.W_OK)
    try:
        return bool(os.stat(path).st_mode & stat.S_IWUSR) and not os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError:
        return False


def diff(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return Ansible's diff, one document per kind, of the rows that change; CPUs are folded together."""
    documents = []
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row.status in (CHANGED, WOULD_CHANGE, CLAMPED):
            by_kind.setdefault(row.kind, []).append(row)
    for kind, changing in by_kind.items():
        old = _folded((_diff_target(row), row.before) for row in changing)
        new = _folded((_diff_target(row), _diff_value(row)) for row in changing)
        header = f"{kind} ({len(changing)} settings)"
        documents.append({"before_header": header, "after_header": header, "before": old, "after": new})
    return documents


def _diff_value(row: Row) -> Value:
    return row.desired if row.status == WOULD_CHANGE else row.after


def _diff_target(row: Row) -> str:
    """Return the target, without the CPU where there is one: 128 equal lines say no more than one."""
    return f"{row.target.partition('/')[2]} on {{n}} CPUs" if row.kind in PER_CPU else row.target


def _folded(lines: Iterable[tuple[str, Value]]) -> str:
    counts: dict[tuple[str, Value], int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return "".join(f"{t.replace('{n}', str(n))} = {v}\n" for (t, v), n in counts.items())


def not_applicable(kind: str, target: str, reason: str, desired: Optional[Value] = None) -> Row:
    """Return the one row that says why a kind has nothing to do on this host."""
    return Row(f"{kind}:{target}", kind, target, desired=desired, status=NOT_APPLICABLE, reason=reason)
