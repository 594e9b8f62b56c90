# SPDX-License-Identifier: GPL-3.0-or-later
"""Boot Loader Specification entries (loader/entries/*.conf), as systemd-boot and GRUB's blscfg read them."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Sequence
from typing import Optional

from .boot_config import OWN, BootConfig, Entry
from .boot_files import Content, encoded, lines, text
from .cmdline import CommandLine, Token, check, parse

_LINE = re.compile(r"[ \t]*([A-Za-z-]+)[ \t]+(.*?)[ \t]*(\r?\n|\Z)")
_RELEASE = re.compile(r"(?:vmlinuz|vmlinux|kernel)-([^/\\]+)\Z")


@dataclasses.dataclass(frozen=True)
class BlsEntry:
    """One entry file."""

    path: str
    text: str

    @property
    def identity(self) -> str:
        """The name that bootctl takes: the file's, less a boot counter (+3-0)."""
        return re.sub(r"\+\d+(-\d+)?(?=\.conf\Z)", "", os.path.basename(self.path))

    def fields(self, key: str) -> list[str]:
        """Return the values of a key, in order."""
        found = map(_LINE.fullmatch, lines(self.text))
        return [match.group(2) for match in found if match and match.group(1) == key]

    def field(self, key: str) -> Optional[str]:
        """Return the last value of a key."""
        return next(iter(reversed(self.fields(key))), None)

    @property
    def line(self) -> CommandLine:
        """The command line: all options lines, joined as the specification says."""
        return parse(" ".join(self.fields("options")))

    @property
    def release(self) -> Optional[str]:
        """The kernel release: in the image's name, or the version field."""
        image = self.field("linux")
        match = _RELEASE.search(image or "")
        return match.group(1) if match else self.field("version") if image else None

    def with_options(self, line: CommandLine) -> str:
        """Return the text with other options: the first options line is rewritten, further ones go."""
        result, done = "", False
        for each in lines(self.text):
            match = _LINE.fullmatch(each)
            if not match or match.group(1) != "options":
                result += each
            elif not done:
                result += each[: match.start(2)] + line.text + each[match.end(2) :]
                done = True
        if done:
            return result
        return f"{result}{'' if result.endswith(chr(10)) or not result else chr(10)}options {line.text}\n"


def read(directory: str, machine_id: Optional[str] = None) -> list[BlsEntry]:
    """Return the Linux entries of a directory; another installation's (its machine-id) are left out."""
    entries = []
    for path in sorted(glob.glob(os.path.join(directory, "*.conf"))):
        entry = BlsEntry(path, text(path) or "")
        foreign = machine_id and (entry.field("machine-id") or machine_id) != machine_id
        if entry.field("linux") and not foreign:
            entries.append(entry)
    return entries


def own(path: str) -> bool:
    """Tell whether an entry is one that an upgrade has put there for its own time."""
    return os.path.basename(path).startswith(OWN)


class BlsEntries(BootConfig):
    """The command lines of entry files, each edited in place."""

    name = "bls"

    def __init__(self, directories: list[str], machine_id: Optional[str] = None) -> None:
        """Take the loader/entries directories of this system."""
        self.directories, self.machine_id = directories, machine_id

    def found(self) -> list[BlsEntry]:
        """Return this system's entries, those that an upgrade adds for its own time left out."""
        entries = [entry for each in self.directories for entry in read(each, self.machine_id)]
        return [entry for entry in entries if not own(entry.path)]

    def owned_files(self) -> list[str]:
        """Return every entry's path."""
        return [entry.path for entry in self.found()]

    def entries(self) -> list[Entry]:
        """Return the entries."""
        return [Entry(entry.identity, entry.release or "", entry.line) for entry in self.found()]

    def edits(self, wanted: Sequence[Token], removed: Sequence[Token]) -> dict[str, Content]:
        """Return the entries whose options change; the rest of each file stays byte for byte."""
        edits: dict[str, Content] = {}
        for entry in self.found():
            line = entry.line.changed(wanted, removed)
            check(line, entry.identity)
            if line != entry.line:
                edits[entry.path] = encoded(entry.with_options(line))
        return edits
