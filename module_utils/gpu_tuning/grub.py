# SPDX-License-Identifier: GPL-3.0-or-later
"""GRUB as Debian, Ubuntu and Proxmox set it up: one owned drop-in in /etc/default/grub.d, then update-grub.

Nobody else's file is edited. The drop-in comes last, takes rivals of our tokens out of the two variables
that it finds (so that "last one wins" cannot turn against us), and adds ours to GRUB_CMDLINE_LINUX, which
reaches every entry: GRUB_CMDLINE_LINUX_DEFAULT leaves the rescue entries out.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import Optional

from . import grub_defaults, grub_menu
from .boot_config import BootConfig, Entry
from .boot_files import BootError, Content, content, encoded, text
from .cmdline import REPEATED, CommandLine, Token, check, parse

VARIABLES = ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT")
DROP_IN = "default/grub.d/zz-gpu-tuning-cmdline.cfg"
#: These mean something to the shell that reads the drop-in, or to GRUB's own script language after it.
_NOT_FOR_GRUB = re.compile(r"[$`\\';&|<>{}]")

_HEAD = """\
# Written whole by kernel_cmdline (gpu-tuning), which reads the two kinds of lines below back.
"""
# Everything is kept byte for byte unless a word has to go; `set -f` keeps words from matching file names.
_STRIP = """
gpu_tuning_strip() {
	gpu_tuning_kept= gpu_tuning_quoted= gpu_tuning_drop= gpu_tuning_dropped=
	set -f
	for gpu_tuning_word in $1; do
		if [ -z "$gpu_tuning_quoted" ]; then
			case $gpu_tuning_word in
				%s) gpu_tuning_drop=1 gpu_tuning_dropped=1 ;;
				*) gpu_tuning_drop= ;;
			esac
		fi
		[ -n "$gpu_tuning_drop" ] || gpu_tuning_kept="$gpu_tuning_kept $gpu_tuning_word"
		while :; do
			case $gpu_tuning_word in *\\"*) gpu_tuning_word=${gpu_tuning_word#*\\"} ;; *) break ;; esac
			if [ -n "$gpu_tuning_quoted" ]; then gpu_tuning_quoted=; else gpu_tuning_quoted=1; fi
		done
	done
	set +f
	if [ -n "$gpu_tuning_dropped" ]; then gpu_tuning_kept=${gpu_tuning_kept# }; else gpu_tuning_kept=$1; fi
}
gpu_tuning_strip "${GRUB_CMDLINE_LINUX:-}"
GRUB_CMDLINE_LINUX=$gpu_tuning_kept
gpu_tuning_strip "${GRUB_CMDLINE_LINUX_DEFAULT:-}"
GRUB_CMDLINE_LINUX_DEFAULT=$gpu_tuning_kept
"""
_ADD = """\
GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX:+$GRUB_CMDLINE_LINUX }%s"
"""


def drop_in(wanted: Sequence[Token], removed: Sequence[Token]) -> Content:
    """Return the drop-in's bytes, None when it has nothing to do. A pure function of what it is to do."""
    if not wanted and not removed:
        return None
    notes = [f"# set {token.text}\n" for token in wanted] + [f"# remove {token.text}\n" for token in removed]
    stripped = [_pattern(t, t.name in REPEATED) for t in wanted]
    stripped += [_pattern(r, r.value is not None) for r in removed]
    added = " ".join(token.text for token in wanted).replace('"', '\\"')
    strip = _STRIP % " | ".join(dict.fromkeys(stripped))
    return encoded(_HEAD + "".join(notes) + strip + (_ADD % added if added else ""))


def _pattern(token: Token, exact: bool) -> str:
    """Return a shell pattern for a name in both spellings, alone and with any value, or for one token."""
    name, _, value = token.text.strip('"').partition("=")
    spelt = re.sub("[-_]", "'[-_]'", f"'{name}'").replace("''", "")
    if exact:
        return f"{spelt}'={value.strip(chr(34))}'" if token.value is not None else spelt
    return f"{spelt} | {spelt}=*"


