# SPDX-License-Identifier: GPL-3.0-or-later
"""Read /etc/default/grub and its drop-ins as the shell words that they are, without running them.

What a static reader can know is known exactly (quotes, escapes, $NAME, continued lines, last one wins); a
value that only a shell could know (``$()``, backquotes, inside an ``if``) is marked dynamic.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPENING = ("if", "for", "while", "until", "case", "{")
_CLOSING = ("fi", "done", "esac", "}")
_BETWEEN = ("then", "else", "elif", "do", "!")
#: Assignments may follow these on their line.
_PREFIXES = ("export", "readonly", "local")


class ShellSyntaxError(ValueError):
    """A file that grub-mkconfig could not read either; the sentence names file and line."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One NAME=value; ``dynamic``: the value, or whether it is set at all, is known to a shell only."""

    name: str
    value: str
    dynamic: bool
    path: str
    line: int

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.path}, line {int(self.line)}"


def assignments(files: Iterable[tuple[str, str]]) -> list[Assignment]:
    """Return the assignments of (path, text) pairs in the order they take effect. Raises ShellSyntaxError."""
    found: list[Assignment] = []
    for path, text in files:
        _Reader(path, text, found).read()
    return found


def last(found: Iterable[Assignment]) -> dict[str, Assignment]:
    """Return each name's last assignment."""
    return {each.name: each for each in found}


class _Reader:
    """One pass over one file; ``found`` grows and gives the values of $NAME."""

    def __init__(self, path: str, text: str, found: list[Assignment]) -> None:
        self.path, self.text, self.found = path, text, found
        self.at, self.line, self.depth = 0, 1, 0
        self.values: Mapping[str, Assignment] = last(found)

    def read(self) -> None:
        command_position = True
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "\n;&|()":
                self._step()
                command_position = True
            elif character in " \t\r<>":
                self._step()
            elif character == "#":
                self._skip_comment()
            else:
                command_position = self._command_word(command_position)

    def _command_word(self, command_position: bool) -> bool:
        """Read one word; return whether an assignment may follow it on its line."""
        start_line = self.line
        match = _NAME.match(self.text, self.at)
        if command_position and match and self.text.startswith(("=", "+="), match.end()):
            added = self.text[match.end()] == "+"
            self._step(match.end() + (2 if added else 1) - self.at)
            value, dynamic = self._word()
            self._assign(match.group(), value, dynamic, start_line, added)
            return True
        word, _ = self._word()
        if not command_position:
            return False
        if word in _OPENING or word in _CLOSING:
            self.depth += 1 if word in _OPENING else -1
        return word in (*_OPENING[4:], *_CLOSING, *_BETWEEN, *_PREFIXES)

    def _assign(self, name: str, value: str, dynamic: bool, line: int, added: bool) -> None:
        if added and name in self.values:
            value = self.values[name].value + value
            dynamic = dynamic or self.values[name].dynamic
        each = Assignment(name, value, dynamic or self.depth > 0, self.path, line)
        self.found.append(each)
        self.values = {**self.values, name: each}

    def _step(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _word(self) -> tuple[str, bool]:
        """Read one shell word; return its value and whether it is dynamic."""
        value, dynamic = "", False
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;&|<>()":
            character = self.text[self.at]
            if character == "'":
                part, part_dynamic = self._single_quoted(), False
            elif character == '"':
                part, part_dynamic = self._double_quoted()
            elif character == "\\":
                part, part_dynamic = self._escaped(), False
            elif character in "$`":
                part, part_dynamic = self._expansion()
            else:
                part, part_dynamic = character, False
                self._step()
            value, dynamic = value + part, dynamic or part_dynamic
        return value, dynamic

    def _escaped(self) -> str:
        taken = self.text[self.at + 1 : self.at + 2]
        self._step(2)
        return "" if taken == "\n" else taken

    def _single_quoted(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self._unclosed("'")
        value = self.text[self.at + 1 : end]
        self._step(end + 1 - self.at)
        return value

    def _double_quoted(self) -> tuple[str, bool]:
        value, dynamic, opened = "", False, self.line
        self._step()
        while self.text[self.at : self.at + 1] != '"':
            character = self.text[self.at : self.at + 1]
            if not character:
                raise self._unclosed('"', opened)
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                value += self._escaped()
            elif character in "$`":
                part, part_dynamic = self._expansion()
                value, dynamic = value + part, dynamic or part_dynamic
            else:
                value += character
                self._step()
        self._step()
        return value, dynamic

    def _expansion(self) -> tuple[str, bool]:
        """Read $NAME, ${NAME}, $(...), `...`; return the value and whether only a shell could know it."""
        rest = self.text[self.at :]
        match = re.match(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", rest)
        if match:
            self._step(match.end())
            known = self.values.get(match.group(1) or match.group(2))
            return (known.value, known.dynamic) if known else ("", False)
        if rest.startswith(("$(", "${")):
            self._step(self._balanced(rest, *(("(", ")") if rest[1] == "(" else ("{", "}"))))
            return "", True
        if rest.startswith("`"):
            end = rest.find("`", 1)
            if end < 0:
                raise self._unclosed("`")
            self._step(end + 1)
            return "", True
        self._step()
        return "$", False

    def _balanced(self, rest: str, opening: str, closing: str) -> int:
        """Return the length of a bracketed expansion, quotes inside it respected."""
        depth, quote, escaped = 0, "", False
        for i, character in enumerate(rest):
            if escaped or character == "\\":
                escaped = not escaped and quote != "'"
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character in (opening, closing):
                depth += 1 if character == opening else -1
                if depth == 0:
                    return i + 1
        raise self._unclosed("$" + opening)

    def _unclosed(self, what: str, line: int = 0) -> ShellSyntaxError:
        where = f"{self.path}, line {int(line or self.line)}"
        return ShellSyntaxError(
            f"{where}: {what} is not closed, so that no boot menu can be made: correct it"
        )
