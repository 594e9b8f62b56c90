# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with a container's device rules, and the smallest edit that repairs it.

Pure logic: a parsed config and what is known of the host go in, rows and edits come out. Every edit is
computed from the old text, so that majors may swap; a number whose meaning cannot be known is reported
and left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

from . import lxc_config as grammar
from . import lxc_messages as messages
from . import lxc_rules as rules_of
from . import proc_devices as devices
from . import rows as status
from .lxc_config import DevicePath, Edit
from .lxc_readings import (
    MOVED,
    NOT_REGISTERED,
    STATIC,
    UNKNOWN,
    UNKNOWN_FOREIGN,
    Container,
    Facts,
    Host,
    Reading,
    major_of,
)
from .lxc_rules import V2, Rule
from .rows import Row

KIND = "lxc_device"

STALE = "stale"
FOREIGN = "foreign"
MISSING = "missing"
NOT_ENFORCED = "not_enforced"
DEAD = "dead"
NODE_MISSING = "node_missing"
DRIVER_NOT_LOADED = "driver_not_loaded"
FINDING_OK = "ok"
FINDINGS = (STALE, FOREIGN, MISSING, NOT_ENFORCED, DEAD, NODE_MISSING, DRIVER_NOT_LOADED, FINDING_OK)


class DeviceRow(Row):
    """A setting row with the class of its finding, the container's name and its config's path."""

    def __init__(
        self, *row: Any, finding: str = FINDING_OK, container: str = "", path: str = "", **more: Any
    ) -> None:
        """Take a row's fields and three more."""
        super().__init__(*row, **more)
        self.finding, self.container, self.path = finding, container, path


@dataclasses.dataclass
class Plan:
    """The outcome of a diagnosis: rows, the edits of the repair, and what each rule means.

    ``meanings`` maps the text of each rule as it is now to its driver (None: unknown); ``renamed`` maps
    the texts that the edits change to their new ones; ``classes`` are the device classes it means to
    have, ``passed`` those of devN lines; ``enforced``: the rules restrict at all.
    """

    container: Container
    rows: list[DeviceRow]
    edits: list[Edit]
    readings: list[Reading]
    meanings: dict[str, Optional[str]]
    renamed: dict[str, str]
    classes: tuple[str, ...]
    enforced: bool = True
    passed: tuple[str, ...] = ()

    @property
    def new_text(self) -> str:
        """The config's text after the repair."""
        return grammar.apply_edits(self.container.config.text, self.edits)

    def remembered(self, repaired: bool) -> dict[str, Optional[str]]:
        """Return the meanings to record, by the rule texts that stand in the file now."""
        if not repaired:
            return dict(self.meanings)
        kept = {text: name for text, name in self.meanings.items() if text not in self.renamed}
        # A rule may have become the same as one that stands there already: it means what is right now.
        return {**kept, **{new: self.meanings[old] for old, new in self.renamed.items()}}


def diagnose(container: Container, host: Host, includes: Optional[rules_of.Includes] = None) -> Plan:
    """Return the plan for one container; touches no file but what ``includes`` reads."""
    includes = includes or rules_of.Includes()
    return _Diagnosis(container, host, includes).plan()


