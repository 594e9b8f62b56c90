# SPDX-License-Identifier: GPL-3.0-or-later
"""Which file and line sets a sysctl at boot: systemd-sysctl's reading of sysctl.d.

Rules (sysctl.d(5), and systemd's src/sysctl/sysctl.c): files are ordered by name over all directories;
of files with one name, the one in the directory that comes first counts, and a link to /dev/null
masks the rest; the last assignment of a key wins; a key that is named outright is left alone by every
pattern, wherever it stands, and so is one that is excluded ("-key" without a value). /etc/sysctl.conf is
read only where a link in sysctl.d leads to it (Debian's 99-sysctl.conf).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from typing import NamedTuple, Optional

_PATTERN = "*?["


class Assignment(NamedTuple):
    """One line: ``path`` is the key as a path below /proc/sys; ``value`` None excludes it from patterns."""

    path: str
    value: Optional[str]
    file: str
    line: int
    optional: bool = False  # written with "-": a failure to set it is ignored

    @property
    def is_pattern(self) -> bool:
        """Tell a pattern such as net.ipv4.conf.*.rp_filter from a plain key."""
        return any(character in self.path for character in _PATTERN)

    def matches(self, path: str) -> bool:
        """Tell whether a pattern covers a key; "*" does not cross a slash."""
        mine, other = self.path.split("/"), path.split("/")
        return len(mine) == len(other) and all(map(fnmatch.fnmatchcase, other, mine))


def directories(etc: str = "/etc", run: str = "/run", usr: str = "/usr", lib: str = "/lib") -> list[str]:
    """Return the directories, the one whose files mask the others' first."""
    homes = (etc, run, os.path.join(usr, "local/lib"), os.path.join(usr, "lib"), lib)
    return [os.path.join(home, "sysctl.d") for home in homes]


def config_files(folders: Iterable[str]) -> list[str]:
    """Return the files in the order they are applied; masked ones are left out."""
    chosen: dict[str, str] = {}
    for folder in folders:
        for name in _names(folder):
            path = os.path.join(folder, name)
            if name.endswith(".conf") and name not in chosen and _counts(path):
                chosen[name] = path
    ordered = sorted(chosen, key=os.fsencode)
    return [chosen[name] for name in ordered if not _is_mask(chosen[name])]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _counts(path: str) -> bool:
    # A dangling link neither sets anything nor masks; what it masks with is a link to /dev/null.
    return os.path.isfile(path) or _is_mask(path)


def _is_mask(path: str) -> bool:
    return os.path.realpath(path) == "/dev/null"


def key_path(key: str) -> str:
    """Return a key as a path below /proc/sys: "net.ipv4.conf.eth0/100.mtu" gives net/ipv4/conf/eth0.100/mtu.

    The first separator decides: if it is a dot, dots and slashes change places.
    """
    first = next((character for character in key if character in "./"), "/")
    return key.translate(str.maketrans("./", "/.")) if first == "." else key


def parse(text: str, file: str) -> list[Assignment]:
    """Return the assignments of one file's text, in order; lines that mean nothing are left out."""
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        key, equals, value = line.partition("=")
        optional, key = key.startswith("-"), key.strip().lstrip("-").strip()
        if not key or not (equals or optional):
            continue
        found.append(Assignment(key_path(key), value.strip() if equals else None, file, number, optional))
    return found


def read(folders: Iterable[str]) -> tuple[list[Assignment], list[str]]:
    """Return (all assignments in the order they are applied, files that could not be read)."""
    found, unreadable = [], []
    for path in config_files(folders):
        try:
            with open(path, encoding="utf-8", errors="replace") as handle:
                found.extend(parse(handle.read(), path))
        except OSError:
            unreadable.append(path)
    return found, unreadable


def setters(assignments: Iterable[Assignment], key: str) -> list[Assignment]:
    """Return the lines that would set a key, in order: the last one wins."""
    path = key_path(key)
    every = list(assignments)
    plain = [one for one in every if not one.is_pattern and one.path == path]
    named = [one for one in plain if one.value is not None]
    if plain:
        return named
    return [one for one in every if one.is_pattern and one.value is not None and one.matches(path)]


def winner(assignments: Iterable[Assignment], key: str) -> Optional[Assignment]:
    """Return the line whose value a key has after boot, None when no file sets it."""
    found = setters(assignments, key)
    return found[-1] if found else None
