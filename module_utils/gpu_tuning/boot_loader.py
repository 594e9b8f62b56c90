# SPDX-License-Identifier: GPL-3.0-or-later
"""Tell which boot loader a host really boots with, and how one knows.

Several may be installed at once; what counts is which one started the running kernel. That one leaves
traces: GRUB passes BOOT_IMAGE=, systemd-boot names itself in an EFI variable, a stub passes initrd=.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from .bls import BlsEntries
from .boot_config import BootConfig, on_live_host
from .boot_esp import HiddenEntries
from .boot_files import BootError, text
from .cmdline import parse
from .grub import Grub
from .kernel_files import read_bytes, read_line
from .kernel_install import CMDLINE, ProxmoxBootTool, SystemdBoot

GRUB, SYSTEMD_BOOT, PROXMOX_BOOT_TOOL, BLS = "grub", "systemd-boot", "proxmox-boot-tool", "bls"
LOADERS = (GRUB, SYSTEMD_BOOT, PROXMOX_BOOT_TOOL, BLS)
UUIDS = "kernel/proxmox-boot-uuids"
LOADER_GUID = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
GLOBAL_GUID = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
_ESPS = ("efi", "boot", "boot/efi")


@dataclasses.dataclass(frozen=True)
class Roots:
    """Where a machine's files are; ``esps``: mounted EFI system partitions, None to look for them."""

    etc: str = "/etc"
    boot: str = "/boot"
    procfs: str = "/proc"
    sysfs: str = "/sys"
    esps: Optional[tuple[str, ...]] = None

    @property
    def live(self) -> bool:
        """Tell whether these are the running system's."""
        return on_live_host(self.etc, self.boot, self.procfs, self.sysfs)

    def loader_entries(self) -> list[str]:
        """Return the loader/entries directories that are there."""
        top = os.path.dirname(os.path.abspath(self.boot))
        esps = self.esps if self.esps is not None else tuple(os.path.join(top, esp) for esp in _ESPS)
        found = [os.path.join(esp, "loader/entries") for esp in esps]
        return [path for path in dict.fromkeys(map(os.path.realpath, found)) if os.path.isdir(path)]


def roots_from(arguments: Mapping[str, Any]) -> Roots:
    """Return the roots in a module's arguments."""
    esps = arguments["esps"]
    return Roots(
        arguments["etc_root"],
        arguments["boot_root"],
        arguments["procfs_root"],
        arguments["sysfs_root"],
        None if esps is None else tuple(esps),
    )


@dataclasses.dataclass(frozen=True)
class Detected:
    """The loader and the facts that say so; ``proxmox``: proxmox-boot-tool looks after the ESPs."""

    loader: str
    evidence: tuple[str, ...]
    proxmox: bool = False


class CannotTell(BootError):
    """The traces contradict each other or are missing; the sentence lists them."""


def efi_variable(roots: Roots, name: str, guid: str = LOADER_GUID) -> Optional[bytes]:
    """Return an EFI variable's value without its four bytes of attributes, None where there is none."""
    try:
        return read_bytes(os.path.join(roots.sysfs, f"firmware/efi/efivars/{name}-{guid}"))[4:]
    except OSError:
        return None


def efi_text(roots: Roots, name: str) -> Optional[str]:
    """Return one of the loader's UTF-16 variables as text."""
    data = efi_variable(roots, name)
    return None if data is None else data.decode("utf-16-le", "replace").rstrip("\0")


def secure_boot(roots: Roots) -> Optional[bool]:
    """Return whether Secure Boot is on; None on a host without EFI."""
    if not os.path.isdir(os.path.join(roots.sysfs, "firmware/efi")):
        return None
    return efi_variable(roots, "SecureBoot", GLOBAL_GUID) == b"\1"


def detect(roots: Roots) -> Detected:
    """Return which loader started the running kernel. Raises CannotTell."""
    votes = _votes(roots)
    uuids = [line for line in (text(os.path.join(roots.etc, UUIDS)) or "").split("\n") if line.strip()]
    chosen = {vote for vote, _ in votes}
    facts = tuple(fact for _, fact in votes)
    if len(chosen) != 1:
        problem = "contradict each other" if chosen else "are missing"
        raise CannotTell(
            f"cannot tell which boot loader this host boots with, the traces {problem}"
            f"{': ' if facts else ''}{'; '.join(facts)}: name it with the option loader"
        )
    loader = chosen.pop()
    if uuids:
        facts += (f"{len(uuids)} ESPs of proxmox-boot-tool in {os.path.join(roots.etc, UUIDS)}",)
        loader = PROXMOX_BOOT_TOOL if loader == SYSTEMD_BOOT else loader
    if loader == GRUB and _blscfg(roots):
        loader, facts = BLS, (*facts, f"{_menu(roots)} takes its entries from loader/entries (blscfg)")
    return Detected(loader, facts, bool(uuids))


