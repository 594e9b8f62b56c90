# SPDX-License-Identifier: GPL-3.0-or-later
"""The grammar of container configs, read so that every byte can be written back.

Two formats: Proxmox (``/etc/pve/lxc/<vmid>.conf``; pve-container, src/PVE/LXC/Config.pm,
parse_pct_config) and plain LXC (``/var/lib/lxc/<name>/config``; lxc, src/lxc/confile.c). Parsing never
raises: a line that the container's own parser would skip is a line of kind ``dead`` or ``other``.

Text is bytes decoded as latin-1, so that any byte survives the way there and back.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Optional

PROXMOX = "proxmox"
LXC = "lxc"
FORMATS = (PROXMOX, LXC)

#: Line kinds. ``raw``: an lxc.* key that takes effect; ``option``: any other key of Proxmox;
#: ``section``: a Proxmox header; ``comment``: a comment or description; ``blank``; ``dead``: a line
#: that names a device but is skipped by the parser; ``fatal``: makes plain LXC refuse the whole file;
#: ``other``: anything else that the parser ignores.
RAW, OPTION, SECTION, COMMENT, BLANK, DEAD, FATAL, OTHER = (
    "raw",
    "option",
    "section",
    "comment",
    "blank",
    "dead",
    "fatal",
    "other",
)

_ASCII = re.ASCII
_SECTION = re.compile(r"\[(pve:pending|[a-z][a-z0-9_-]+)\]\s*$", _ASCII | re.IGNORECASE)
_PVE_RAW = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*$", _ASCII)
_PVE_OPTION = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$", _ASCII)
_LXC_RAW = re.compile(r"[ \t]*(lxc\.[^=]*?)[ \t]*=[ \t]*(.*?)[ \t]*$", _ASCII)
#: What a line looks like that its author meant to be about devices, however it is spelt.
_DEVICE_LINE = re.compile(
    r"[^#]*?(?:\blxc\s*\.\s*cgroup2?\s*\.\s*devices\s*\.\s*(?:allow|deny)\b"
    r"|\blxc\s*\.\s*mount\s*\.\s*entry\b.*?/dev/|^\s*dev\d+\s*[:=]\s*(?:path=)?/dev/)",
    _ASCII | re.IGNORECASE,
)
_MAX_DEV_INDEX = 255


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a config. ``start`` is the offset of its first character in the text.

    ``value_start`` is the offset of the value (quotes excluded) in the text; ``section`` is None in
    the live part, else the name of the snapshot or ``pve:pending``; ``reason`` says why a dead or
    fatal line has no effect; ``source`` is the included file a line comes from, with ``number`` 0.
    """

    number: int
    start: int
    text: str
    kind: str
    section: Optional[str] = None
    key: str = ""
    value: str = ""
    value_start: int = 0
    reason: str = ""
    source: str = ""

    @property
    def content(self) -> str:
        """The line without its line ending and without trailing blanks."""
        return self.text.rstrip()


@dataclasses.dataclass(frozen=True)
class Config:
    """A parsed config: ``"".join(line.text for line in lines) == text``."""

    text: str
    format: str
    lines: tuple[Line, ...]

    def live(self) -> list[Line]:
        """Return the lines above the first section header: the ones a start of the container reads."""
        return [line for line in self.lines if line.section is None and line.kind != SECTION]

    def sections(self) -> list[str]:
        """Return the names of the snapshot and pending sections, in order."""
        return [line.key for line in self.lines if line.kind == SECTION]

    def of_section(self, name: str) -> list[Line]:
        """Return the lines of one section, its header excluded."""
        return [line for line in self.lines if line.section == name and line.kind != SECTION]

    def values(self, key: str) -> list[str]:
        """Return the values that one key has in the live part, in order."""
        return [line.value for line in self.live() if line.key == key and line.kind in (RAW, OPTION)]

    def value(self, key: str) -> Optional[str]:
        """Return the last value of a key in the live part, or None."""
        found = self.values(key)
        return found[-1] if found else None


def parse(text: str, config_format: str) -> Config:
    """Return the parsed config; ``config_format`` is ``proxmox`` or ``lxc``. Never raises for any text."""
    lines: list[Line] = []
    section: Optional[str] = None
    start = 0
    # Only the newline ends a line for either parser; str.splitlines() would split at more characters.
    for number, piece in enumerate(_split(text), start=1):
        classify = _proxmox_line if config_format == PROXMOX else _lxc_line
        line = classify(number, start, piece)
        if line.kind == SECTION:
            section = line.key
        lines.append(dataclasses.replace(line, section=section))
        start += len(piece)
    return Config(text, config_format, tuple(lines))


def _split(text: str) -> list[str]:
    pieces = [f"{piece}\n" for piece in text.split("\n")]
    pieces[-1] = pieces[-1][:-1]
    return pieces if pieces[-1] else pieces[:-1]


def _proxmox_line(number: int, start: int, text: str) -> Line:
    body = text.rstrip("\n")
    if not body.strip():
        return Line(number, start, text, BLANK)
    if body.startswith("#"):
        return Line(number, start, text, COMMENT)
    header = _SECTION.match(body)
    if header:
        return Line(number, start, text, SECTION, key=header.group(1))
    for pattern, kind in ((_PVE_RAW, RAW), (_PVE_OPTION, OPTION)):
        match = pattern.match(body)
        if match:
            line = Line(
                number, start, text, kind, None, match.group(1), match.group(2), start + match.start(2)
            )
            return _checked_dev_index(line)
    return _ignored(number, start, text, _why_proxmox_skips(body))


