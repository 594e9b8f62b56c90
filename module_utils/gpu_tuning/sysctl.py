# SPDX-License-Identifier: GPL-3.0-or-later
"""Sysctls through /proc/sys: names, comparison by tokens, the dirty_* pairs.

Sources: Documentation/admin-guide/sysctl/ of the kernel; sysctl.d(5) for the forms of a name.
"""

from __future__ import annotations

import errno
import os
import re

from .engine import Kind, Refused, explained, writable
from .journal import Entry
from .kernel_files import GONE, read_text, write_text
from .rows import FAILED, NOT_APPLICABLE, OK, READ_ONLY, UNSUPPORTED, WOULD_CHANGE, Row, Value
from .typed import NamedTuple, Optional

EXACT, MINIMUM, MAXIMUM = "exact", "minimum", "maximum"
MATCHES = (EXACT, MINIMUM, MAXIMUM)

#: Writing one of a pair makes the kernel zero the other; writing 0 to a *_bytes key is EINVAL.
PARTNERS = {
    "vm.dirty_ratio": "vm.dirty_bytes",
    "vm.dirty_bytes": "vm.dirty_ratio",
    "vm.dirty_background_ratio": "vm.dirty_background_bytes",
    "vm.dirty_background_bytes": "vm.dirty_background_ratio",
}

_COMPONENT = re.compile(r"[A-Za-z0-9_.:@+-]+\Z")
#: No kernel integer has more digits than a 64-bit octal one, 22 and the leading 0.
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,23})\Z")


class Setting(NamedTuple):
    """One wanted sysctl: canonical dotted name, value as the user wrote it (None: only watch), match."""

    name: str
    value: Optional[str] = None
    match: str = EXACT


def components(name: str) -> list[str]:
    """Return a key's path below /proc/sys. Raises ValueError.

    As in sysctl.d(5): the first separator decides. After a slash, slashes separate and dots belong to
    names; after a dot, dots separate and slashes stand for dots (``net.ipv4.conf.eth0/100.rp_filter``).
    """
    first = re.search(r"[./]", name)
    if first is None or first.group() == "/":
        parts = name.split("/")
    else:
        parts = name.translate(str.maketrans("./", "/.")).split("/")
    # sysctl.d(5) takes a leading dash as "ignore errors"; here it would silently be a key that is not there.
    bad = any(not _COMPONENT.match(part) or part in (".", "..") for part in parts)
    if len(parts) < 2 or bad or name.startswith("-"):
        raise ValueError(
            f"{name!r} is not a sysctl name: write it like vm.swappiness, vm/swappiness or "
            "net.ipv4.conf.eth0/100.rp_filter"
        )
    return parts


def canonical_name(name: str) -> str:
    """Return the dotted form, dots inside a component as slashes. Raises ValueError."""
    return ".".join(part.replace(".", "/") for part in components(name))


def setting(name: str, value: Optional[str] = None, match: str = EXACT) -> Setting:
    """Return a checked Setting. Raises ValueError with a sentence for the user."""
    canonical = canonical_name(name)
    if match not in MATCHES:
        raise ValueError(f"{canonical}: match must be one of {', '.join(MATCHES)}, not {match!r}")
    if value is not None:
        if not value.strip() and match != EXACT:
            raise ValueError(f"{canonical}: a {match} needs a number, not an empty value")
        if "\n" in value.strip("\n") or "\0" in value:
            raise ValueError(f"{canonical}: the value {value!r} must be one line without NUL")
        if match != EXACT and not all(_number(token) is not None for token in value.split()):
            raise ValueError(f"{canonical}: a {match} needs integers, not {value!r}")
    return Setting(canonical, None if value is None else value.strip(), match)


def checked_settings(settings: list[Setting]) -> list[Setting]:
    """Refuse lists that cannot be satisfied: one key twice, or both of a pair. Raises ValueError."""
    names = [s.name for s in settings]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice: keep one of the two")
        partner = PARTNERS.get(name)
        if partner in names and all(s.value is not None for s in settings if s.name in (name, partner)):
            raise ValueError(f"{name} and {partner} zero each other: set one of the two")
    return settings


def normalised(text: str) -> str:
    """Return a value's tokens joined by single blanks: the kernel prints tabs, people write blanks."""
    return " ".join(text.split())


def _number(token: str) -> Optional[int]:
    """Return a token's value as the kernel's parser takes it (0x hexadecimal, leading 0 octal), or None."""
    if not _INTEGER.match(token):
        return None
    digits = token.lstrip("-")
    base = 16 if digits[:2].lower() == "0x" else 8 if len(digits) > 1 and digits[0] == "0" else 10
    try:
        return int(token, base)
    except ValueError:
        return None


def same_tokens(wanted: str, read: str) -> bool:
    """Compare token by token: equal text, or the same number however the user wrote it."""
    left, right = wanted.split(), read.split()
    return len(left) == len(right) and all(
        a == b or (_number(a) is not None and str(_number(a)) == b) for a, b in zip(left, right)
    )


def target_value(found: str, wanted: Setting) -> str:
    """Return what to write so that the wanted setting holds; ``found`` itself when it holds already.

    A minimum or maximum of several numbers works number by number. Raises Refused when what the kernel
    shows cannot be compared with it.
    """
    assert wanted.value is not None
    if wanted.match == EXACT:
        return found if same_tokens(wanted.value, found) else wanted.value
    have = [_number(token) for token in found.split()]
    want = [_number(token) for token in wanted.value.split()]
    if len(have) != len(want) or None in have:
        raise Refused(
            FAILED,
            f"cannot compare {found!r} with the {wanted.match} {wanted.value!r}: not the same numbers",
        )
    choose = max if wanted.match == MINIMUM else min
    chosen = [choose(h, w) for h, w in zip(have, want) if h is not None and w is not None]
    return found if chosen == have else " ".join(map(str, chosen))


