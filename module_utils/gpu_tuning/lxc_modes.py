# SPDX-License-Identifier: GPL-3.0-or-later
"""Rewrite numbered rules so that the fault cannot come back: rules by path, or Proxmox devN lines.

``major_free``: ``allow: /dev/nvidia-uvm rwm``, which LXC (4.0 and newer) resolves at each start.
``devn``: ``devN: /dev/nvidia-uvm``, whose node Proxmox (pve-container 5.0.7 and newer, PVE 8.1) asks at
each start. Neither widens what the container may open: a rule becomes the nodes it covers, a node that
was not allowed stays out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

from . import lxc_config as grammar
from . import lxc_devices as logic
from . import proc_devices as devices
from . import rows as status
from .lxc_config import DevicePath, Edit, Line
from .lxc_devices import Plan
from .lxc_readings import Host, Reading
from .proc_devices import Node

REPAIR, MAJOR_FREE, DEVN = "repair", "major_free", "devn"
MODES = (REPAIR, MAJOR_FREE, DEVN)
_MAX_DEV_INDEX = 255


def convert(plan: Plan, host: Host, mode: str) -> Plan:
    """Return the plan with its numbered GPU rules rewritten; ``repair`` gives the plan back."""
    if mode == MAJOR_FREE:
        return _to_paths(plan, host)
    if mode == DEVN:
        return _to_passthrough(plan, host)
    return plan


def _to_paths(plan: Plan, host: Host) -> Plan:
    edits = {edit.start: edit for edit in plan.edits}
    converted: dict[str, list[str]] = {}
    kept: set[str] = set()
    for reading in _convertible(plan):
        name, rule = reading.name, reading.rule
        if name in devices.STATIC_CLASSES:
            continue  # its major never moves
        paths = _paths_of(plan, host, reading)
        if not paths:
            kept.add(name)
            continue
        edits.pop(rule.major_start, None)
        edit = _replace_value(rule.line, [f"{path} {rule.access}" for path in paths])
        edits[edit.start] = edit
        converted.setdefault(name, []).extend(paths)
    rows = [_converted_row(row, converted, "rules by path, resolved at each start") for row in plan.rows]
    rows += [
        _note(
            plan,
            f"{name}/major_free",
            f"a rule of {name} keeps its number: no node of it is known on this host",
        )
        for name in sorted(kept)
    ]
    return dataclasses.replace(plan, rows=rows, edits=list(edits.values()))


def _convertible(plan: Plan) -> list[Reading]:
    """Return the readings of this file's GPU rules whose major now is known."""
    return [
        reading
        for reading in plan.readings
        if reading.target is not None and reading.rule.line.number and devices.is_gpu_class(reading.name)
    ]


def _paths_of(plan: Plan, host: Host, reading: Reading) -> list[str]:
    """Return the node paths that a rule covers: those on the host, those mounted, and the vendor's names."""
    minor, major = reading.rule.minor, reading.target or 0
    found = [
        node.path for node in devices.nodes_of_major(host.dev_root, major) if minor in (None, node.minor)
    ]
    for path in grammar.device_paths(plan.container.config):
        name, its_minor = devices.class_of_node(path.path)
        if name == reading.name and its_minor is not None and minor in (None, its_minor):
            found.append(path.path)
    found += devices.known_nodes(reading.name, minor)
    return [path for path in dict.fromkeys(found) if not any(character.isspace() for character in path)]


def _replace_value(line: Line, new_values: Sequence[str]) -> Edit:
    """Return the edit that repeats a line, its ending and its quotes, once for each new value."""
    at = line.value_start - line.start
    before, after = line.text[:at], line.text[at + len(line.value) :]
    last = f"{before}{new_values[-1]}{after}"
    ending = after if after.endswith("\n") else f"{after}\n"
    text = "".join(f"{before}{value}{ending}" for value in new_values[:-1]) + last
    return Edit(line.start, line.start + len(line.text), text)


def _converted_row(row: logic.DeviceRow, converted: dict[str, list[str]], how: str) -> logic.DeviceRow:
    name = row.target.split("/", 1)[1]
    if name not in converted:
        return row
    paths = ",".join(dict.fromkeys(converted[name]))
    reason = "; ".join(part for part in (row.reason, f"rewritten to {how}") if part)
    return row.replaced(status=status.WOULD_CHANGE, desired=paths, reason=reason)


