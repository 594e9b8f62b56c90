# SPDX-License-Identifier: GPL-3.0-or-later
"""The container configs with their expected results, and the rules that judge a result."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Optional

CASES = Path(__file__).resolve().parents[1] / "fixtures" / "lxc_cases"
_FORMATS = {"pve": "proxmox", "lxc": "lxc"}
_HEADER = re.compile(rb"\[(pve:pending|[a-z][a-z0-9_\-]+)\]\s*$", re.I)
_KEYS = {
    "proxmox": re.compile(rb"^lxc\.cgroup2\.devices\.allow(?::|\s*=)\s*(.*?)\s*$"),
    "lxc": re.compile(rb"^\s*lxc\.cgroup2\.devices\.allow\s*=\s*(.*?)\s*$"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One directory of ``lxc_cases``."""

    path: Path

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "meta.json").read_text())

    @property
    def format(self) -> str:
        return _FORMATS[self.meta["format"]]

    @property
    def config(self) -> bytes:
        return (self.path / "conf").read_bytes()

    @property
    def devices(self) -> str:
        return (self.path / "proc_devices").read_text()

    @property
    def old_devices(self) -> str:
        return (self.path / "proc_devices.old").read_text()

    @property
    def second_config(self) -> Optional[bytes]:
        path = self.path / "conf.2"
        return path.read_bytes() if path.exists() else None

    @property
    def expected(self) -> Optional[bytes]:
        path = self.path / "expected.conf"
        return path.read_bytes() if path.exists() else None

    @property
    def nodes(self) -> list[tuple[int, int, str]]:
        path = self.path / "dev_nodes"
        pairs = [line.split(None, 1) for line in path.read_text().splitlines()] if path.exists() else []
        return [(*map(int, numbers.split(",")), node.strip()) for numbers, node in pairs]  # type: ignore[misc]


def cases(root: Path = CASES) -> list[Case]:
    """Return all cases, by name."""
    return [Case(path) for path in sorted(root.iterdir()) if (path / "meta.json").exists()]


def _main_part(data: bytes, config_format: str) -> list[bytes]:
    lines = data.splitlines(keepends=True)
    heads = [at for at, line in enumerate(lines) if config_format == "proxmox" and _HEADER.match(line)]
    return lines[: heads[0]] if heads else lines


def effective_rules(data: bytes, config_format: str) -> list[tuple[str, str, str, str]]:
    """Return the allow rules in force: (type, major, minor, access)."""
    found: list[tuple[str, str, str, str]] = []
    for line in _main_part(data, config_format):
        match = _KEYS[config_format].match(line.rstrip(b"\r\n"))
        if not match:
            continue
        value = match.group(1).decode("latin-1").strip("\"'")
        rule = re.match(r"([abc])\s(\d+|\*):(\d+|\*)\s([rwm]{3}|[rwm]{1,2}$)", value)
        if value in ("", "a"):
            found = [] if value == "" else [*found, ("a", "", "", "")]
        elif rule:
            found.append(rule.groups())  # type: ignore[arg-type]
    return found


def faults(case: Case, result: bytes) -> list[str]:
    """Return what is wrong with a repaired config, nothing when it is acceptable."""
    meta = case.meta
    rules = effective_rules(result, case.format)
    wanted = {tuple(want[:3]) for want in meta["must_allow"]}
    found = [f"no effective rule {want}" for want in meta["must_allow"] if not _allowed(want, rules)]
    found += [
        f"rule {want} was widened"
        for want in meta["must_allow"]
        if want[2] not in ("*", "") and _whole_major(want) in {rule[:3] for rule in rules} - wanted
    ]
    found += [
        f"stale rule {banned} is still there"
        for banned in meta["must_not_allow"]
        if any(rule[:2] == tuple(banned[:2]) for rule in rules)
    ]
    return found + _text_faults(case, result)


def _whole_major(want: list[str]) -> tuple[str, str, str]:
    return (want[0], want[1], "*")


def _allowed(want: list[str], rules: list[tuple[str, str, str, str]]) -> bool:
    minors = {want[2], "*"}
    return any(
        rule[:2] == tuple(want[:2]) and rule[2] in minors and set(want[3]) <= set(rule[3]) for rule in rules
    )


def _text_faults(case: Case, result: bytes) -> list[str]:
    meta, source = case.meta, case.config
    before, after = source.splitlines(keepends=True), result.splitlines(keepends=True)
    found = []
    if case.expected is not None and result != case.expected:
        found.append("differs from expected.conf")
    if meta["unchanged"] and result != source:
        found.append("the file must be unchanged")
    remaining = iter(after)
    protected = [line for at, line in enumerate(before, 1) if at not in meta["may_change_lines"]]
    found += [f"protected line lost or moved: {line!r}" for line in protected if line not in remaining]
    if not meta["may_add_lines"] and len(after) > len(before):
        found.append("lines were added")
    if after[len(_main_part(result, case.format)) :] != before[len(_main_part(source, case.format)) :]:
        found.append("snapshot or pending sections changed")
    return found