def noted(data: Optional[str]) -> tuple[list[Token], list[Token]]:
    """Return what a drop-in's own notes say it sets and removes."""
    lines = (data or "").splitlines()
    wanted = [Token(line[len("# set ") :]) for line in lines if line.startswith("# set ")]
    return wanted, [Token(line[len("# remove ") :]) for line in lines if line.startswith("# remove ")]


class Grub(BootConfig):
    """The command line of GRUB's generated menu."""

    name = "grub"

    def __init__(self, etc_root: str, boot_root: str, regenerate: Optional[list[str]]) -> None:
        """Only remember where things are."""
        self.etc_root, self.boot_root, self.regenerate = etc_root, boot_root, regenerate
        self.drop_in_path = os.path.join(etc_root, DROP_IN)
        self.menu_path = os.path.join(boot_root, "grub/grub.cfg")

    def owned_files(self) -> list[str]:
        """Return the drop-in alone."""
        return [self.drop_in_path]

    def generated_files(self) -> list[str]:
        """Return the menu."""
        return [self.menu_path]

    def menu(self) -> grub_menu.Menu:
        """Return the generated menu. Raises BootError."""
        found = text(self.menu_path)
        if found is None:
            raise BootError(f"{self.menu_path} is not there: run update-grub once, then this again")
        return grub_menu.read(found)

    def entries(self) -> list[Entry]:
        """Return the entries that grub-mkconfig made for this system's kernels."""
        return [Entry(e.title, e.release or "", e.line) for e in self.menu().own_kernels()]

    def defaults(self, with_own: bool = False) -> list[grub_defaults.Assignment]:
        """Return every assignment in the order of grub-mkconfig, our drop-in's left out."""
        paths = [os.path.join(self.etc_root, "default/grub")]
        paths += sorted(glob.glob(os.path.join(self.etc_root, "default/grub.d/*.cfg")))
        files = ((path, text(path)) for path in paths if with_own or path != self.drop_in_path)
        try:
            return grub_defaults.assignments((path, found) for path, found in files if found is not None)
        except grub_defaults.ShellSyntaxError as error:
            raise BootError(f"{error}; nothing was changed") from error

    def configured(self) -> tuple[CommandLine, bool]:
        """Return what all files but our drop-in configure, and whether a part is known to a shell only."""
        found = grub_defaults.last(self.defaults())
        variables = [found[name] for name in VARIABLES if name in found]
        return parse(" ".join(each.value for each in variables)), any(each.dynamic for each in variables)

    def edits(self, wanted: Sequence[Token], removed: Sequence[Token]) -> dict[str, Content]:
        """Return the drop-in: what it did already, less what is taken back, and what entries lack."""
        for token in (*wanted, *removed):
            if _NOT_FOR_GRUB.search(token.text):
                raise ValueError(f"{token.text} holds a character that GRUB or its shell would not keep")
        new = drop_in(*self._owned(wanted, removed))
        for entry in self.entries():
            check(entry.line.changed(wanted, removed), entry.name)
        return {} if new == content(self.drop_in_path) else {self.drop_in_path: new}

    def _owned(self, wanted: Sequence[Token], removed: Sequence[Token]) -> tuple[list[Token], list[Token]]:
        """Return the tokens that the drop-in is to set and those that it is to remove."""
        line, dynamic = self.configured()
        entries = self.entries()
        had, had_removed = noted(text(self.drop_in_path))

        def theirs(token: Token) -> bool:
            return (dynamic or line.has(token)) and bool(entries) and all(e.line.has(token) for e in entries)

        kept = CommandLine(tuple(had)).changed([], removed)
        new = [t for t in wanted if kept.has(t) or not theirs(t)]
        gone = [r for r in removed if r in had_removed or dynamic or not line.lacks(r)]
        gone += [r for r in had_removed if r not in gone and not any(r.name == t.name for t in wanted)]
        return list(kept.changed(new).tokens), gone

    def blame(self, token: Token) -> str:
        """Name the assignments of the two variables that come after our drop-in."""
        found = self.defaults(with_own=True)
        ours = max((i for i, a in enumerate(found) if a.path == self.drop_in_path), default=len(found))
        later = [a.place for a in found[ours + 1 :] if a.name in VARIABLES]
        return f"{' and '.join(later)} sets the command line after {self.drop_in_path}" if later else ""