def _votes(roots: Roots) -> list[tuple[str, str]]:
    """Return (loader, fact) for every trace there is."""
    votes = []
    running = parse(read_line(os.path.join(roots.procfs, "cmdline")) or "")
    image = running.named("BOOT_IMAGE")
    info = efi_text(roots, "LoaderInfo")
    efi = os.path.isdir(os.path.join(roots.sysfs, "firmware/efi"))
    if info:
        named = SYSTEMD_BOOT if info.startswith("systemd-boot") else GRUB if info.startswith("GRUB") else info
        votes.append((named, f"the EFI variable LoaderInfo says {info}"))
    if image and text(_menu(roots)) is not None:
        fact = f"/proc/cmdline has {image[0].text}, as GRUB passes it, and {_menu(roots)} exists"
        votes.append((GRUB, fact))
    stub = [token for token in running.named("initrd") if (token.value or "").startswith("\\")]
    if stub and not image and efi:
        votes.append((SYSTEMD_BOOT, f"/proc/cmdline has {stub[0].text}, as an EFI stub is given it"))
    return votes or _weak_votes(roots, efi)


def _weak_votes(roots: Roots, efi: bool) -> list[tuple[str, str]]:
    """Return what is installed, for a kernel that shows no trace of its loader."""
    votes = []
    entries = roots.loader_entries()
    if text(_menu(roots)) is not None:
        votes.append((GRUB, f"{_menu(roots)} exists"))
    if efi and any(glob.glob(os.path.join(path, "*.conf")) for path in entries):
        votes.append((SYSTEMD_BOOT, f"boot entries in {', '.join(entries)}"))
    uuids = text(os.path.join(roots.etc, UUIDS))
    if efi and uuids and text(os.path.join(roots.etc, CMDLINE)) and secure_boot(roots) is False:
        votes.append((SYSTEMD_BOOT, "proxmox-boot-tool on EFI without Secure Boot, with /etc/kernel/cmdline"))
    return votes


def _menu(roots: Roots) -> str:
    return os.path.join(roots.boot, "grub/grub.cfg")


def _blscfg(roots: Roots) -> bool:
    menu = text(_menu(roots)) or ""
    return any(line.split("#")[0].strip() == "blscfg" for line in menu.splitlines())


def config(loader: str, roots: Roots, regenerate: Optional[Sequence[str]] = None) -> BootConfig:
    """Return the back end of a loader. ``regenerate`` replaces its own tool, off the live host."""
    tool = list(regenerate) if regenerate else None
    machine_id = read_line(os.path.join(roots.etc, "machine-id"))
    directories = roots.loader_entries()
    if loader == GRUB:
        return Grub(roots.etc, roots.boot, tool or _own_tool(roots, "update-grub"))
    if loader == PROXMOX_BOOT_TOOL:
        uuids = [line.strip() for line in (text(os.path.join(roots.etc, UUIDS)) or "").splitlines()]
        hidden = roots.live and roots.esps is None
        entries = HiddenEntries(list(filter(None, uuids))) if hidden else BlsEntries(directories)
        return ProxmoxBootTool(
            roots.etc, roots.procfs, entries, tool or _own_tool(roots, "proxmox-boot-tool", "refresh")
        )
    if loader == SYSTEMD_BOOT:
        return SystemdBoot(roots.etc, roots.procfs, BlsEntries(directories, machine_id))
    directories += [path for path in (os.path.join(roots.boot, "loader/entries"),) if os.path.isdir(path)]
    return BlsEntries(list(dict.fromkeys(directories)), machine_id)


def _own_tool(roots: Roots, *argv: str) -> list[str]:
    if not roots.live:
        raise BootError(
            f"{roots.etc} is not this host's: {argv[0]} would work on the running system; "
            "name a command with the option regenerate"
        )
    return list(argv)
