# SPDX-License-Identifier: GPL-3.0-or-later
"""Which loader a host boots with, from the traces it left, and what happens when they say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_tuning import boot_loader
from gpu_tuning.boot_files import BootError
from gpu_tuning.boot_loader import CannotTell, Roots
from support.boot import LOADER_INFO, Host, grub_host, systemd_boot_host


def roots(host: Host) -> Roots:
    top = host.root
    esps = tuple(host.esps)
    return Roots(str(top / "etc"), str(top / "boot"), str(top / "proc"), str(top / "sys"), esps)


def detect(host: Host) -> tuple[str, str]:
    found = boot_loader.detect(roots(host))
    return found.loader, "; ".join(found.evidence)


def make_efi(host: Host, info: str | None = None, secure: bool | None = None) -> None:
    efivars = host.root / "sys/firmware/efi/efivars"
    efivars.mkdir(parents=True, exist_ok=True)
    if info is not None:
        (efivars / LOADER_INFO).write_bytes(b"\6\0\0\0" + f"{info}\0".encode("utf-16-le"))
    if secure is not None:
        name = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
        (efivars / name).write_bytes(b"\6\0\0\0" + (b"\1" if secure else b"\0"))


def test_grub_under_bios(tmp_path: Path) -> None:
    loader, evidence = detect(grub_host(tmp_path / "host"))
    assert loader == "grub"
    assert "BOOT_IMAGE=/boot/vmlinuz-6.1.0-57-cloud-amd64" in evidence
    assert "grub.cfg exists" in evidence


def test_systemd_boot_names_itself(tmp_path: Path) -> None:
    loader, evidence = detect(systemd_boot_host(tmp_path / "host"))
    assert loader == "systemd-boot"
    assert "LoaderInfo says systemd-boot 252" in evidence


def test_grub_menu_left_over_beside_systemd_boot(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    (host.root / "boot/grub/grub.cfg").write_text("set default=0\n")
    assert detect(host)[0] == "systemd-boot"


def test_systemd_boot_entries_left_over_beside_grub(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    entries = host.root / "boot/efi/loader/entries"
    entries.mkdir(parents=True)
    (entries / "a.conf").write_text("title A\nlinux /a\n")
    make_efi(host, "GRUB 2.12")
    host.esps = [str(host.root / "boot/efi")]
    assert detect(host)[0] == "grub"


def test_proxmox_on_zfs_without_secure_boot(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    (host.root / "etc/kernel/proxmox-boot-uuids").write_text("4E56-5249\n")
    loader, evidence = detect(host)
    assert loader == "proxmox-boot-tool"
    assert "1 ESPs of proxmox-boot-tool" in evidence


def test_proxmox_with_secure_boot_is_grubs(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    (host.root / "etc/kernel/proxmox-boot-uuids").write_text("4E56-5249\n")
    make_efi(host, secure=True)
    found = boot_loader.detect(roots(host))
    assert (found.loader, found.proxmox) == ("grub", True)


def test_traces_that_contradict_each_other(tmp_path: Path) -> None:
    host = grub_host(tmp_path / "host")
    make_efi(host, "systemd-boot 252.38")
    with pytest.raises(CannotTell, match=r"contradict each other: .*LoaderInfo.*BOOT_IMAGE.*option loader"):
        boot_loader.detect(roots(host))


def test_no_trace_at_all(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    host.running("rdinit=/init")
    with pytest.raises(CannotTell, match="are missing: name it with the option loader"):
        boot_loader.detect(roots(host))


def test_two_loaders_installed_and_no_trace(tmp_path: Path) -> None:
    host = systemd_boot_host(tmp_path / "host")
    (host.root / "sys/firmware/efi/efivars" / LOADER_INFO).unlink()
    host.running("root=UUID=6d1f")
    (host.root / "boot/grub/grub.cfg").write_text("set default=0\n")
    with pytest.raises(CannotTell, match="contradict each other"):
        boot_loader.detect(roots(host))


def test_own_tools_are_not_run_for_another_machines_files(tmp_path: Path) -> None:
    with pytest.raises(BootError, match="update-grub would work on the running system"):
        boot_loader.config("grub", roots(grub_host(tmp_path / "host")))


@pytest.mark.parametrize(("secure", "expected"), [(True, True), (False, False), (None, False)])
def test_secure_boot(tmp_path: Path, secure: bool | None, expected: bool) -> None:
    host = Host(tmp_path / "host")
    assert boot_loader.secure_boot(roots(host)) is None
    make_efi(host, secure=secure)
    assert boot_loader.secure_boot(roots(host)) is expected
