# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers that are given GPUs, and whether their device rules still fit this boot's numbers."""

from __future__ import annotations

import os
import re
from typing import Optional, Union

from .reader import Facts, Host, Unknown, names_in, read_text

#: Drivers CUDA opens; nvidiactl and the GPUs share NVIDIA's own static major 195.
NEEDED = ("nvidiactl", "nvidia-uvm")
_NVIDIA_MAJOR = 195
_OLD_NAME = "nvidia-frontend"  # of both before driver 545
_RULE = re.compile(r"^c (\d+|\*):(\d+|\*) ([rwm]{1,3})")
_DYNAMIC = (*range(234, 255), *range(384, 512))


def collect(host: Host, majors: Union[Facts, Unknown], running: set[str]) -> list[Facts]:
    """Return the LXC and Proxmox containers that have a GPU; ``running`` holds "lxc:<name>"."""
    found = []
    for runtime, name, path in _configs(host):
        text = read_text(path)
        if isinstance(text, Unknown):
            found.append({"name": name, "runtime": runtime, "config": path, "gpu": text})
            continue
        container = describe(text, runtime, majors)
        if container["gpu"]:
            state = {"name": name, "config": path, "running": f"lxc:{name}" in running}
            found.append({**state, **container})
    return found


def _configs(host: Host) -> list[tuple[str, str, str]]:
    proxmox = os.path.join(host.etc, "pve/lxc")
    plain = os.path.join(host.var, "lib/lxc")
    configs = [
        ("proxmox", name[:-5], os.path.join(proxmox, name))
        for name in names_in(proxmox)
        if name.endswith(".conf")
    ]
    if configs:
        return configs  # Proxmox writes /var/lib/lxc/<id>/config itself, at each start
    paths = [(name, os.path.join(plain, name, "config")) for name in names_in(plain)]
    return [("lxc", name, path) for name, path in paths if os.path.isfile(path)]


def entries(text: str, runtime: str) -> list[tuple[str, str]]:
    """Return (key, value) of the live part of a config: what stands before the first section."""
    found = []
    separator = r"[:=]" if runtime == "proxmox" else "="
    for line in text.splitlines():
        if runtime == "proxmox" and re.match(r"\[[\w:-]{2,}\]", line):
            break
        match = re.match(rf"\s*([A-Za-z][\w.-]*)\s*{separator}\s*(.*?)\s*$", line)
        if match and not line.lstrip().startswith("#"):
            found.append((match.group(1), match.group(2)))
    return found


def describe(text: str, runtime: str, majors: Union[Facts, Unknown]) -> Facts:
    """Return one container's device access, and the drivers its allow list misses or mistakes."""
    pairs = entries(text, runtime)
    allowed, open_to_all = _allow_list(pairs)
    unprivileged = ("unprivileged", "1") in pairs
    devices = [value.split(",")[0] for key, value in pairs if re.match(r"dev\d+$", key)]
    mounts = [value for key, value in pairs if key == "lxc.mount.entry" and "nvidia" in value]
    by_path = [rule for rule in allowed if rule.startswith("/dev/")]
    numbers = [
        int(match.group(1))
        for rule in allowed
        for match in [_RULE.match(rule)]
        if match and match.group(1) != "*"
    ]
    enforced = bool(allowed) and not open_to_all and not (runtime == "proxmox" and unprivileged)
    names = devices + by_path
    return {
        "runtime": runtime,
        "gpu": bool(mounts) or any("/dev/nvidia" in name for name in names) or _NVIDIA_MAJOR in numbers,
        "unprivileged": unprivileged,
        "allow_rules": allowed,
        "allowed_majors": sorted(set(numbers)),
        "devices": devices,
        "enforced": enforced,
        "missing_drivers": _missing(numbers, names, majors) if enforced else {},
        "foreign_majors": _foreign(numbers, majors) if enforced else [],
        "memory_limit_mib": _number(pairs, "memory"),
        "cores": _number(pairs, "cores"),
        "cpuset": next((value for key, value in pairs if key.endswith("cpuset.cpus")), None),
    }


def _allow_list(pairs: list[tuple[str, str]]) -> tuple[list[str], bool]:
    """Return (rules in force, everything allowed); an empty value drops all rules before it."""
    rules: list[str] = []
    for key, value in pairs:
        if key in ("lxc.cgroup2.devices.allow", "lxc.cgroup.devices.allow"):
            rules = [*rules, value] if value else []
    return rules, any(rule == "a" or rule.startswith("a ") for rule in rules)


def _missing(numbers: list[int], names: list[str], majors: Union[Facts, Unknown]) -> Union[Facts, Unknown]:
    """Return {driver: its major now} of the needed drivers that no rule lets through."""
    if isinstance(majors, Unknown):
        return majors
    wanted = {
        driver: majors.get(driver, majors.get(_OLD_NAME)) if driver == NEEDED[0] else majors.get(driver)
        for driver in NEEDED
    }
    return {
        driver: major
        for driver, major in wanted.items()
        if major is not None
        and major not in numbers
        and f"/dev/{driver}" not in {name.split()[0] for name in names}
    }


def _foreign(numbers: list[int], majors: Union[Facts, Unknown]) -> Union[list[Facts], Unknown]:
    """Return the dynamic majors that are let through and belong to another driver, or to none."""
    if isinstance(majors, Unknown):
        return majors
    owners = {major: name for name, major in majors.items()}
    found = [
        {"major": number, "owner": owners.get(number)}
        for number in sorted(set(numbers))
        if number in _DYNAMIC
    ]
    return [one for one in found if one["owner"] is None or not str(one["owner"]).startswith("nvidia")]


def _number(pairs: list[tuple[str, str]], name: str) -> Optional[int]:
    return next((int(value) for key, value in pairs if key == name and value.isdecimal()), None)
