# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a loader can start an entry exactly once, so that a failed kernel is not tried again."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional

from .boot_loader import BLS, GRUB, Detected, Roots, efi_text
from .kernel_files import read_text

#: File systems on which GRUB can write its environment block in place.
_WRITABLE_BY_GRUB = ("ext2", "ext3", "ext4", "xfs", "vfat")


class Mount(NamedTuple):
    """One mount: its point, the device's numbers ("8:1"), the file system's type."""

    point: str
    device: str
    fstype: str


def mount_of(path: str, procfs_root: str) -> Optional[Mount]:
    """Return the mount that holds a path, as /proc/self/mountinfo has it."""
    try:
        text = read_text(os.path.join(procfs_root, "self/mountinfo"))
    except OSError:
        return None
    best: Optional[Mount] = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), fields[4])
        inside = point == "/" or path == point or path.startswith(f"{point}/")
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, fields[2], right.split()[0])
    return best


def obstacle(detected: Detected, roots: Roots, boot_path: str = "/boot/grub") -> Optional[str]:
    """Return why this loader cannot boot an entry once, None when it can."""
    if detected.loader == GRUB:
        return _grub_obstacle(detected, roots, boot_path)
    if detected.loader == BLS:
        return "one-time boot of blscfg entries is not supported here"
    if efi_text(roots, "LoaderInfo") is None:
        return "systemd-boot did not start this kernel: the EFI variable LoaderInfo is missing"
    return None


def _grub_obstacle(detected: Detected, roots: Roots, boot_path: str) -> Optional[str]:
    if detected.proxmox:
        return "proxmox-boot-tool keeps GRUB's menu on the ESPs, where no environment block is"
    mount = mount_of(boot_path, roots.procfs)
    if mount is None:
        return f"cannot tell which file system {boot_path} is on"
    if mount.fstype not in _WRITABLE_BY_GRUB:
        return f"GRUB cannot write its environment block on {mount.fstype} ({mount.point})"
    block = os.path.join(roots.sysfs, "dev/block", mount.device)
    for kind, words in (("dm", "LVM or another device-mapper volume"), ("md", "MD RAID")):
        if any(os.path.isdir(os.path.join(place, kind)) for place in (block, os.path.join(block, ".."))):
            return f"GRUB cannot write its environment block on {words} ({mount.point})"
    return None


def watchdog(roots: Roots) -> Optional[str]:
    """Return the identity of a hardware watchdog, None where there is none (softdog is none)."""
    top = os.path.join(roots.sysfs, "class/watchdog")
    try:
        names = sorted(os.listdir(top))
    except OSError:
        return None
    for name in names:
        try:
            identity = read_text(os.path.join(top, name, "identity")).strip()
        except OSError:
            continue
        if identity and identity != "Software Watchdog":
            return identity
    return None
