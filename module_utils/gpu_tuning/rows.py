# SPDX-License-Identifier: GPL-3.0-or-later
"""The setting row: the one data contract between modules, journal and report.

A policy is rows with a desired value, a snapshot is rows with a value, applying turns rows into rows
with a status. Everything that leaves a module is a list of ``Row.as_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .typed import TYPE_CHECKING, Any, Optional, Union

if TYPE_CHECKING:
    from typing import TypeVar

    _Row = TypeVar("_Row", bound="Row")

Value = Union[str, int, None]

OK = "ok"  # was right already, writable or not
CHANGED = "changed"
WOULD_CHANGE = "would_change"  # check mode, and every row between its capture and its write
NOT_APPLICABLE = "not_applicable"  # the reason says what is missing
UNSUPPORTED = "unsupported"  # this kernel has no such key
READ_ONLY = "read_only"  # container, lockdown, no quorum
REJECTED = "rejected"  # the kernel said no
CLAMPED = "clamped"  # the read-back differs from what was asked
OVERRIDDEN = "overridden"  # something else set it after us
FAILED = "failed"

STATUSES = (
    OK,
    CHANGED,
    WOULD_CHANGE,
    NOT_APPLICABLE,
    UNSUPPORTED,
    READ_ONLY,
    REJECTED,
    CLAMPED,
    OVERRIDDEN,
    FAILED,
)
#: Statuses that fail a play at its end, after every other row has been tried and reported.
FAILURES = (REJECTED, CLAMPED, OVERRIDDEN, FAILED)
#: Statuses that must carry a reason: all but these two.
SELF_EXPLAINING = (OK, CHANGED)


class Row:
    """One setting on one host. Values are normalised; None where not known.

    ``id`` is stable and unique on a host ("sysctl:vm.swappiness"); ``after`` is always a fresh read,
    never the value that was written; ``fix`` says when a change can take effect.
    """

    # By hand: importing dataclasses would be a tenth of what a check costs every few minutes.
    def __init__(
        self,
        id: str,
        kind: str,
        target: str,
        before: Value = None,
        desired: Value = None,
        after: Value = None,
        status: str = OK,
        reason: Optional[str] = None,
        fix: str = "runtime",
    ) -> None:
        """Take the fields of the contract."""
        self.id, self.kind, self.target = id, kind, target
        self.before, self.desired, self.after = before, desired, after
        self.status, self.reason, self.fix = status, reason, fix

    def __eq__(self, other: object) -> bool:
        """Compare all fields."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        """Show all fields."""
        return f"{type(self).__name__}({', '.join(f'{name}={each!r}' for name, each in vars(self).items())})"

    def replaced(self: _Row, **values: Value) -> _Row:
        """Return a copy with other values of any fields."""
        return type(self)(**{**vars(self), **values})

    def with_status(self: _Row, status: str, reason: Optional[str] = None, **values: Value) -> _Row:
        """Return a copy with another status, reason and any of before, desired, after."""
        return self.replaced(status=status, reason=reason, **values)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data with the field names of the contract."""
        return dict(vars(self))


def failures(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose status is a failure."""
    return [row for row in rows if row.status in FAILURES]
