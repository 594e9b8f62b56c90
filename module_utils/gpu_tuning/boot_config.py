# SPDX-License-Identifier: GPL-3.0-or-later
"""What the three back ends of the command line share: files to edit, entries to look at, a tool to run."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .boot_files import BootError, Content, run
from .cmdline import CommandLine, Token

#: What this project adds to a boot menu for the time of an upgrade is named so, in every loader.
OWN = "gpu-tuning"
WAY_BACK = f"{OWN}-way-back"


class Entry(NamedTuple):
    """One boot entry of this system: its name for people, its kernel's release, its command line."""

    name: str
    release: str
    line: CommandLine


class BootConfig(abc.ABC):
    """The command line of one boot loader on one machine."""

    name: str
    #: The tool that carries an edit into the boot entries, None where the edit is the entry.
    regenerate: Optional[list[str]] = None

    @abc.abstractmethod
    def entries(self) -> list[Entry]:
        """Return every entry that boots one of this system's kernels. Raises BootError."""

    @abc.abstractmethod
    def edits(self, wanted: Sequence[Token], removed: Sequence[Token]) -> dict[str, Content]:
        """Return the files' new content, only where it differs. Raises BootError, ValueError."""

    @abc.abstractmethod
    def owned_files(self) -> list[str]:
        """Return the paths that ``edits`` may change, for the record of their old content."""

    def refresh(self) -> None:
        """Carry the files' content into the boot entries. Raises BootError."""
        if self.regenerate:
            run(self.regenerate)

    def generated_files(self) -> list[str]:
        """Return what the tool writes, so that its failure can be undone."""
        return []

    def blame(self, token: Token) -> str:
        """Say why an entry may lack a token although it was set; empty when there is nothing to say."""
        return ""


def satisfied(entries: Sequence[Entry], wanted: Sequence[Token], removed: Sequence[Token]) -> bool:
    """Tell whether every entry (and there is one) carries what is wanted and nothing that is removed."""
    return bool(entries) and all(
        all(entry.line.has(token) for token in wanted) and all(entry.line.lacks(r) for r in removed)
        for entry in entries
    )


def on_live_host(*roots: str) -> bool:
    """Tell whether all roots are those of the running system, where its own tools may be run."""
    live = {"/etc", "/boot", "/proc", "/sys"}
    return all(os.path.realpath(root) in live for root in roots)


def required(value: Optional[str], what: str) -> str:
    """Return a text that must be there. Raises BootError."""
    if value is None:
        raise BootError(f"{what} is not there")
    return value
