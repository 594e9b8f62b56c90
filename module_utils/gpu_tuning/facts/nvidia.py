# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's driver: version, parameters, modules, device nodes, persistence, fabric, RDMA peers."""

from __future__ import annotations

import os
import re
import stat
from typing import Union

from .reader import Facts, Host, Unknown, absent, colon_fields, names_in, read_text

MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_modeset",
    "nvidia_drm",
    "nvidia_peermem",
    "nv_peer_mem",
    "nouveau",
    "gdrdrv",
)
#: Nodes that CUDA opens, besides one per GPU.
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def collect(host: Host, gpu_addresses: list[str], commands: Union[dict[str, int], Unknown]) -> Facts:
    """Return the driver's facts. ``commands`` counts running processes by name."""
    return {
        **_version(host),
        "module_version": read_text(host.sys("module/nvidia/version")),
        "installed_version": _installed_version(host),
        "parameters": _parameters(host),
        "modules": modules(host),
        "gpus": {address: _information(host, address) for address in gpu_addresses},
        "nodes": _nodes(host, gpu_addresses),
        "persistenced": _runs("nvidia-persiste", commands),
        "fabric_manager": _runs("nv-fabricmanage", commands),
        "rdma_devices": names_in(host.sys("class/infiniband")),
        "peermem_loaded": os.path.isdir(host.sys("module/nvidia_peermem")),
    }


def _runs(process: str, commands: Union[dict[str, int], Unknown]) -> Union[bool, Unknown]:
    return commands if isinstance(commands, Unknown) else process in commands


def _version(host: Host) -> Facts:
    """Return the loaded driver's version and kind, from the line that names it."""
    path = host.proc("driver/nvidia/version")
    text = read_text(path)
    if isinstance(text, Unknown):
        lost = absent("the NVIDIA driver is not loaded: " + text.reason)
        return {"version": lost, "branch": lost, "open_module": lost}
    match = re.search(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", text)
    if not match:
        lost = Unknown(f"{path} names no version")
        return {"version": lost, "branch": lost, "open_module": lost}
    return {
        "version": match.group(1),
        "branch": int(match.group(1).split(".")[0]),
        "open_module": "Open Kernel Module" in text,
    }


def _installed_version(host: Host) -> Union[str, Unknown]:
    """Return the version of the user-space library; it must equal the loaded module's."""
    folders = [os.path.join(host.usr, "lib/x86_64-linux-gnu"), os.path.join(host.usr, "lib64")]
    for folder in folders:
        for name in names_in(folder):
            match = re.match(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$", name)
            if match:
                return match.group(1)
    return absent(f"{folders[0]} has no libcuda.so.<version> (the library may be in a container only)")


def _parameters(host: Host) -> Union[Facts, Unknown]:
    text = read_text(host.proc("driver/nvidia/params"))
    return (
        text
        if isinstance(text, Unknown)
        else {name: value.strip('"') for name, value in colon_fields(text).items()}
    )


def modules(host: Host) -> Union[Facts, Unknown]:
    """Return {module: loaded} of the modules that matter; built-in counts as loaded."""
    text = read_text(host.proc("modules"))
    if isinstance(text, Unknown):
        return text
    loaded = {line.split()[0] for line in text.splitlines() if line.strip()}
    return {name: name in loaded or os.path.isdir(host.sys("module", name)) for name in MODULES}


def _information(host: Host, address: str) -> Union[Facts, Unknown]:
    """Return the driver's own words on a GPU. Device minors do not follow the bus order."""
    text = read_text(host.proc("driver/nvidia/gpus", address, "information"))
    if isinstance(text, Unknown):
        return text
    fields = colon_fields(text)
    minor = fields.get("Device Minor", "")
    return {
        "model": fields.get("Model"),
        "minor": int(minor) if minor.isdecimal() else None,
        "video_bios": fields.get("Video BIOS"),
        "gsp_firmware": fields.get("GPU Firmware"),
        "excluded": fields.get("GPU Excluded", "No") == "Yes",
    }


def _nodes(host: Host, gpu_addresses: list[str]) -> Facts:
    """Return {"missing": [...], "found": {name: "major:minor mode"}} of the nodes CUDA needs."""
    found: dict[str, str] = {}
    minors = []
    for address in gpu_addresses:
        information = _information(host, address)
        if not isinstance(information, Unknown) and information["minor"] is not None:
            minors.append(f"nvidia{information['minor']}")
    for name in (*CONTROL_NODES, *minors):
        node = _node(os.path.join(host.dev, name))
        if node:
            found[name] = node
    needed = [*CONTROL_NODES[:2], *minors]
    if not os.path.isdir(host.dev):
        lost = absent(f"{host.dev} does not exist")
        return {"found": lost, "missing": lost}
    return {"found": found, "missing": [name for name in needed if name not in found]}


def _node(path: str) -> str:
    """Return "major:minor mode" of a character node, "" where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    if stat.S_ISCHR(status.st_mode):
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        return f"{number} {stat.S_IMODE(status.st_mode):04o}"
    return ""