class _Diagnosis(Facts):
    """One container's diagnosis: rows and edits from the facts."""

    def __init__(self, container: Container, host: Host, includes: rules_of.Includes) -> None:
        super().__init__(container, host, includes)
        self.rows: list[DeviceRow] = []

    def plan(self) -> Plan:
        edits, renamed = self._edits()
        classes = self._classes()
        for name in classes:
            self._class_row(name)
        self._unknown_rows(bool(classes))
        self._enforcement_rows(bool(classes))
        self._dead_rows()
        self._section_rows()
        self._node_rows()
        if not self.rows:
            self._add("none", FINDING_OK, status.OK, reason="no GPU device is meant for this container")
        meanings = {
            reading.rule.text: reading.meaning
            for reading in self.readings
            if reading.verdict != STATIC and reading.rule.line.number
        }
        return Plan(
            self.container,
            self.rows,
            edits,
            self.readings,
            meanings,
            renamed,
            tuple(classes),
            self.effect.enforced,
            self.passed,
        )

    def _edits(self) -> tuple[list[Edit], dict[str, str]]:
        edits, renamed = [], {}
        for reading in self.readings:
            rule = reading.rule
            if reading.verdict != MOVED or not rule.line.number or reading.target is None:
                continue
            edits.append(Edit(rule.major_start, rule.major_end, str(reading.target)))
            at = rule.major_start - rule.line.value_start
            renamed[rule.text] = (
                rule.text[:at] + str(reading.target) + rule.text[at + len(str(_digits(rule))) :]
            )
        return edits, renamed

    def _classes(self) -> list[str]:
        """Return the device classes the container means to have, GPU classes and those that moved."""
        names = [
            reading.name
            for reading in self.readings
            if reading.name
            and (devices.is_gpu_class(reading.name) or reading.verdict in (MOVED, NOT_REGISTERED))
        ]
        return list(dict.fromkeys([*names, *self.mounted, *self.passed]))

    def _add(self, what: str, finding: str, state: str, **more: Any) -> None:
        target = f"{self.container.name}/{what}"
        row = DeviceRow(
            f"{KIND}:{target}",
            KIND,
            target,
            status=state,
            finding=finding,
            container=self.container.name,
            path=self.container.path,
            **more,
        )
        self.rows.append(row)

    def _class_row(self, name: str) -> None:
        mine = [reading for reading in self.readings if reading.name == name]
        moved = [reading for reading in mine if reading.verdict == MOVED]
        majors = self.host.now.majors(name)
        before = ",".join(dict.fromkeys(_digits(reading.rule) for reading in moved or mine)) or None
        desired = ",".join(str(major) for major in majors) or None
        if not majors:
            self._not_loaded_row(name, mine, before)
        elif moved:
            self._moved_row(name, moved, before)
        elif self._not_covered(name, majors):
            reason = self._missing_reason(name, majors[0])
            self._add(
                name,
                MISSING,
                status.NOT_APPLICABLE,
                before=before,
                desired=desired,
                after=before,
                reason=reason,
            )
        else:
            by_path = None if mine else "by path: its node is asked at each start of the container"
            self._add(
                name, FINDING_OK, status.OK, before=before, desired=before, after=before, reason=by_path
            )

    def _moved_row(self, name: str, moved: list[Reading], before: Optional[str]) -> None:
        target = str(moved[0].target)
        foreign = self._foreign_owners(moved)
        here = [reading for reading in moved if reading.rule.line.number]
        parts = [
            f"{_places(moved)}: {before} was {name} by {moved[0].evidence}, and {name} is {target} now",
            *foreign,
        ]
        if not here:
            parts.append("included files are not edited; name that file in paths to repair it")
        state = status.WOULD_CHANGE if here else status.NOT_APPLICABLE
        self._add(
            name,
            FOREIGN if foreign else STALE,
            state,
            before=before,
            desired=target,
            after=before,
            reason="; ".join(parts),
        )

    def _foreign_owners(self, readings: list[Reading]) -> list[str]:
        meant = set(self._classes())
        sentences = []
        for reading in readings:
            others = [owner for owner in reading.owners if owner not in meant]
            if others and reading.rule.allow:
                sentences.append(
                    f"{major_of(reading.rule)} now belongs to {', '.join(others)}, which the rule opened "
                    "(security)"
                )
        return list(dict.fromkeys(sentences))

    def _not_loaded_row(self, name: str, mine: list[Reading], before: Optional[str]) -> None:
        foreign = self._foreign_owners(mine)
        left = f"; {_places(mine)} was left as it is, because its new major is unknown" if mine else ""
        reason = (
            f"{name} is not registered in /proc/devices: its driver is not loaded{left}; load it "
            f"({messages.load_hint(name)}) and run again"
        )
        if foreign:
            self._add(
                name, FOREIGN, status.FAILED, before=before, after=before, reason=f"{foreign[0]}; {reason}"
            )
        else:
            self._add(
                name, DRIVER_NOT_LOADED, status.NOT_APPLICABLE, before=before, after=before, reason=reason
            )

    def _not_covered(self, name: str, majors: tuple[int, ...]) -> list[str]:
        """Return the mounted nodes of a class that no rule in force lets the container open."""
        if not self.effect.enforced:
            return []
        lacking = []
        for path in self.paths:
            found, minor = devices.class_of_node(path.path)
            if found == name and not path.passthrough and not self._allowed(path.path, name, majors, minor):
                lacking.append(path.path)
        return lacking

    def _allowed(self, path: str, name: str, majors: tuple[int, ...], minor: Optional[int]) -> bool:
        passed = {other.path for other in self.paths if other.passthrough}
        if path in passed:
            return True
        for rule in self.effect.active:
            if rule.type == "path" and (rule.path == path or rule.path.startswith(f"{path}/")):
                return True
            if any(rule.covers(major, minor) for major in majors):
                return True
        return False

    def _missing_reason(self, name: str, major: int) -> str:
        nodes = ", ".join(self._not_covered(name, (major,)))
        key = f"lxc.{'cgroup2' if self.host.family == V2 else 'cgroup'}.devices.allow"
        colon = ":" if self.config.format == grammar.PROXMOX else " ="
        return (
            f"no rule in force lets the container open {nodes} ({name}, major {major}): opening gives "
            "EPERM; nothing was added, because a rule that was never there is not ours to guess; add "
            f"'{key}{colon} c {major}:* rwm'"
        )

    def _unknown_rows(self, has_gpu: bool) -> None:
        grouped: dict[int, list[Reading]] = {}
        for reading in self.readings:
            if reading.verdict in (UNKNOWN, UNKNOWN_FOREIGN):
                grouped.setdefault(major_of(reading.rule), []).append(reading)
        suspicious = has_gpu and self._wants_a_rule()
        for major, readings in grouped.items():
            owners = ", ".join(readings[0].owners)
            if owners and not has_gpu:
                continue
            failed = has_gpu if owners else suspicious
            self._add(
                f"major-{major}",
                FOREIGN if owners else STALE,
                status.FAILED if failed else status.NOT_APPLICABLE,
                before=str(major),
                after=str(major),
                reason=f"{_places(readings)}: {messages.unknown_reason(major, owners)}",
            )

    def _wants_a_rule(self) -> bool:
        """Return whether a class of the container has no rule: an unknown number may be its old one."""
        given = {reading.name for reading in self.readings} | set(self.passed)
        uvm_lacks = "nvidia" in self._classes() and "nvidia-uvm" not in given
        return bool(self.lacking(self.readings)) or uvm_lacks

    def _enforcement_rows(self, has_gpu: bool) -> None:
        reason = messages.why_not_enforced(self.effect, self.host.family, has_gpu)
        if reason:
            self._add("enforcement", NOT_ENFORCED, status.NOT_APPLICABLE, reason=reason)
        other = [rule for rule in self.rules if rule.family != self.host.family and rule.line.number]
        if other:
            mine, theirs = ("lxc.cgroup2", "cgroup2") if self.host.family == V2 else ("lxc.cgroup", "cgroup1")
            dead = "lxc.cgroup" if mine == "lxc.cgroup2" else "lxc.cgroup2"
            numbers = ", ".join(str(rule.line.number) for rule in other)
            self._add(
                dead,
                NOT_ENFORCED,
                status.UNSUPPORTED,
                reason=(
                    f"{dead}.* has no effect on a {theirs} host: line {numbers} of {self.container.path} "
                    f"gives the container nothing and was left as it is; write {mine}.devices.allow instead"
                ),
            )

    def _dead_rows(self) -> None:
        for line in self.config.live():
            if line.kind in (grammar.DEAD, grammar.FATAL):
                self._dead_line(line.number, messages.dead_line_reason(line, self.config.format))
        for rule in self.rules:
            if rule.reason and rule.family == self.host.family and rule.line.number:
                self._dead_line(rule.line.number, messages.dead_rule_reason(rule))
        for number, reason in sorted(self.effect.void.items()):
            text = next((rule.text for rule in self.rules if rule.line.number == number), "")
            self._dead_line(number, f'rule "{text}" (line {number}) has no effect: {reason}')
        for path, error in self.includes.broken.items():
            if path in self.config.values("lxc.include"):
                reason = (
                    f"lxc.include {path} cannot be read ({error}): LXC refuses the whole file until it can"
                )
                self._add(f"include{path}", DEAD, status.NOT_APPLICABLE, reason=reason)

    def _dead_line(self, number: int, reason: str) -> None:
        self._add(f"line-{number}", DEAD, status.NOT_APPLICABLE, reason=reason)

    def _section_rows(self) -> None:
        for name in dict.fromkeys(self.config.sections()):
            moved = self._moved_in_section(name)
            if not moved:
                continue
            pending = name.lower() == "pve:pending"
            what = "section pve:pending" if pending else f"snapshot {name}"
            then = "the next start brings them back" if pending else "a rollback brings them back"
            self._add(
                f"snapshot-{name}",
                STALE,
                status.NOT_APPLICABLE,
                reason=(
                    f"{what} still carries old majors; {then} ({', '.join(moved)}); it was left as it is, "
                    "run the repair again after that"
                ),
            )

    def _moved_in_section(self, name: str) -> list[str]:
        moved = []
        for line in self.config.of_section(name):
            rule = rules_of.rule_of(line)
            if rule is None or rule.type != "c" or rule.major is None or rule.reason:
                continue
            reading = self.read(rule)
            gone = reading.verdict == UNKNOWN and rule.allow
            if reading.verdict in (MOVED, NOT_REGISTERED) or gone:
                moved.append(f"line {line.number}: {rule.text}")
        return moved

    # --- nodes ---------------------------------------------------------------------------------------

    def _node_rows(self) -> None:
        if not self.host.nodes_known:
            return
        for path in {path.path: path for path in self.paths}.values():
            name = devices.class_of_node(path.path)[0]
            blocks_start = path.passthrough or not path.optional
            if name or blocks_start:
                self._node_row(path, name or "", blocks_start)

    def _node_row(self, path: DevicePath, name: str, blocks_start: bool) -> None:
        node = devices.stat_node(self.host.dev_root, path.path)
        what = path.path.lstrip("/")
        wrong = messages.node_fault(node, path, name, blocks_start)
        if wrong:
            self._add(what, NODE_MISSING, status.NOT_APPLICABLE, reason=wrong)
            return
        majors = self.host.now.majors(name)
        shown = f"{node.major}:{node.minor}" if node.major is not None else None
        if node.kind == "char" and majors and node.major not in majors:
            self._add(
                what,
                STALE,
                status.NOT_APPLICABLE,
                before=shown,
                after=shown,
                reason=(
                    f"{path.path} is a node of major {node.major}, but {name} is {majors[0]} now: remove "
                    f"the node and create it anew ({messages.node_hint(name, path.path)})"
                ),
            )
        elif self._mode_refuses(node, path):
            self._add(
                what,
                NOT_ENFORCED,
                status.NOT_APPLICABLE,
                before=shown,
                after=shown,
                reason=messages.mode_reason(node),
            )
        else:
            reason = f"mode {node.mode or 0:04o}, owner {node.uid}:{node.gid}"
            self._add(what, FINDING_OK, status.OK, before=shown, desired=shown, after=shown, reason=reason)

    def _mode_refuses(self, node: devices.Node, path: DevicePath) -> bool:
        unprivileged = self.effect.why == "unprivileged"
        return (
            unprivileged
            and not path.passthrough
            and node.kind == "char"
            and (node.mode or 0) & 0o006 != 0o006
        )


def _digits(rule: Rule) -> str:
    at = rule.major_start - rule.line.value_start
    return rule.text[at : at + rule.major_end - rule.major_start]


def _places(readings: Sequence[Reading]) -> str:
    shown = [f'rule "{reading.rule.text}" ({rules_of.place(reading.rule.line)})' for reading in readings]
    return " and ".join(dict.fromkeys(shown))
