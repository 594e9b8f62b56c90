# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers that are given GPUs, and whether their device rules still fit this boot's numbers.

What a rule means and whether it still holds is lxc_repair's diagnosis, the same that the repair acts on.
"""

from __future__ import annotations

import os
import re
from typing import Optional, Union

from ..lxc_repair import BadInput, Request, run
from .reader import Facts, Host, Unknown, names_in, read_text

_NVIDIA_MAJOR = 195
_RULE = re.compile(r"^c (\d{1,9}):(?:\d+|\*) [rwm]{1,3}")


def collect(host: Host, running: set[str]) -> list[Facts]:
    """Return the LXC and Proxmox containers that have a GPU; ``running`` holds "lxc:<name>"."""
    found = []
    for runtime, name, path in _configs(host):
        text = read_text(path)
        if isinstance(text, Unknown):
            found.append({"name": name, "runtime": runtime, "config": path, "gpu": text})
            continue
        container = describe(text, runtime)
        if container["gpu"]:
            state = {"name": name, "config": path, "running": f"lxc:{name}" in running}
            found.append({**state, **container})
    return found


def device_rows(host: Host) -> Union[list[Facts], Unknown]:
    """Return the rows of lxc_repair's diagnosis: ``finding``, ``container``, ``reason`` and values."""
    request = Request(
        procfs_root=host.procfs,
        dev_root=host.dev,
        state_root=os.path.join(host.var, "lib/gpu-tuning"),
        pve_root=os.path.join(host.etc, "pve"),
        lxc_root=os.path.join(host.var, "lib/lxc"),
        check=True,
    )
    try:
        return [row.as_dict() for row in run(request).rows if row.container]
    except BadInput as error:
        return Unknown(str(error))


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


def describe(text: str, runtime: str) -> Facts:
    """Return one container's device access and limits, as its config has them."""
    pairs = entries(text, runtime)
    allowed, open_to_all = _allow_list(pairs)
    unprivileged = ("unprivileged", "1") in pairs
    devices = [value.split(",")[0] for key, value in pairs if re.match(r"dev\d+$", key)]
    mounts = [value for key, value in pairs if key == "lxc.mount.entry" and "nvidia" in value]
    names = devices + [rule for rule in allowed if rule.startswith("/dev/")]
    numbers = [int(number) for rule in allowed for number in _RULE.findall(rule)]
    return {
        "runtime": runtime,
        "gpu": bool(mounts) or any("/dev/nvidia" in name for name in names) or _NVIDIA_MAJOR in numbers,
        "unprivileged": unprivileged,
        "allow_rules": allowed,
        "allowed_majors": sorted(set(numbers)),
        "devices": devices,
        "enforced": bool(allowed) and not open_to_all and not (runtime == "proxmox" and unprivileged),
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


def _number(pairs: list[tuple[str, str]], name: str) -> Optional[int]:
    return next((int(value) for key, value in pairs if key == name and value.isdecimal()), None)
