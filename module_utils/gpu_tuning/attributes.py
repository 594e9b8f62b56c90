# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings that are one sysfs attribute each: a word, a switch, or a choice among the file's own words."""

from __future__ import annotations

import abc
import dataclasses
import re
from typing import Optional

from .engine import Kind, Refused, writable
from .journal import Entry
from .kernel_files import is_recorded, read_text, write_text
from .rows import FAILED, READ_ONLY, UNSUPPORTED, WOULD_CHANGE, Row, Value

#: How a file shows its value: "performance", "1", or "always [madvise] never".
WORD, SWITCH, INVERTED_SWITCH, CHOICE = "word", "switch", "inverted switch", "choice"
ON, OFF = "on", "off"

_CHOSEN = re.compile(r"\[([^\]]+)\]")
_SWITCHES = {SWITCH: {"1": ON, "0": OFF}, INVERTED_SWITCH: {"0": ON, "1": OFF}}


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One attribute: its target within the kind, its file, how it shows its value, and what is wanted.

    ``choices`` are the words it takes where the file itself does not list them; empty where nothing says.
    """

    target: str
    path: str
    form: str
    wanted: Optional[str] = None
    choices: tuple[str, ...] = ()


class Attributes(Kind):
    """A kind whose settings are attributes; subclasses say which there are."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self._attributes: dict[str, Attribute] = {}

    @abc.abstractmethod
    def attributes(self) -> list[Attribute]:
        """Return every attribute of this kind that is there, wanted or not."""

    @abc.abstractmethod
    def nothing(self) -> list[Row]:
        """Return the rows that say why there is nothing to set."""

    def known(self, target: str) -> Attribute:
        """Return the attribute of a target, looked up anew in a rollback. Raises Refused."""
        if target not in self._attributes:
            self._attributes.update({each.target: each for each in self.attributes()})
        if target not in self._attributes:
            raise Refused(FAILED, f"no such setting any more: {self.kind} {target}")
        return self._attributes[target]

    def capture(self) -> list[Row]:
        """Return a row per attribute that is wanted, or per attribute when nothing is."""
        found = self.attributes()
        self._attributes = {each.target: each for each in found}
        wanted = [each for each in found if each.wanted is not None] or found
        return [self._captured(each) for each in wanted] or self.nothing()

    def _captured(self, attribute: Attribute) -> Row:
        row = self.recorded_row({"target": attribute.target})
        row.desired = attribute.wanted
        try:
            row.before = self.read(row)
            choices = self._choices(attribute)
        except OSError as error:
            return row.with_status(FAILED, f"cannot read {attribute.path}: {error.strerror}")
        except Refused as refused:
            return row.with_status(refused.status, refused.reason)
        if row.desired in (None, row.before):
            return row
        if choices and row.desired not in choices:
            return row.with_status(
                UNSUPPORTED, f"{row.desired} is not offered: {attribute.path} takes {', '.join(choices)}"
            )
        if not writable(attribute.path):
            return row.with_status(READ_ONLY, f"not writable: {attribute.path}; run as root on the host")
        return row.with_status(WOULD_CHANGE, f"found {row.before}")

    def _choices(self, attribute: Attribute) -> tuple[str, ...]:
        if attribute.form == CHOICE:
            return tuple(read_text(attribute.path).replace("[", "").replace("]", "").split())
        return attribute.choices

    def read(self, row: Row) -> Value:
        """Return the value. Raises OSError or Refused."""
        attribute = self.known(row.target)
        text = read_text(attribute.path).strip()
        if attribute.form == CHOICE:
            match = _CHOSEN.search(text)
            if match is None:
                raise Refused(FAILED, f"{attribute.path} reads {text!r}, in which no word is chosen")
            return match.group(1)
        if attribute.form in _SWITCHES:
            value = _SWITCHES[attribute.form].get(text)
            if value is None:
                raise Refused(FAILED, f"{attribute.path} reads {text!r}, expected 0 or 1")
            return value
        return text

    def write(self, row: Row) -> None:
        """Write the desired value as the file takes it. Raises OSError."""
        attribute = self.known(row.target)
        back = {word: digit for digit, word in _SWITCHES.get(attribute.form, {}).items()}
        text = f"{back.get(str(row.desired), row.desired)}\n"
        if attribute.form == CHOICE and is_recorded(attribute.path):
            text = _chosen(read_text(attribute.path), str(row.desired))
        write_text(attribute.path, text)

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded attribute."""
        return Row(f"{self.kind}:{entry['target']}", self.kind, entry["target"])


def _chosen(text: str, word: str) -> str:
    """Return a list of words as the kernel shows it once another is chosen: "always [madvise] never"."""
    return re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", f"[{word}]", _CHOSEN.sub(r"\1", text))
