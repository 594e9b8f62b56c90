# SPDX-License-Identifier: GPL-3.0-or-later
"""What the numbers in a container's device rules mean.

A number is known by a map recorded before it moved, by what an earlier run knew of the very rule, or by
evidence that leaves only one answer. Everything else stays unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

from . import lxc_config as grammar
from . import lxc_rules as rules_of
from . import proc_devices as devices
from .lxc_config import Config, DevicePath
from .lxc_rules import V2, Rule
from .lxc_state import Record
from .proc_devices import Majors

#: What a number in a rule turned out to be.
RIGHT, MOVED, NOT_REGISTERED, UNKNOWN, UNKNOWN_FOREIGN, STATIC = (
    "right",
    "moved",
    "not_registered",
    "unknown",
    "foreign",
    "static",
)


@dataclasses.dataclass(frozen=True)
class Host:
    """What is known of the host: majors now and before, the record, where nodes stand, the cgroup version.

    ``explicit`` is the map a caller gave as recorded (``explicit_from`` names it); ``family`` is
    ``cgroup1`` or ``cgroup2``, whichever restricts devices.
    """

    now: Majors
    record: Record = dataclasses.field(default_factory=Record)
    explicit: Optional[Majors] = None
    explicit_from: str = "recorded_devices"
    dev_root: str = "/dev"
    family: str = V2
    nodes_known: bool = True


@dataclasses.dataclass(frozen=True)
class Container:
    """A container and its parsed config; ``name`` is its id in rows."""

    name: str
    path: str
    config: Config


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one numbered rule means: a verdict, the driver's name, its major now, and the evidence.

    ``doubted`` are the drivers that the evidence names where it is not believed or not clear.
    """

    rule: Rule
    verdict: str
    name: str = ""
    target: Optional[int] = None
    owners: tuple[str, ...] = ()
    evidence: str = ""
    doubted: tuple[str, ...] = ()

    @property
    def meaning(self) -> Optional[str]:
        """What to remember for the next run, which has to see what this one saw: drivers, None if unknown."""
        return self.name if self.verdict in (RIGHT, MOVED, NOT_REGISTERED) else ",".join(self.doubted) or None