def _to_passthrough(plan: Plan, host: Host) -> Plan:
    if plan.container.config.format != grammar.PROXMOX:
        plan.rows.append(
            _note(plan, "devn", "devN lines are Proxmox's and plain LXC has none: use mode major_free")
        )
        return plan
    obstacles = {name: _obstacle(plan, host, name) for name in plan.classes if name not in plan.passed}
    names = [name for name, obstacle in obstacles.items() if not obstacle]
    for name, obstacle in obstacles.items():
        if obstacle:
            plan.rows.append(_note(plan, f"{name}/devn", f"{name} was not moved to devN lines: {obstacle}"))
    lines = _lines_of(plan, names)
    nodes = [node for name in names for path in _mounts(plan, name) for node in _nodes(host, path)]
    free = _free_indexes(plan)
    if len(free) < len(nodes):
        plan.rows.append(_note(plan, "devn", f"{len(nodes)} nodes, but only {len(free)} devN lines are free"))
        return plan
    if not lines:
        return plan
    edits = [edit for edit in plan.edits if not any(_within(edit, line) for line in lines)]
    edits += _passthrough_edits(plan, lines, nodes, free)
    converted = {
        name: [node.path for path in _mounts(plan, name) for node in _nodes(host, path)] for name in names
    }
    rows = [
        _converted_row(row, converted, "devN lines, whose nodes Proxmox asks at each start")
        for row in plan.rows
    ]
    return dataclasses.replace(plan, rows=rows, edits=edits)


def _note(plan: Plan, what: str, reason: str) -> logic.DeviceRow:
    target = f"{plan.container.name}/{what}"
    return logic.DeviceRow(
        f"{logic.KIND}:{target}",
        logic.KIND,
        target,
        status=status.UNSUPPORTED,
        reason=reason,
        container=plan.container.name,
        path=plan.container.path,
    )


def _mounts(plan: Plan, name: str) -> list[DevicePath]:
    paths = grammar.device_paths(plan.container.config)
    return [path for path in paths if not path.passthrough and devices.class_of_node(path.path)[0] == name]


def _nodes(host: Host, path: DevicePath) -> list[Node]:
    return devices.char_nodes_below(host.dev_root, path.path)


def _obstacle(plan: Plan, host: Host, name: str) -> str:
    """Return why a class cannot move to devN lines, or "" when it can."""
    mounts = _mounts(plan, name)
    readings = [reading for reading in _convertible(plan) if reading.name == name]
    nodes = [node for path in mounts for node in _nodes(host, path)]
    if not nodes:
        return "no mount entry names a node of it"
    wrong = [node.path for node in nodes if node.kind != "char" or node.major not in host.now.majors(name)]
    if wrong:
        return (
            f"{wrong[0]} is no device node of it on this host, and a missing node stops the container's start"
        )
    if any(path.target != path.path for path in mounts):
        return "it is mounted under another path than it has on the host"
    if not all(reading.rule.allow for reading in readings):
        return "a deny rule is about it"
    closed = [node.path for node in nodes if plan.enforced and not _was_open(node, readings)]
    return f"no rule gives rw on {closed[0]}, and a devN line would" if closed else ""


def _was_open(node: Node, readings: Sequence[Reading]) -> bool:
    # A devN line gives rw: a rule that lacks one of them would be widened.
    return any(
        reading.rule.minor in (None, node.minor) and {"r", "w"} <= set(reading.rule.access)
        for reading in readings
    )


def _lines_of(plan: Plan, names: Sequence[str]) -> list[Line]:
    """Return the lines that devN lines make needless: mounts and rules, in file order."""
    lines = [path.line for name in names for path in _mounts(plan, name)]
    lines += [reading.rule.line for reading in _convertible(plan) if reading.name in names]
    return sorted(set(lines), key=lambda line: line.number)


def _within(edit: Edit, line: Line) -> bool:
    return line.start <= edit.start < line.start + len(line.text)


def _free_indexes(plan: Plan) -> list[int]:
    used = {
        grammar.dev_index(line.key) for line in plan.container.config.live() if line.kind == grammar.OPTION
    }
    return [index for index in range(_MAX_DEV_INDEX + 1) if index not in used]


def _passthrough_edits(
    plan: Plan, lines: Sequence[Line], nodes: Sequence[Node], free: Sequence[int]
) -> list[Edit]:
    passed = {path.path for path in grammar.device_paths(plan.container.config) if path.passthrough}
    new = [node for node in {node.path: node for node in nodes}.values() if node.path not in passed]
    ending = "\r\n" if lines[0].text.endswith("\r\n") else "\n"
    unprivileged = (plan.container.config.value("unprivileged") or "").strip() == "1"
    text = "".join(
        f"{_passthrough_line(index, node, unprivileged)}{ending}" for index, node in zip(free, new)
    )
    first, *others = lines
    edits = [Edit(first.start, first.start + len(first.text), text)]
    return edits + [Edit(line.start, line.start + len(line.text), "") for line in others]


def _passthrough_line(index: int, node: Node, unprivileged: bool) -> str:
    parts = [f"dev{index}: {node.path}", f"mode={(node.mode or 0) & 0o777:04o}"]
    # A bind mount shows the host's owner; in an unprivileged container that was nobody, so root is no loss.
    owners: tuple[tuple[str, Optional[int]], ...] = (("uid", node.uid), ("gid", node.gid))
    parts += [f"{key}={number}" for key, number in owners if number and not unprivileged]
    return ",".join(parts)
