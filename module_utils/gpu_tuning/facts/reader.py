# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what a host says in its files, and keep the reason wherever it says nothing.

A topic's facts are plain dicts and lists. A value that could not be read is an ``Unknown`` with one
sentence; one that this host simply has not (no such file, no such capability) is an ``absent`` one.
``split_unknown`` turns the whole into JSON-ready data in which such a value is None and its reason stands
under the value's path ("gpus.0.acs") in a flat map.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterable
from typing import Any, Optional, Union

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A value that could not be read; ``reason`` is one sentence that names the file and the cause.

    ``absent`` is True where there is nothing to read: the host has no such thing.
    """

    reason: str
    absent: bool = False


def absent(reason: str) -> Unknown:
    """Return the value of something that this host has not."""
    return Unknown(reason, absent=True)


Text = Union[str, Unknown]
Number = Union[int, Unknown]

#: The directories a host's facts come from, with their places on a live host.
ROOTS = ("procfs", "sysfs", "etc", "dev", "run", "usr", "var", "boot", "lib")
_LIVE = {"procfs": "/proc", "sysfs": "/sys"}


@dataclasses.dataclass(frozen=True)
class Host:
    """Where each of a host's trees lies: the live one, or a recorded machine in a directory."""

    procfs: str = "/proc"
    sysfs: str = "/sys"
    etc: str = "/etc"
    dev: str = "/dev"
    run: str = "/run"
    usr: str = "/usr"
    var: str = "/var"
    boot: str = "/boot"
    lib: str = "/lib"

    @classmethod
    def from_options(cls, options: dict[str, Optional[str]]) -> Host:
        """Make a host of ``procfs_root`` and its like; a root that is not given lies beside sysfs's.

        So a recorded machine at T needs T/sys and T/proc named, and never mixes with the live /etc.
        """
        sysfs = options.get("sysfs_root") or "/sys"
        beside = os.path.dirname(os.path.normpath(sysfs))
        roots = {name: options.get(name + "_root") or os.path.join(beside, name) for name in ROOTS}
        roots["sysfs"] = sysfs
        roots["procfs"] = options.get("procfs_root") or os.path.join(beside, "proc")
        return cls(**roots)

    @property
    def live(self) -> bool:
        """Tell whether this is the machine the code runs on."""
        return self.sysfs == _LIVE["sysfs"] and self.procfs == _LIVE["procfs"]

    def proc(self, *parts: str) -> str:
        """Return a path below procfs."""
        return os.path.join(self.procfs, *parts)

    def sys(self, *parts: str) -> str:
        """Return a path below sysfs."""
        return os.path.join(self.sysfs, *parts)


_LONGEST_NUMBER = 20  # digits of 64 bits
_MOST_IN_RANGE = 1 << 16  # more CPUs or nodes than any kernel counts: the file holds something else


def failure(path: str, error: OSError) -> Unknown:
    """Say in one sentence why a path could not be read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return absent(f"{path} does not exist")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Unknown(f"{path} is readable with root's rights only")
    return Unknown(f"{path} cannot be read: {os.strerror(error.errno or 0)}")


def read_bytes(path: str, limit: int = 1 << 24) -> Union[bytes, Unknown]:
    """Return a regular file's content, at most ``limit`` bytes; anything but a regular file is unknown.

    Opened without blocking and checked after opening, so that a fifo or device in a place that another
    user can write holds nobody up.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        return failure(path, error)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return Unknown(f"{path} is not a regular file")
        return _drain(handle, limit)
    except OSError as error:
        return failure(path, error)
    finally:
        os.close(handle)


def _drain(handle: int, limit: int) -> bytes:
    parts, left = [], limit
    while left > 0:
        part = os.read(handle, min(left, 1 << 16))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_text(path: str) -> Text:
    """Return a file's text without its trailing white space."""
    content = read_bytes(path)
    return content if isinstance(content, Unknown) else content.decode("utf-8", "replace").rstrip()


def read_int(path: str, base: int = 10) -> Number:
    """Return the whole number a file holds."""
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    try:
        return int(text[:_LONGEST_NUMBER], base)
    except ValueError:
        return Unknown(f"{path} holds no number: {text[:40]!r}")


def numbers_in(text: str) -> list[int]:
    """Return the whole numbers among a text's words."""
    return [int(word) for word in text.split() if word.isdecimal() and len(word) < 20]


def read_flag(path: str) -> Union[bool, Unknown]:
    """Return a 0/1 file as a truth value."""
    number = read_int(path)
    return number if isinstance(number, Unknown) else number != 0


def read_choice(path: str) -> Text:
    """Return the bracketed word of a file such as "always [madvise] never"."""
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    chosen = [word[1:-1] for word in text.split() if word.startswith("[") and word.endswith("]")]
    return chosen[0] if chosen else text


def names_in(path: str) -> list[str]:
    """Return a directory's entries in order, [] where there is none or it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def numbered(path: str, prefix: str) -> list[int]:
    """Return the numbers N of a directory's entries called <prefix>N, in order."""
    found = [name[len(prefix) :] for name in names_in(path) if name.startswith(prefix)]
    return sorted(int(number) for number in found if number.isdecimal())


def link_name(path: str) -> Optional[str]:
    """Return the last part of a symbolic link's target ("nvidia" of a driver link), None without one."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of a kernel list such as "0-31,64-95"."""
    numbers: list[int] = []
    for part in text.replace("\n", ",").split(","):
        first, _dash, last = part.strip().partition("-")
        if first.isdecimal() and len(first) < 8:
            end = int(last) if last.isdecimal() and len(last) < 8 else int(first)
            numbers.extend(range(int(first), min(end, int(first) + _MOST_IN_RANGE) + 1))
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's list form: [0, 1, 2, 5] gives "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def colon_fields(text: str) -> dict[str, str]:
    """Return "Name: value" lines as a dict; the first line of a name counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def split_unknown(value: Any, path: str = "") -> tuple[Any, dict[str, Unknown]]:
    """Return (the value with None for each Unknown, {dotted path: Unknown})."""
    if isinstance(value, Unknown):
        return None, {path: value}
    if not isinstance(value, (dict, list, tuple)):
        return value, {}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    plain: list[tuple[Any, Any]] = []
    unknown: dict[str, Unknown] = {}
    for key, part in pairs:
        known, reasons = split_unknown(part, f"{path}.{key}" if path else str(key))
        plain.append((key, known))
        unknown.update(reasons)
    if isinstance(value, dict):
        return {str(key): part for key, part in plain}, unknown
    return [part for _key, part in plain], unknown
