# SPDX-License-Identifier: GPL-3.0-or-later
"""Make recorded hosts, and say what changed in a tree of files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Union

import make_host


class Entry(NamedTuple):
    """One entry of a tree: ``kind`` is "file", "directory", "link" or "other".

    ``content`` is a file's bytes, a link's target, and empty for the rest.
    """

    kind: str
    mode: int
    content: Union[bytes, str]


def make_recorded_host(directory: Path, *options: str) -> Path:
    """Build the recorded host in ``directory`` and return it; ``options`` as recorded/make_host.py has them.

    Every call builds anew: that takes no longer than a copy of 16,204 files would.
    """
    make_host.main([str(directory), *options])
    return directory


def manifest(root: Path) -> dict[str, Entry]:
    """Return every entry below ``root`` by its relative path; links are not followed."""
    return dict(_walk(str(root), ""))


def _walk(directory: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    with os.scandir(directory) as entries:
        for each in entries:
            path = prefix + each.name
            yield path, _entry(each)
            if each.is_dir(follow_symlinks=False):
                yield from _walk(each.path, f"{path}/")


def _entry(each: os.DirEntry[str]) -> Entry:
    mode = each.stat(follow_symlinks=False).st_mode
    permissions = stat.S_IMODE(mode)
    if stat.S_ISLNK(mode):
        return Entry("link", permissions, os.readlink(each.path))
    if stat.S_ISDIR(mode):
        return Entry("directory", permissions, b"")
    if stat.S_ISREG(mode):
        return Entry("file", permissions, Path(each.path).read_bytes())
    return Entry("other", permissions, b"")


def changed_paths(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    """Return, sorted, the paths that came, went, or differ in kind, mode or content."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def changed_bits(before: bytes, after: bytes) -> list[tuple[int, int]]:
    """Return (offset, mask of changed bits) of every byte that differs.

    MaxReadReq of a register at 0x68 is [(0x69, mask inside 0x70)]. Raises ValueError where the sizes
    differ: then the question makes no sense.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} bytes became {len(after)}")
    pairs = enumerate(zip(before, after))
    return [(offset, old ^ new) for offset, (old, new) in pairs if old != new]
