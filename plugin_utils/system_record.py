# SPDX-License-Identifier: GPL-3.0-or-later
"""system-improve.md on the controller: several runs add to it, each to a section of its own."""

from __future__ import annotations

import pathlib
from typing import Optional

from gpu_tuning.benchmark.documents import write_text

NAME = "system-improve.md"


def newest(directory: Optional[str], name: str = NAME) -> Optional[str]:
    """Return the newest file of a name in a host's records (their folders' names are times)."""
    found = sorted(pathlib.Path(directory).glob(f"*/{name}")) if directory else []
    return str(found[-1]) if found else None


def put_section(path: str, owner: str, section: str) -> bool:
    """Put ``owner``'s section into a record, in place of an earlier one; return whether the file changed.

    Everything outside its two marker comments stays byte for byte as it was. Raises OSError.
    """
    begin, end = f"<!-- {owner} begin -->", f"<!-- {owner} end -->"
    target = pathlib.Path(path)
    old = target.read_bytes().decode() if target.exists() else ""  # bytes: line ends stay as they are
    block = f"{begin}\n{section.strip()}\n{end}"
    first, last = old.find(begin), old.find(end)
    if 0 <= first < last:
        new = old[:first] + block + old[last + len(end) :]
    else:
        new = (old.rstrip("\n") + "\n\n" if old else "# System record\n\n") + block + "\n"
    if new != old:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, new)
    return new != old
