# SPDX-License-Identifier: GPL-3.0-or-later
"""The sentences of the device findings: what is wrong, and what to do."""

from __future__ import annotations

from . import lxc_config as grammar
from . import lxc_rules as rules_of
from . import proc_devices as devices
from .lxc_config import DevicePath
from .lxc_rules import V2, Enforcement, Rule


def why_not_enforced(effect: Enforcement, family: str, has_gpu: bool) -> str:
    """Return why the device rules restrict nothing, or ""."""
    line = rules_of.place(effect.line) if effect.line else ""
    advice = "the device cgroup is not what blocks CUDA here; check nodes and permissions"
    if effect.enforced:
        return ""
    if effect.why == "unprivileged":
        return (
            "unprivileged: device cgroup does not restrict; check nodes and permissions "
            f"({advice.split(';')[0]})"
        )
    if effect.why == "allow_all":
        return (
            f"container allows all devices (security): {line} allows a, so single rules after it count for "
            f"nothing; {advice}"
        )
    if effect.line:
        return (
            f"container allows all devices (security): the empty value in {line} leaves no allow rule; "
            f"{advice}"
        )
    if has_gpu:
        denies = "nothing denies all devices first" if family != V2 else "there is no device rule"
        return f"no device rule is in force ({denies}): every device is open; {advice}"
    return ""


def dead_line_reason(line: grammar.Line, config_format: str) -> str:
    """Return why a whole line has no effect."""
    parser = "Proxmox" if config_format == grammar.PROXMOX else "LXC"
    return (
        f'line {line.number} "{line.text.strip()[:120]}" is ignored by {parser}: {line.reason}; it was left '
        "as it is, "
        f"correct it by hand if the container is meant to have the device"
    )


def dead_rule_reason(rule: Rule) -> str:
    """Return why a rule has no effect."""
    shown = rule.text[:120]
    if rule.major is not None and "is over" in rule.reason:
        return f'rule "{shown}" (line {rule.line.number}) has no effect: {rule.reason}; it was left as it is'
    if rule.type == "a":
        return f'rule "{shown}" (line {rule.line.number}) stops the container: {rule.reason}'
    return f'rule "{shown}" is ignored by LXC: {rule.reason} (line {rule.line.number}, left as it is)'


def node_fault(node: devices.Node, path: DevicePath, name: str, blocks_start: bool) -> str:
    """Return what is wrong with a node that the config names, or ""."""
    end = "CT will not start" if blocks_start else "the optional mount is skipped and the container lacks it"
    if node.kind == "missing":
        return f"{path.path} missing, {end}: {node_hint(name, path.path)}"
    if node.kind == "dir" and path.passthrough:
        return (
            f"{path.path} is a directory and a devN line takes one device, {end}: name the nodes in it "
            "instead"
        )
    if node.kind == "other":
        return (
            f"{path.path} is not a device, {end}: find who made the file, remove it, "
            f"{node_hint(name, path.path)}"
        )
    return ""


def mode_reason(node: devices.Node) -> str:
    """Return why an unprivileged container cannot open a node."""
    return (
        f"{node.path} has mode {node.mode or 0:04o}, owner {node.uid}:{node.gid}: root of an unprivileged "
        "container is "
        "nobody to it, so opening gives EACCES; give others rw (NVreg_DeviceFileMode=0666) or use a devN "
        "line with gid="
    )


def load_hint(name: str) -> str:
    """Return the command that loads a driver by its name in /proc/devices."""
    module = {
        "nvidia-caps": "nvidia",
        "nvidia-nvswitch": "nvidia",
        "nvidia-nvlink": "nvidia",
        "kfd": "amdgpu",
    }.get(name, name)
    return f"modprobe {module}"


def node_hint(name: str, path: str) -> str:
    """Return the cure for a missing node: the vendor's helper where there is one."""
    before = "before pve-guests or lxc starts"
    flags = {"nvidia-uvm": "-c 0 -u", "nvidia-nvswitch": "-s", "nvidia-nvlink": "-l", "nvidia": "-c 0"}.get(
        name
    )
    if path == "/dev/nvidia-modeset":
        flags = "-m"
    if flags:
        return f"{load_hint(name)} and create it with nvidia-modprobe {flags} {before}"
    return f"create it {before}, or drop the line"


def open_cure(error: str, path: str, name: str, on_host: bool) -> str:
    """Return what cures a failed open in a container."""
    if error == "EPERM":
        return (
            "the device cgroup refuses it; if the config's rule is right, the running container still has "
            "the old "
            "ones: restart it (lxc_gpu_devices_restart: true)"
        )
    if error == "ENOENT" and on_host:
        return "the node is on the host but not in the container: restart it, or add the mount entry"
    if error == "ENOENT":
        return f"there is no such node; {node_hint(name, path)}, then restart the container"
    if error == "EACCES":
        return (
            "the node's mode or owner refuses it; give others rw (NVreg_DeviceFileMode=0666) or use a devN "
            "line with gid="
        )
    if error in ("ENXIO", "ENODEV"):
        return (
            f"no driver answers to the node's number: {load_hint(name)}, and create the node anew if its "
            "major moved"
        )
    return "remove what is there and mount the node"


def cuda_cure(code: int) -> str:
    """Return what a failed cuInit points to (CUresult of the driver API)."""
    return {
        100: "no GPU is visible: check /dev/nvidia0 and the driver",
        803: "the driver in the container and the kernel module differ: install the host's version",
        999: "the usual cause is /dev/nvidia-uvm, its node or its rule: see the other rows",
    }.get(code, "see CUresult in the CUDA driver API")