class Sysctls(Kind):
    """Any number of sysctls below one procfs."""

    kind = "sysctl"

    def __init__(self, settings: list[Setting], procfs_root: str = "/proc") -> None:
        """Take checked settings; nothing is read yet. To restore: none stand for all that is recorded."""
        self.settings = settings
        self.root = os.path.join(procfs_root, "sys")
        self._raw: dict[str, str] = {}
        self._recorded_raw: dict[str, str] = {}
        self._zeroed_by_kernel: set[str] = set()
        self._written: set[str] = set()
        self._limits: dict[str, Setting] = {}

    def path(self, name: str) -> str:
        """Return the key's file."""
        return os.path.join(self.root, *components(name))

    def capture(self) -> list[Row]:
        """Return a row per setting, and one per unnamed partner of a dirty_* key."""
        rows = {s.name: self._captured(s) for s in self.settings}
        for name in list(rows):
            partner = PARTNERS.get(name)
            if partner and partner not in rows:
                rows[partner] = self._captured_partner(partner, rows[name])
        return list(rows.values())

    def _captured(self, wanted: Setting) -> Row:
        row = Row(f"sysctl:{wanted.name}", self.kind, wanted.name, desired=wanted.value)
        if wanted.match != EXACT:
            self._limits[wanted.name] = wanted
        try:
            row.before = found = self.read(row)
            target = found if wanted.value is None else target_value(found, wanted)
        except (OSError, Refused) as error:
            return self._unreadable(row, error)
        if target == found:
            return row.with_status(OK, _why_it_stays(found, wanted))
        row.desired = target
        if not writable(self.path(wanted.name)):
            return row.with_status(READ_ONLY, self._read_only_reason(row))
        return row.with_status(WOULD_CHANGE, f"found {found}, the policy asks for {_phrase(wanted)}")

    def _unreadable(self, row: Row, error: Exception) -> Row:
        if isinstance(error, OSError) and error.errno in _NO_SUCH_KEY:
            return row.with_status(UNSUPPORTED, self._unsupported_reason(row))
        return explained(row, error, "read")

    def _unsupported_reason(self, row: Row) -> str:
        where = "this network namespace" if row.target.startswith("net.") else "this kernel"
        return f"no such key: {where} has no {self.path(row.target)}"

    def _read_only_reason(self, row: Row) -> str:
        path = self.path(row.target)
        return (
            f"not writable: {path} stays at {row.before} instead of {row.desired}; "
            "in a container, set it on the host"
        )

    def _captured_partner(self, name: str, main: Row) -> Row:
        row = self._captured(Setting(name))
        if row.before in (None, "0") or main.status != WOULD_CHANGE:
            return row
        self._zeroed_by_kernel.add(name)
        reason = f"the kernel zeroes it when {main.target} is written"
        return row.with_status(WOULD_CHANGE, reason, desired="0")

    def read(self, row: Row) -> str:
        """Return the value's tokens joined by blanks; its text as read is kept for the journal."""
        text = read_text(self.path(row.target))
        self._raw[row.target] = text
        return normalised(text)

    def write(self, row: Row) -> None:
        """Write the desired value, or the recorded text; leave to the kernel what it zeroes itself."""
        if row.target not in self._zeroed_by_kernel:
            write_text(self.path(row.target), self._recorded_raw.get(row.target, f"{row.desired}\n"))
            self._written.add(row.target)
        elif PARTNERS[row.target] not in self._written:
            raise Refused(NOT_APPLICABLE, f"stays at {row.before}: {PARTNERS[row.target]} was not written")

    def satisfied(self, row: Row, value: Value) -> bool:
        """Compare by tokens, or with the limit: a kernel may round a minimum up."""
        limit, found = self._limits.get(row.target), str(value)
        try:
            return target_value(found, limit) == found if limit else same_tokens(str(row.desired), found)
        except Refused:
            return False

    def entry(self, row: Row, about_to_write: bool) -> Entry:
        """Keep the text as it was read too, so that a rollback gives back every tab."""
        return {**super().entry(row, about_to_write), "raw": self._raw[row.target]}

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded key."""
        return Row(f"sysctl:{entry['target']}", self.kind, entry["target"])

    def restoring(self, entries: dict[str, Entry]) -> list[Row]:
        """Give back the recorded text of all keys or the named ones; of a pair, write the non-zero one."""
        chosen = self._chosen(entries)
        before = {entry["target"]: entry["before"] for entry in chosen.values()}
        self._recorded_raw = {e["target"]: e.get("raw", f"{e['before']}\n") for e in chosen.values()}
        self._zeroed_by_kernel = {
            name for name in before if before[name] == "0" and before.get(PARTNERS.get(name, ""), "0") != "0"
        }
        # What the kernel zeroes comes last: by then it is known whether its partner was written.
        return sorted(super().restoring(chosen), key=lambda row: row.target in self._zeroed_by_kernel)

    def _chosen(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        if not self.settings:
            return entries
        names = {s.name for s in self.settings}
        names |= {PARTNERS[name] for name in names if name in PARTNERS}
        return {identity: entry for identity, entry in entries.items() if entry["target"] in names}


_NO_SUCH_KEY = (*GONE, errno.ENOTDIR, errno.EISDIR)


def _phrase(wanted: Setting) -> str:
    return str(wanted.value) if wanted.match == EXACT else f"a {wanted.match} of {wanted.value}"


def _why_it_stays(found: str, wanted: Setting) -> Optional[str]:
    if wanted.value is None or wanted.match == EXACT or same_tokens(wanted.value, found):
        return None
    return f"{found} stays: the policy asks for {_phrase(wanted)}"
