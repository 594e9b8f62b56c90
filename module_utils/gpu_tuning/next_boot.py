# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host will be like after its next boot: two facts per setting, beside its value now.

``in_file`` rows say what our own file holds, ``at_boot`` rows what is effective once everything that sets
a value at boot has done so. Both are read from files; nothing is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, Optional

from . import other_tuners, sysctl_d
from .engine import Refused
from .kernel_files import read_text
from .other_tuners import Tuned
from .persist_places import APPLY_UNIT, Places
from .rows import FAILED, NOT_APPLICABLE, OK, OVERRIDDEN, Row
from .sysctl import Setting, normalised, same_tokens, setting, target_value

IN_FILE, AT_BOOT = "in_file", "at_boot"
APPLIED = "applied"

Sections = dict[str, dict[str, Any]]


def wanted_sysctls(sections: Sections) -> list[Setting]:
    """Return the sysctls a policy wants, as checked settings."""
    section = sections.get("sysctl_snapshot") or {}
    return [setting(each["name"], each["value"], each["match"]) for each in section.get("settings") or ()]


def wanted_modules(sections: Sections) -> list[str]:
    """Return the kernel modules a policy wants, as the kernel writes their names."""
    section = sections.get("kernel_module") or {}
    return [each["name"].replace("-", "_") for each in section.get("modules") or ()]


def rows(
    sections: Sections, places: Places, left_out: dict[str, str], planned: Optional[dict[str, str]] = None
) -> list[Row]:
    """Return both rows of every setting.

    ``left_out``: why settings are not persisted, by id. ``planned``: the sysctls and modules as they would
    be written, for a check run; otherwise files are read as they are.
    """
    reader = _Reader(places, planned)
    found: list[Row] = []
    for wanted in wanted_sysctls(sections):
        found += reader.sysctl(wanted, left_out.get(f"sysctl:{wanted.name}"))
    for name in wanted_modules(sections):
        found += reader.module(name, left_out.get(f"module:{name}"))
    for name, section in sections.items():
        if name not in ("sysctl_snapshot", "kernel_module"):
            found += reader.section(name, section)
    return found


class _Reader:
    """Everything that is read once for all rows."""

    def __init__(self, places: Places, planned: Optional[dict[str, str]]) -> None:
        self.places, self.planned = places, planned
        own = None if planned is None else planned.get(places.drop_in)
        self.assignments = _assignments(places, own)
        self.own = [each for each in self.assignments if each.file == places.drop_in]
        self.tuned = other_tuners.tuned(places)
        self.document = self._document()
        self.modules = self._lines(places.modules)

    def _text(self, path: str) -> Optional[str]:
        if self.planned is not None and path in self.planned:
            return self.planned[path]
        try:
            return read_text(path)
        except OSError:
            return None

    def _document(self) -> dict[str, Any]:
        try:
            found = json.loads(self._text(self.places.policy) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _lines(self, path: str) -> list[str]:
        text = self._text(path) or ""
        return [line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] not in "#;"]

    def sysctl(self, wanted: Setting, left_out: Optional[str]) -> list[Row]:
        """Return what our file and what the boot makes of a sysctl."""
        identity = f"sysctl:{wanted.name}"
        file, boot = _row(IN_FILE, identity, wanted.value), _row(AT_BOOT, identity, wanted.value)
        if left_out:
            return [_not_persisted(file, left_out), _not_persisted(boot, left_out)]
        mine = sysctl_d.winner(self.own, wanted.name)
        winner = sysctl_d.winner(self.assignments, wanted.name)
        return [self._sysctl_in_file(file, wanted, mine, winner), self._sysctl_at_boot(boot, wanted, winner)]

    def _sysctl_in_file(
        self,
        row: Row,
        wanted: Setting,
        mine: Optional[sysctl_d.Assignment],
        winner: Optional[sysctl_d.Assignment],
    ) -> Row:
        if mine is None or mine.value is None:
            if wanted.match != "exact" and winner and meets(wanted, winner.value):
                return row.with_status(OK, f"not needed: {_place(winner)} sets {winner.value}")
            return row.with_status(FAILED, f"{self.places.drop_in} has no line for {wanted.name}")
        row.before = row.after = normalised(mine.value)
        if meets(wanted, mine.value):
            return row
        return row.with_status(
            OVERRIDDEN, f"{_place(mine)} says {mine.value}: the policy or the file was changed"
        )

    def _sysctl_at_boot(self, row: Row, wanted: Setting, winner: Optional[sysctl_d.Assignment]) -> Row:
        active = self.tuned
        if active and active.starts and not active.reapply_sysctl:
            theirs = active.sets("sysctl", sysctl_d.key_path(wanted.name))
            if theirs:
                row.before = row.after = normalised(theirs.value)
                reason = (
                    f"{theirs.file}:{theirs.line} (tuned profile {active.profile}, reapply_sysctl off) sets "
                    f"{theirs.value} after sysctl.d"
                )
                return row if meets(wanted, theirs.value) else row.with_status(OVERRIDDEN, reason)
        if winner is None or winner.value is None:
            return row.with_status(FAILED, f"no file in sysctl.d sets {wanted.name}: a reboot undoes it")
        row.before = row.after = normalised(winner.value)
        if meets(wanted, winner.value):
            return row if winner in self.own else row.with_status(OK, f"set by {_place(winner)}")
        return row.with_status(
            OVERRIDDEN, f"{_place(winner)} sets {winner.value} and is read after {self.places.drop_in}"
        )

    def module(self, name: str, left_out: Optional[str]) -> list[Row]:
        """Return what our file and what the boot makes of a kernel module."""
        identity = f"module:{name}"
        file, boot = _row(IN_FILE, identity, "loaded"), _row(AT_BOOT, identity, "loaded")
        if left_out:
            return [_not_persisted(file, left_out), _not_persisted(boot, left_out)]
        if name not in self.modules:
            missing = f"{self.places.modules} does not name {name}"
            return [file.with_status(FAILED, missing), boot.with_status(FAILED, missing)]
        file.before = file.after = "loaded"
        blacklisted = self._blacklisted(name)
        if blacklisted:
            reason = f"{blacklisted} blacklists {name}: systemd-modules-load leaves it out"
            return [file, boot.with_status(OVERRIDDEN, reason)]
        boot.before = boot.after = "loaded"
        return [file, boot]

    def _blacklisted(self, name: str) -> Optional[str]:
        """Return file:line of a modprobe.d blacklist; files mask each other as in sysctl.d."""
        for path in sysctl_d.config_files(self.places.config_directories("modprobe.d")):
            for number, line in enumerate((self._text(path) or "").splitlines(), 1):
                words = line.split()
                if len(words) == 2 and words[0] == "blacklist" and words[1].replace("-", "_") == name:
                    return f"{path}:{number}"
        return None

    def section(self, name: str, section: dict[str, Any]) -> list[Row]:
        """Return what the recorded policy and what the boot makes of settings that the agent applies."""
        file, boot = _row(IN_FILE, name, APPLIED), _row(AT_BOOT, name, APPLIED)
        recorded = (self.document.get("sections") or {}).get(name)
        if recorded is None:
            reason = f"{self.places.policy} has no {name}"
            return [file.with_status(FAILED, reason), boot.with_status(FAILED, reason)]
        if recorded != section:
            changed = _differences(recorded, section)
            file = file.with_status(OVERRIDDEN, f"{self.places.policy} has another {name}: {changed}")
        else:
            file.before = file.after = APPLIED
        missing = None if self.planned is not None else self._unable()
        theirs = self._theirs(name, section)
        if missing:
            return [file, boot.with_status(FAILED, missing)]
        if theirs:
            return [file, boot.with_status(OVERRIDDEN, theirs)]
        boot.before, boot.after = file.before, file.after
        return [file, boot if file.status == OK else boot.with_status(file.status, file.reason)]

    def _unable(self) -> Optional[str]:
        """Say why the agent would not run at boot, None when it will."""
        unit, link = self.places.unit(APPLY_UNIT), self.places.enabled(APPLY_UNIT, "multi-user.target")
        if not os.path.isfile(self.places.agent):
            return f"{self.places.agent} is not there"
        if os.path.realpath(unit) == "/dev/null":
            return f"{unit} is masked"
        if not os.path.isfile(unit):
            return f"{unit} is not there"
        if not os.path.lexists(link):
            return f"{APPLY_UNIT} is not enabled: no {link}"
        return None

    def _theirs(self, name: str, section: dict[str, Any]) -> Optional[str]:
        """Say which TuneD setting works against a section, None when there is none."""
        for key, in_profile, differs in _TUNED.get(name, ()):
            theirs = self.tuned.sets(*in_profile) if self.tuned and self.tuned.starts else None
            if theirs and section.get(key) is not None and differs(section[key], theirs.value):
                return (
                    f"{theirs.file}:{theirs.line} (tuned profile {_profile_of(self.tuned)}) sets "
                    f"{theirs.key} to {theirs.value}"
                )
        return None