def _checked_dev_index(line: Line) -> Line:
    if line.kind != OPTION or dev_index(line.key) is None:
        return line
    if (dev_index(line.key) or 0) > _MAX_DEV_INDEX:
        return dataclasses.replace(line, kind=DEAD, reason=f"Proxmox knows dev0 to dev{_MAX_DEV_INDEX} only")
    if not passthrough_path(line.value).startswith("/dev/"):
        return dataclasses.replace(line, kind=DEAD, reason="the path of a devN line must begin with /dev/")
    return line


def _why_proxmox_skips(body: str) -> str:
    if body[:1] in (" ", "\t"):
        return "it is indented; a key must begin in the first column"
    if re.match(r"\S+\s+:", body, _ASCII):
        return "a blank stands before the colon"
    if re.match(r"[^:=]*[A-Z]", body, _ASCII):
        return "keys are lower case"
    return "its syntax is unknown"


def _ignored(number: int, start: int, text: str, reason: str) -> Line:
    if not text.lstrip().startswith("#") and _DEVICE_LINE.match(text):
        return Line(number, start, text, DEAD, reason=reason)
    return Line(number, start, text, OTHER)


def _lxc_line(number: int, start: int, text: str) -> Line:
    body = text.rstrip("\n")
    stripped = body.lstrip(" \t")
    if not stripped.strip():
        return Line(number, start, text, BLANK)
    if stripped.startswith("#"):
        return Line(number, start, text, COMMENT)
    if not stripped.startswith("lxc."):
        return _ignored(number, start, text, "plain LXC reads only lines that begin with lxc. in lower case")
    match = _LXC_RAW.match(body)
    if not match:
        return Line(number, start, text, FATAL, reason="it has no '=', so LXC refuses the whole file")
    if not re.fullmatch(r"lxc\.[A-Za-z0-9_.-]+", match.group(1)):
        return Line(number, start, text, FATAL, reason="its key is unknown, so LXC refuses the whole file")
    value, offset = _unquoted(match.group(2), match.start(2))
    return Line(number, start, text, RAW, None, match.group(1), value, start + offset)


def _unquoted(value: str, offset: int) -> tuple[str, int]:
    if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]:
        return value[1:-1], offset + 1
    return value, offset


def dev_index(key: str) -> Optional[int]:
    """Return N of a Proxmox ``devN`` key, or None for any other key."""
    match = re.fullmatch(r"dev([0-9]{1,9})", key)
    return int(match.group(1)) if match else None


def passthrough_path(value: str) -> str:
    """Return the device path of a ``devN`` value (``/dev/x,mode=0660`` or ``path=/dev/x``)."""
    parts = value.split(",")
    named = [part[len("path=") :] for part in parts if part.startswith("path=")]
    return named[0] if named else parts[0]


@dataclasses.dataclass(frozen=True)
class DevicePath:
    """A device the config brings into the container: by a mount entry or a ``devN`` line.

    ``path`` is its path on the host, ``target`` the one in the container.
    """

    path: str
    target: str
    line: Line
    passthrough: bool
    optional: bool


def device_paths(config: Config) -> list[DevicePath]:
    """Return the /dev paths that live mount entries and ``devN`` lines name, in order."""
    found = []
    for line in config.live():
        if line.kind == RAW and line.key == "lxc.mount.entry":
            fields = line.value.split()
            if fields and fields[0].startswith("/dev/"):
                options = fields[3].split(",") if len(fields) > 3 else []
                path, target = (_unescape(field) for field in (*fields, "")[:2])
                found.append(DevicePath(path, f"/{target.lstrip('/')}", line, False, "optional" in options))
        elif line.kind == OPTION and dev_index(line.key) is not None:
            path = passthrough_path(line.value)
            found.append(DevicePath(path, path, line, True, False))
    return found


def _unescape(path: str) -> str:
    # fstab's escapes: a blank in a path is \040.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8) & 0xFF), path)


def detect_format(path: str, text: str) -> str:
    """Return the format of a config from its name, else from its text (Proxmox unless LXC is plain)."""
    name = os.path.basename(path)
    if re.fullmatch(r"[0-9]+\.conf", name):
        return PROXMOX
    if name == "config":
        return LXC
    if re.search(
        r"^(?:arch|hostname|rootfs|ostype|memory|unprivileged|mp\d+|net\d+|dev\d+):", text, re.MULTILINE
    ):
        return PROXMOX
    return LXC if re.search(r"^[ \t]*lxc\.[a-z0-9_.]+[ \t]*=", text, re.MULTILINE) else PROXMOX


def start_order(config: Config) -> int:
    """Return the place of a container in the boot order; lower starts first, unknown last."""
    if config.format == PROXMOX:
        match = re.search(r"(?:^|,)(?:order=)?([0-9]{1,9})", config.value("startup") or "")
        return int(match.group(1)) if match else 1 << 30
    value = config.value("lxc.start.order") or ""
    # lxc-autostart begins with the highest number.
    return -int(value) if re.fullmatch(r"-?[0-9]{1,9}", value) else 1 << 30


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace ``text[start:end]`` of a config by ``new``."""

    start: int
    end: int
    new: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits made at once, each against the old text. Edits must not overlap."""
    pieces = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError("edits overlap")
        pieces += [text[position : edit.start], edit.new]
        position = edit.end
    return "".join([*pieces, text[position:]])
