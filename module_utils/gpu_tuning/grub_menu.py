# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the boot menu that grub-mkconfig has written (grub.cfg): entries, their command lines, the default."""

from __future__ import annotations

import dataclasses
import re
from typing import Optional

from .cmdline import CommandLine, parse

_SECTION = re.compile(r"### (BEGIN|END) (\S+) ###")
_OPENING = re.compile(r"\s*(menuentry|submenu)\s+(.*)\{\s*\Z")
_TITLE = re.compile(r"""(?:'((?:[^']|'\\'')*)'|"([^"]*)"|(\S+))""")
_ID = re.compile(r"""(?:\$menuentry_id_option|--id)[ =](?:'([^']*)'|"([^"]*)"|(\S+))""")
_LINUX = re.compile(r"\s*linux(?:16|efi)?\s+(\S+)[ \t]*(.*)")
_DEFAULT = re.compile(r"""\s*set default=(?:"([^"]*)"|'([^']*)'|(\S+))""")
_RELEASE = re.compile(r"(?:vmlinuz|vmlinux|kernel)-(\S+)\Z")
#: Sections whose entries boot this system's own kernels.
_OWN_SECTIONS = ("10_linux", "10_linux_zfs", "20_linux_xen", "10_linux_proxmox")


_NO_LINE = CommandLine()


@dataclasses.dataclass(frozen=True)
class MenuEntry:
    """One menuentry. ``path`` is what grub-reboot takes: the ids of its submenus and its own, joined by >."""

    title: str
    path: str
    index: str
    section: str
    body: str
    kernel: Optional[str] = None
    line: CommandLine = _NO_LINE

    @property
    def release(self) -> Optional[str]:
        """The kernel release in the image's name, None for what is no Linux."""
        match = _RELEASE.search(self.kernel or "")
        return match.group(1) if match else None

    @property
    def recovery(self) -> bool:
        """Tell whether this is a rescue entry."""
        return "-recovery-" in self.path or any(
            token.text in ("single", "recovery") for token in self.line.tokens
        )


@dataclasses.dataclass(frozen=True)
class Menu:
    """All entries in menu order, and the default as it is written ("0", "${saved_entry}", an id)."""

    entries: tuple[MenuEntry, ...]
    default: str

    def own_kernels(self) -> list[MenuEntry]:
        """Return the entries that boot this system's kernels and that grub-mkconfig made."""
        return [e for e in self.entries if e.release and e.section in _OWN_SECTIONS]

    def find(self, chosen: str) -> Optional[MenuEntry]:
        """Return what GRUB boots for a default: an id or title path, or an index path; None if nothing."""
        for entry in self.entries:
            if chosen in (entry.path, entry.index, entry.title, entry.path.rpartition(">")[2]):
                return entry
        # The index or id of a submenu means the submenu's first entry.
        return next(
            (e for e in self.entries if e.path.startswith(f"{chosen}>") or e.index.startswith(f"{chosen}>")),
            None,
        )

    def for_release(self, release: str) -> Optional[MenuEntry]:
        """Return the entry that boots a kernel release in the ordinary way; the one with an id of its own."""
        fitting = [e for e in self.own_kernels() if e.release == release and not e.recovery]
        return fitting[-1] if fitting else None


def read(text: str) -> Menu:
    """Return the menu in the text of a grub.cfg."""
    return _Reader().read(text)


class _Reader:
    def __init__(self) -> None:
        self.entries: list[MenuEntry] = []
        self.default = "0"
        self.section = ""
        #: Open submenus: path, index, and how many entries they have so far.
        self.open: list[tuple[str, str]] = []
        self.counts = [0]

    def read(self, text: str) -> Menu:
        lines = iter(text.splitlines())
        for line in lines:
            self._read_line(line, lines)
        return Menu(tuple(self.entries), self.default)

    def _read_line(self, line: str, rest: object) -> None:
        section, opening, default = _SECTION.match(line), _OPENING.match(line), _DEFAULT.match(line)
        if section:
            self.section = section.group(2).rpartition("/")[2] if section.group(1) == "BEGIN" else ""
        elif opening and opening.group(1) == "submenu":
            self.open.append(self._names(opening.group(2)))
            self.counts.append(0)
        elif opening:
            self._read_entry(opening.group(2), rest)
        elif line.strip() == "}" and self.open:
            self.open.pop()
            self.counts.pop()
            self.counts[-1] += 1
        elif default:
            value = next(group for group in default.groups() if group is not None)
            self.default = self.default if value == "${next_entry}" else value

    def _names(self, rest: str) -> tuple[str, str]:
        """Return the path of ids (a title where there is no id) and the path of indexes."""
        title, identity = _title(rest), _ID.search(rest)
        name = next(g for g in identity.groups() if g is not None) if identity else title
        above, above_index = self.open[-1] if self.open else ("", "")
        path = f"{above}>{name}" if above else name
        index = f"{above_index}>{self.counts[-1]}" if above_index else str(self.counts[-1])
        return path, index

    def _read_entry(self, rest: str, lines: object) -> None:
        path, index = self._names(rest)
        body, depth = [], 1
        for line in lines:  # type: ignore[attr-defined]
            depth += line.rstrip().endswith("{")
            depth -= line.strip() == "}"
            if depth == 0:
                break
            body.append(line)
        linux = next((match for match in map(_LINUX.match, body) if match), None)
        self.entries.append(
            MenuEntry(
                _title(rest),
                path,
                index,
                self.section,
                "\n".join(body),
                linux.group(1) if linux else None,
                parse(linux.group(2)) if linux else _NO_LINE,
            )
        )
        self.counts[-1] += 1


def _title(rest: str) -> str:
    match = _TITLE.match(rest.strip())
    return next((group for group in match.groups() if group is not None), "") if match else ""
