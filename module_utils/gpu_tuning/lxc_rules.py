# SPDX-License-Identifier: GPL-3.0-or-later
"""Device rules of a container config: one rule's syntax, and which rules are in force together.

The syntax is that of lxc's device_cgroup_rule_parse (src/lxc/cgroups/cgroup_utils.c), measured on
LXC 5.0.2; the kernel's version 1 devices controller reads the same form.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Optional

from . import lxc_config as grammar
from .lxc_config import Config, Line
from .proc_devices import MAX_MAJOR

V1 = "cgroup1"
V2 = "cgroup2"

_KEY = re.compile(r"lxc\.(cgroup2?)\.devices\.(allow|deny)")
_RULE = re.compile(
    r"([abc])[ \t\v\f\r](\*|[0-9]{1,49}):(\*|[0-9]{1,49})[ \t\v\f\r](?:([rwm]{3})|([rwm]{1,2})$)"
)
_PATH_RULE = re.compile(r"(/\S+) +([rwm]{1,3})$")
_INT_MAX = (1 << 31) - 1
_MAX_INCLUDE_DEPTH = 10
_MAX_INCLUDE_SIZE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rule:
    """One device rule. ``major`` and ``minor`` are None for ``*``; ``path`` is set for a rule by path.

    ``type`` is ``a`` (everything), ``b``, ``c`` or ``path``; ``major_start`` and ``major_end`` delimit
    the digits of the major in the config's text; ``reason`` is set when the rule is skipped or opens
    nothing, and then the other fields say nothing.
    """

    line: Line
    family: str
    allow: bool
    text: str
    type: str = ""
    major: Optional[int] = None
    minor: Optional[int] = None
    access: str = ""
    path: str = ""
    major_start: int = 0
    major_end: int = 0
    reason: str = ""

    @property
    def key(self) -> str:
        """The config key that the rule stands under."""
        return self.line.key

    def covers(self, major: int, minor: Optional[int]) -> bool:
        """Return whether the rule is about this character device (minor None: about any of the major)."""
        if self.type == "a":
            return True
        if self.type != "c" or self.major not in (None, major) or "r" not in self.access:
            return False
        return self.minor is None or minor is None or self.minor == minor


def rule_of(line: Line) -> Optional[Rule]:
    """Return the device rule of a raw line; None for other keys and for the empty value, which is no rule."""
    match = _KEY.fullmatch(line.key) if line.kind == grammar.RAW else None
    if not match or not line.value:
        return None
    family = V1 if match.group(1) == "cgroup" else V2
    rule = Rule(line, family, match.group(2) == "allow", line.value)
    # The version 1 controller reads only the letter of an a rule; version 2 code fails on the long form.
    if line.value == "a" or (family == V1 and re.match(r"a\s", line.value)):
        return dataclasses.replace(rule, type="a")
    by_path = _PATH_RULE.match(line.value)
    if by_path:
        return dataclasses.replace(rule, type="path", path=by_path.group(1), access=by_path.group(2))
    return _numbered(rule)


def _numbered(rule: Rule) -> Rule:
    match = _RULE.match(rule.text)
    if not match:
        return dataclasses.replace(rule, reason=_syntax_reason(rule.text))
    kind, major, minor, three, fewer = match.groups()
    numbers = [None if number == "*" else int(number) for number in (major, minor)]
    reason = _number_reason(kind, numbers[0], numbers[1])
    start = rule.line.value_start + match.start(2)
    return dataclasses.replace(
        rule,
        type=kind,
        major=numbers[0],
        minor=numbers[1],
        access=three or fewer,
        major_start=start,
        major_end=start + len(major),
        reason=reason,
    )


def _number_reason(kind: str, major: Optional[int], minor: Optional[int]) -> str:
    if kind == "a":
        return "LXC cannot load it as a BPF program, so the container does not start; write the value a alone"
    if max(major or 0, minor or 0) > _INT_MAX:
        return "the number does not fit an int"
    if kind == "c" and major is not None and major > MAX_MAJOR:
        return (
            f"major {major} is over {MAX_MAJOR}, the highest the kernel gives a character device, so it "
            "opens nothing"
        )
    return ""


def _syntax_reason(text: str) -> str:
    if re.match(r"[abc]\s+(0[xX]|[0-9]*[a-fA-F])", text):
        return "the major is hexadecimal and LXC reads decimal numbers only"
    if "#" in text:
        return (
            "LXC reads the text after the access letters as access letters; only rwm may be followed by a "
            "comment"
        )
    if re.match(r"[ABC]\s", text):
        return "the type must be a lower-case a, b or c"
    return "the form is type, one blank, MAJOR:MINOR, one blank, one to three of rwm"


@dataclasses.dataclass(frozen=True)
class Enforcement:
    """What the device rules of a container add up to.

    ``enforced`` says whether opens are restricted at all; ``why`` says why not, as one of ``allow_all``
    (a line of its own allows everything), ``unprivileged`` (Proxmox allows everything), ``no_rules``
    (nothing is attached) or "". ``line`` is the line that decided it, ``active`` the allow rules in
    force (from included files too), ``void`` maps the number of a line of this file to the reason why
    its rule has no effect.
    """

    enforced: bool
    why: str
    line: Optional[Line]
    active: tuple[Rule, ...]
    void: dict[int, str]


@dataclasses.dataclass
class _State:
    """The list being built. ``open`` is deny-list mode: all is allowed but what a rule denies."""

    family: str
    open: bool
    why: str = ""
    line: Optional[Line] = None
    active: list[Rule] = dataclasses.field(default_factory=list)
    void: dict[int, str] = dataclasses.field(default_factory=dict)
    base_rules: bool = False
    closed: bool = False

    def drop(self, reason: str) -> None:
        self.void.update({rule.line.number: reason for rule in self.active if rule.line.number})
        self.active.clear()
        self.base_rules = False

    def switch(self, allow: bool, line: Line) -> None:
        # A global rule resets every rule before it, of LXC's own files as well.
        self.drop(f"'{line.key}' with the value a in {place(line)} resets it")
        self.open, self.why, self.line = allow, "allow_all" if allow else "", line
        self.closed = not allow

    def add(self, rule: Rule) -> None:
        # In deny-list mode single allow rules are skipped; `open` without a reason is a version 1 list
        # that nothing has closed yet.
        if rule.allow and not (self.open and self.why):
            self.active.append(rule)


def place(line: Line) -> str:
    """Return where a line stands, for a sentence: its number, or the included file."""
    return f"line {line.number}" if line.number else line.source


def enforcement(
    config: Config, family: str, read_include: Optional[Callable[[str], list[Line]]] = None
) -> Enforcement:
    """Return which rules of one family are in force when the container starts.

    ``read_include`` returns the lines of an ``lxc.include`` value; lines from there carry the number 0.
    """
    state = _initial(config, family)
    for line in with_includes(config, read_include or (lambda _path: [])):
        _feed(state, line)
    return _result(state)


def with_includes(config: Config, read_include: Callable[[str], list[Line]]) -> list[Line]:
    """Return the live lines with every ``lxc.include`` replaced by the lines it brings, in place."""
    lines: list[Line] = []
    for line in config.live():
        lines += (
            read_include(line.value) if line.key == "lxc.include" and line.kind == grammar.RAW else [line]
        )
    return lines


def _initial(config: Config, family: str) -> _State:
    if config.format == grammar.PROXMOX:
        # Proxmox puts its common.conf before the user's lines (deny a and the base devices) and, for an
        # unprivileged container, userns.conf.d/01-pve.conf (allow a).
        if (config.value("unprivileged") or "").strip() == "1":
            return _State(family, open=True, why="unprivileged")
        return _State(family, open=False, base_rules=True, closed=True)
    # A version 1 cgroup begins with its parent's list, which is all devices; for version 2 LXC begins
    # with an empty allow list and attaches nothing while it stays empty.
    return _State(family, open=family == V1)


def _feed(state: _State, line: Line) -> None:
    match = _KEY.fullmatch(line.key) if line.kind == grammar.RAW else None
    if not match or (V1 if match.group(1) == "cgroup" else V2) != state.family:
        return
    allow = match.group(2) == "allow"
    rule = rule_of(line)
    if rule is None:
        if allow:
            state.drop(f"the empty value in {place(line)} clears every allow rule before it")
            state.line = line
        return
    if rule.reason:
        return
    if rule.type == "a":
        state.switch(allow, line)
    else:
        state.add(rule)


def _result(state: _State) -> Enforcement:
    nothing_attached = state.family == V2 and not state.active and not state.base_rules
    never_closed = state.family == V1 and not state.closed
    enforced = not (state.open or nothing_attached or never_closed)
    why = "" if enforced else state.why or "no_rules"
    return Enforcement(enforced, why, state.line, tuple(state.active), state.void)


class Includes:
    """Reads ``lxc.include`` values once each: a file, or the ``*.conf`` files of a directory.

    ``broken`` collects the paths that cannot be read; LXC then refuses the whole config.
    """

    def __init__(self) -> None:
        """Begin with nothing read."""
        self.broken: dict[str, str] = {}
        self._cache: dict[str, list[Line]] = {}

    def __call__(self, path: str) -> list[Line]:
        """Return the lines that an include brings, nested includes resolved, each with the number 0."""
        return self._read(path, 0)

    def _read(self, path: str, depth: int) -> list[Line]:
        if path not in self._cache:
            self._cache[path] = []  # an include of itself brings nothing more
            self._cache[path] = self._lines(path, depth)
        return self._cache[path]

    def _lines(self, path: str, depth: int) -> list[Line]:
        lines: list[Line] = []
        try:
            for file in _include_files(path):
                for line in grammar.parse(_include_text(file), grammar.LXC).lines:
                    if line.key == "lxc.include" and depth < _MAX_INCLUDE_DEPTH:
                        lines += self._read(line.value, depth + 1)
                    else:
                        lines.append(dataclasses.replace(line, number=0, source=file))
        except (OSError, ValueError) as error:
            self.broken[path] = str(getattr(error, "strerror", None) or error)
        return lines


def _include_files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".conf")]


def _include_text(path: str) -> str:
    if os.stat(path).st_size > _MAX_INCLUDE_SIZE:
        raise ValueError("it is over 1 MiB")
    with open(path, "rb") as handle:
        return handle.read(_MAX_INCLUDE_SIZE).decode("latin-1")