def _profile_of(active: Optional[Tuned]) -> str:
    return active.profile if active else ""


def _differs(ours: Any, theirs: str) -> bool:
    return str(ours) not in re.split(r"[|\s]+", theirs)


#: Per section: its option, TuneD's section and key for the same thing, and whether values are at odds.
_TUNED: dict[str, tuple[tuple[str, tuple[str, str], Callable[[Any, str], bool]], ...]] = {
    "cpu_frequency": (("governor", ("cpu", "governor"), _differs),),
    "transparent_hugepages": (
        ("enabled", ("vm", "transparent_hugepages"), _differs),
        ("enabled", ("vm", "transparent_hugepage"), _differs),
    ),
}


def _assignments(places: Places, own: Optional[str]) -> list[sysctl_d.Assignment]:
    """Return all assignments in order; ``own`` stands for our file's text when it is not written yet."""
    found, _ = sysctl_d.read(places.sysctl_directories())
    if own is None:
        return found
    others = [each for each in found if each.file != places.drop_in]
    mine = sysctl_d.parse(own, places.drop_in)
    return sorted([*others, *mine], key=lambda each: os.fsencode(os.path.basename(each.file)))


def boot_value(places: Places, name: str) -> Optional[str]:
    """Return what files other than ours give a sysctl at boot, None when none does."""
    others = [each for each in _assignments(places, None) if each.file != places.drop_in]
    found = sysctl_d.winner(others, name)
    return found.value if found else None


def meets(wanted: Setting, value: Optional[str]) -> bool:
    """Tell whether a value satisfies what is wanted; nothing is ever met by no value."""
    if value is None or wanted.value is None:
        return False
    found = normalised(value)
    try:
        return same_tokens(target_value(found, wanted), found)
    except Refused:
        return False


def _row(kind: str, identity: str, desired: Optional[str]) -> Row:
    return Row(f"{kind}:{identity}", kind, identity, desired=desired, fix="reboot")


def _not_persisted(row: Row, why: str) -> Row:
    return row.with_status(NOT_APPLICABLE, f"not persisted: {why}")


def _place(assignment: sysctl_d.Assignment) -> str:
    return f"{assignment.file}:{assignment.line}"


def _differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = sorted(key for key in {*recorded, *wanted} if recorded.get(key) != wanted.get(key))
    return ", ".join(f"{key} is {recorded.get(key)}, not {wanted.get(key)}" for key in keys)