class Facts:
    """What is known of one container: its rules, which are in force, its device paths, and the readings.

    ``rules`` are all device rules, of included files too; ``effect`` says which are in force; ``mounted``
    and ``passed`` are the GPU classes that mount entries and devN lines name.
    """

    def __init__(self, container: Container, host: Host, includes: rules_of.Includes) -> None:
        """Read every rule of the family in force."""
        self.container, self.host, self.includes = container, host, includes
        self.config = container.config
        found = [rules_of.rule_of(line) for line in rules_of.with_includes(self.config, includes)]
        self.rules: list[Rule] = [rule for rule in found if rule]
        self.effect = rules_of.enforcement(self.config, host.family, includes)
        self.paths = grammar.device_paths(self.config)
        self.mounted = _classes([path for path in self.paths if not path.passthrough], host)
        self.passed = _classes([path for path in self.paths if path.passthrough], host)
        self.readings = self._doubt(self._infer([self.read(rule) for rule in self._numbered()]))

    def _numbered(self) -> list[Rule]:
        # Keys of the family that is not in force are left alone: new digits there would repair nothing.
        return [
            rule
            for rule in self.rules
            if rule.family == self.host.family
            and rule.type == "c"
            and rule.major is not None
            and not rule.reason
        ]

    def read(self, rule: Rule) -> Reading:
        """Return what one numbered rule means, by itself."""
        major = major_of(rule)
        owners = self.host.now.owners(major)
        known = self.host.record.meaning(self.container.path, rule.text)
        if known in owners:
            return Reading(rule, RIGHT, str(known), major, owners, "the record of an earlier run")
        names, evidence = self._recorded_names(rule)
        if names and not self._already_corrected(names, owners):
            return _compare(rule, names, owners, self.host.now, evidence)
        gpu_owners = [name for name in owners if devices.is_gpu_class(name)]
        if gpu_owners:
            return Reading(rule, RIGHT, gpu_owners[0], major, owners, "/proc/devices")
        if not devices.is_dynamic(major) and not self._was_unknown(rule):
            return Reading(rule, STATIC, owners[0] if owners else "", major, owners)
        meant = [name for name in owners if name in self._named_drivers()]
        if meant:
            return Reading(rule, RIGHT, meant[0], major, owners, "a mount entry names its node")
        return Reading(rule, UNKNOWN_FOREIGN if owners else UNKNOWN, owners=owners)

    def _was_unknown(self, rule: Rule) -> bool:
        """Tell whether an earlier run could not say what this rule means."""
        record, path = self.host.record, self.container.path
        return record.remembers(path, rule.text) and record.meaning(path, rule.text) is None

    def _already_corrected(self, names: tuple[str, ...], owners: tuple[str, ...]) -> bool:
        """Return whether the number is right today although a recorded map gives it to another driver.

        So it is when that driver is none the container has to do with, and today's owner is one whose node
        it mounts.
        """
        meant = {*self.mounted, *self.passed}
        strange = not any(devices.is_gpu_class(name) or name in self._named_drivers() for name in names)
        return strange and any(owner in meant for owner in owners)

    def _recorded_names(self, rule: Rule) -> tuple[tuple[str, ...], str]:
        """Return the drivers that owned the rule's number when it was written, and who says so."""
        host, path, major = self.host, self.container.path, major_of(rule)
        fresh = host.explicit is not None and host.record.consumed(path) != host.explicit.digest()
        if host.explicit is not None and fresh and host.explicit.owners(major):
            return host.explicit.owners(major), f"the map in {host.explicit_from}"
        if host.record.remembers(path, rule.text):
            name = host.record.meaning(path, rule.text)
            return (tuple(name.split(",")), "the record of an earlier run") if name else ((), "")
        return self._from_history(major)

    def _from_history(self, major: int) -> tuple[tuple[str, ...], str]:
        maps, now = self.host.record.maps, self.host.now
        evidence = "the map of an earlier run"
        if maps and maps[0].digest() != now.digest() and maps[0].owners(major):
            return maps[0].owners(major), evidence
        if any(devices.is_gpu_class(name) for name in now.owners(major)):
            return (), ""
        older = [known for known in maps if known.digest() != now.digest()]
        if self.host.explicit is not None:
            older.append(self.host.explicit)
        return next(((known.owners(major), evidence) for known in older if known.owners(major)), ((), ""))

    def _named_drivers(self) -> set[str]:
        """Return the drivers whose nodes the config names, GPU or not, by number and by name."""
        named = set(self.mounted) | set(self.passed)
        for path in self.paths:
            node = devices.stat_node(self.host.dev_root, path.path)
            if node.kind == "char" and node.major is not None:
                named.update(self.host.now.owners(node.major))
            base = path.path.rsplit("/", 1)[-1].rstrip("0123456789")
            named.update(name for name in self.host.now.by_name if name == base)
        return named

    def _infer(self, readings: list[Reading]) -> list[Reading]:
        """Settle unknown numbers where the classes that lack a rule leave only one answer."""
        open_ones = [
            reading
            for reading in readings
            if reading.verdict in (UNKNOWN, UNKNOWN_FOREIGN) and reading.rule.allow
        ]
        unknown = sorted({major_of(reading.rule) for reading in open_ones})
        lacking = self.lacking(readings)
        settled = all(reading.verdict == UNKNOWN for reading in open_ones)
        if not settled or len(unknown) != len(lacking) or not unknown:
            return readings
        if len(unknown) > 1 and not _interchangeable(open_ones):
            return readings
        meaning = dict(zip(unknown, lacking))
        return [
            self._inferred(reading, meaning[major_of(reading.rule)]) if reading in open_ones else reading
            for reading in readings
        ]

    def _doubt(self, readings: list[Reading]) -> list[Reading]:
        """Take back moves to a driver the config has nothing to do with, while a mounted class lacks a rule.

        Such a number may have been stale already when the map was recorded.
        """
        if not self.lacking(readings):
            return readings
        known = self._named_drivers()
        return [
            Reading(
                reading.rule,
                UNKNOWN_FOREIGN if reading.owners else UNKNOWN,
                owners=reading.owners,
                evidence=reading.evidence,
                doubted=(reading.name,),
            )
            if reading.verdict == MOVED
            and not devices.is_gpu_class(reading.name)
            and reading.name not in known
            else reading
            for reading in readings
        ]

    def _inferred(self, reading: Reading, name: str) -> Reading:
        target = self.host.now.majors(name)[0]
        evidence = (
            f"{major_of(reading.rule)} belongs to no driver now, and the mounted {name} is what has no rule"
        )
        return dataclasses.replace(reading, verdict=MOVED, name=name, target=target, evidence=evidence)

    def lacking(self, readings: Sequence[Reading]) -> list[str]:
        """Return the mounted classes with one dynamic major now that no rule and no devN line gives."""
        now = self.host.now
        given = set(self.passed)
        for reading in readings:
            # A number gives every class that has it, two of them at times.
            if reading.verdict == RIGHT:
                given.update(now.owners(major_of(reading.rule)))
            elif reading.verdict == MOVED and reading.target is not None:
                given.update(now.owners(reading.target))
        given |= {devices.class_of_node(rule.path)[0] or "" for rule in self.rules if rule.type == "path"}
        lacking = []
        for name in self.mounted:
            majors = now.majors(name)
            if name not in given and len(majors) == 1 and devices.is_dynamic(majors[0]):
                lacking.append(name)
        return lacking


def major_of(rule: Rule) -> int:
    """Return the major of a numbered rule."""
    if rule.major is None:
        raise ValueError(f"rule {rule.text!r} has no major")
    return rule.major


def _classes(paths: Sequence[DevicePath], host: Host) -> tuple[str, ...]:
    """Return the GPU classes whose nodes the paths name, in order."""
    names = []
    for path in paths:
        name, _minor = devices.class_of_node(path.path)
        if name:
            names.append(name)
    return tuple(dict.fromkeys(names))


def _compare(
    rule: Rule, names: tuple[str, ...], owners: tuple[str, ...], now: Majors, evidence: str
) -> Reading:
    """Return what became of the drivers that a rule's number belonged to."""
    still = [name for name in names if name in owners]
    if still:
        return Reading(rule, RIGHT, still[0], rule.major, owners, evidence)
    registered = [name for name in names if now.majors(name)]
    targets = {major for name in registered for major in now.majors(name)}
    if not targets:
        return Reading(rule, NOT_REGISTERED, names[0], None, owners, evidence)
    if len(targets) > 1:
        return Reading(rule, UNKNOWN_FOREIGN if owners else UNKNOWN, owners=owners, doubted=names)
    return Reading(rule, MOVED, registered[0], targets.pop(), owners, evidence)


def _interchangeable(readings: Sequence[Reading]) -> bool:
    """Return whether the open numbers have the same minors and access: either order is the same list."""
    shapes: dict[int, list[tuple[Optional[int], str]]] = {}
    for reading in readings:
        rule = reading.rule
        shapes.setdefault(major_of(rule), []).append((rule.minor, "".join(sorted(rule.access))))
    seen = [sorted(shape, key=str) for shape in shapes.values()]
    return all(shape == seen[0] for shape in seen)
