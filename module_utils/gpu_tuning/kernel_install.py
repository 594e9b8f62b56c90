# SPDX-License-Identifier: GPL-3.0-or-later
"""/etc/kernel/cmdline: what kernel-install (systemd-boot) and proxmox-boot-tool give to new entries.

proxmox-boot-tool takes the first line only, and rewrites every entry at ``refresh``. kernel-install joins
the lines, and leaves existing entries as they are: those are edited in place (see bls).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Optional

from .bls import BlsEntries
from .boot_config import BootConfig, Entry
from .boot_files import BootError, Content, content, encoded, lines, text
from .cmdline import REPEATED, CommandLine, Token, check, parse

CMDLINE = "kernel/cmdline"


def edited(old: str, wanted: Sequence[Token], removed: Sequence[Token], only_first: bool) -> str:
    """Return the file's new text: tokens set on the first line, everything else byte for byte.

    Where the lines are joined, rivals on later lines go too.
    """
    found = lines(old) or [""]
    for line in found[:1] if only_first else filter(_counts, found):
        check(parse(line), "each entry to come")
    home = 0 if only_first else next((i for i, line in enumerate(found) if _counts(line)), 0)
    rivals = [*removed, *(Token(token.name) for token in wanted if token.name not in REPEATED)]
    for i, line in enumerate(found):
        if i == home:
            found[i] = _edited_line(line, wanted, removed)
        elif not only_first and _counts(line):
            found[i] = _edited_line(line, [], rivals)
    return "".join(found)


def _counts(line: str) -> bool:
    """Tell whether kernel-install takes a line: it is neither blank nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _edited_line(line: str, wanted: Sequence[Token], removed: Sequence[Token]) -> str:
    ending = line[len(line.rstrip("\r\n")) :]
    old = parse(line)
    new = old.changed(wanted, removed)
    # Spaces are kept too, unless the line has to change.
    return line if new == old else new.text + ending


class CmdlineFile(BootConfig):
    """The file and, where they can be seen, the entries made of it."""

    def __init__(self, etc_root: str, procfs_root: str, entries: BlsEntries, only_first: bool) -> None:
        """Take the roots and the entries that this file's content ends up in."""
        self.path = os.path.join(etc_root, CMDLINE)
        self.procfs_root, self.bls, self.only_first = procfs_root, entries, only_first

    def owned_files(self) -> list[str]:
        """Return the file."""
        return [self.path]

    def entries(self) -> list[Entry]:
        """Return the entries that can be seen."""
        return self.bls.entries()

    def line(self) -> CommandLine:
        """Return what the file gives to a new entry; without a file, what the running kernel was given."""
        found = text(self.path)
        if found is None:
            running = text(os.path.join(self.procfs_root, "cmdline"))
            return parse(running or "").without_loader_words()
        return self._joined(found)

    def _joined(self, found: str) -> CommandLine:
        """Return what the loader's tool makes of the file."""
        return parse(" ".join(lines(found)[:1] if self.only_first else filter(_counts, lines(found))))

    def edits(self, wanted: Sequence[Token], removed: Sequence[Token]) -> dict[str, Content]:
        """Return the file's new content. Raises ValueError for a line that could not boot."""
        found = text(self.path)
        old = f"{self.line().text}\n" if found is None else found
        new = edited(old, wanted, removed, self.only_first)
        line = self._joined(new)
        if not line.named("root") and (found is None or self.only_first):
            raise ValueError(f"the first line of {self.path} has no root=: entries made of it would not boot")
        check(line, self.path)
        return {} if encoded(new) == content(self.path) else {self.path: encoded(new)}


class ProxmoxBootTool(CmdlineFile):
    """systemd-boot under proxmox-boot-tool: the file, then ``refresh``, which writes every ESP's entries."""

    name = "proxmox-boot-tool"

    def __init__(
        self, etc_root: str, procfs_root: str, entries: BlsEntries, regenerate: Optional[list[str]]
    ) -> None:
        """Take the roots, the ESPs' entries and the command that refreshes them."""
        super().__init__(etc_root, procfs_root, entries, only_first=True)
        self.regenerate = regenerate


class SystemdBoot(CmdlineFile):
    """systemd-boot under kernel-install: the file for kernels to come, the entries of those that are here."""

    name = "systemd-boot"

    def __init__(self, etc_root: str, procfs_root: str, entries: BlsEntries) -> None:
        """Take the roots and the entries."""
        super().__init__(etc_root, procfs_root, entries, only_first=False)

    def owned_files(self) -> list[str]:
        """Return the file and the entries."""
        return [self.path, *self.bls.owned_files()]

    def edits(self, wanted: Sequence[Token], removed: Sequence[Token]) -> dict[str, Content]:
        """Return the file and the entries that change."""
        if not self.bls.found():
            raise BootError(f"no boot entry of this system in {', '.join(self.bls.directories) or 'any ESP'}")
        return {**super().edits(wanted, removed), **self.bls.edits(wanted, removed)}
