# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines' boot configuration, made of the files in tests/fixtures/boot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures/boot"
OLD, NEW = "6.1.0-57-cloud-amd64", "6.12.117+deb12-cloud-amd64"
LOADER_INFO = "LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"


class Host:
    """A tree with etc, boot, proc and sys, and the arguments that point kernel_cmdline at it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for part in ("etc/default/grub.d", "etc/grub.d", "etc/kernel", "boot/grub", "proc", "sys", "state"):
            (root / part).mkdir(parents=True)
        (root / "state").chmod(0o700)
        self.running(f"BOOT_IMAGE=/boot/vmlinuz-{OLD} root=UUID=6d1f ro quiet")
        self.regenerate: list[str] = []
        self.esps: list[str] = []

    def running(self, line: str, release: str = OLD) -> None:
        """Say what the running kernel was started with."""
        (self.root / "proc/sys/kernel").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/cmdline").write_text(f"{line}\n")
        (self.root / "proc/sys/kernel/osrelease").write_text(f"{release}\n")

    def arguments(self, *tokens: str, **more: Any) -> dict[str, Any]:
        """Return the module's arguments."""
        roots = {f"{name}_root": str(self.root / name) for name in ("etc", "boot", "state")}
        roots |= {"procfs_root": str(self.root / "proc"), "sysfs_root": str(self.root / "sys")}
        return {
            "parameters": list(tokens),
            "remove": [],
            "state": "present",
            "loader": "auto",
            "regenerate": self.regenerate or None,
            "esps": self.esps,
            **roots,
            **more,
        }


def grub_host(root: Path, defaults: str = "debian-12.grub", *drop_ins: str) -> Host:
    """Return a host with GRUB and two kernels, its menu made."""
    host = Host(root)
    shutil.copy(FIXTURES / "grub" / defaults, root / "etc/default/grub")
    for name in drop_ins:
        shutil.copy(FIXTURES / "grub" / name, root / "etc/default/grub.d" / name)
    host.regenerate = [str(FIXTURES / "mkconfig"), str(root / "etc"), str(root / "boot"), NEW, OLD]
    if defaults != "unclosed-quote.grub":
        subprocess.run(host.regenerate, check=True)
    return host


def systemd_boot_host(root: Path) -> Host:
    """Return a host with systemd-boot on a mounted ESP, one kernel-install entry and one made by hand."""
    host = Host(root)
    entries = root / "boot/efi/loader/entries"
    entries.mkdir(parents=True)
    for path in (FIXTURES / "bls").iterdir():
        shutil.copy(path, entries)
    shutil.copy(FIXTURES / "cmdline/no-final-newline", root / "etc/kernel/cmdline")
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    efivars = root / "sys/firmware/efi/efivars"
    efivars.mkdir(parents=True)
    (efivars / LOADER_INFO).write_bytes(b"\6\0\0\0" + "systemd-boot 252.38-1~deb12u1\0".encode("utf-16-le"))
    host.running("initrd=\\x root=UUID=6d1f ro console=ttyS0,115200")
    host.esps = [str(root / "boot/efi")]
    return host


def proxmox_host(root: Path) -> Host:
    """A ZFS host on EFI without Secure Boot. Its tool is a stand-in that does what its manual says."""
    host = systemd_boot_host(root)
    (root / "etc/kernel/proxmox-boot-uuids").write_text("4E56-5249\n4E56-524A\n")
    (root / "etc/kernel/cmdline").write_bytes((FIXTURES / "cmdline/two-lines").read_bytes())
    for path in (root / "boot/efi/loader/entries").iterdir():
        path.unlink()
    host.regenerate = [str(FIXTURES / "proxmox-boot-tool"), str(root), "refresh"]
    host.esps = [str(root / "esp1"), str(root / "esp2")]
    for esp in host.esps:
        Path(esp, "loader/entries").mkdir(parents=True)
    (root / "boot").mkdir(exist_ok=True)
    for release in ("6.8.12-9-pve", "6.5.13-6-pve"):
        (root / f"boot/vmlinuz-{release}").touch()
    subprocess.run(host.regenerate, check=True)
    return host
