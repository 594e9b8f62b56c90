# SPDX-License-Identifier: GPL-3.0-or-later
"""An upgrade with a way back, step by step, on made-up hosts whose loader's tools are stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import kernel_cmdline
from gpu_tuning.boot_config import WAY_BACK
from gpu_tuning.boot_files import BootError
from gpu_tuning.boot_loader import roots_from
from gpu_tuning.grub_menu import read
from gpu_tuning.kernel_boot import WATCHDOG, KernelBoot
from support.boot import NEW, OLD, Host, grub_host, proxmox_host, systemd_boot_host
from support.tree import changed_paths, manifest

TOKENS = ["amd_pstate=active", "panic=30"]
OLD_LINE = f'BOOT_IMAGE=/boot/vmlinuz-{OLD} root=UUID=6d1f ro quiet dyndbg="file x.c +p"'
NEW_LINE = f"BOOT_IMAGE=/boot/vmlinuz-{NEW} root=UUID=6d1f ro quiet {' '.join(TOKENS)}"

# grub-reboot, grub-editenv and grub-set-default keep their environment block in a file of lines.
TOOLS = {
    "grub-reboot": 'echo "next_entry=$1" >"$GRUB_ENV"',
    "grub-set-default": 'echo "saved_entry=$1" >"$GRUB_ENV"',
    "grub-editenv": 'case $1 in list) cat "$GRUB_ENV" ;; -) sed -i "/^$3=/d" "$GRUB_ENV" ;; esac',
    "bootctl": (
        "case $1 in set-default) name=LoaderEntryDefault ;; set-oneshot) name=LoaderEntryOneShot ;; esac\n"
        "file=$EFIVARS/$name-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f\n"
        'rm -f "$file"; [ -z "$2" ] || { printf "\\6\\0\\0\\0"; printf "%s\\0" "$2" | '
        'sed "s/./&\\x00/g"; } >"$file"'
    ),
}


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in TOOLS.items():
        (folder / name).write_text(f"#!/bin/sh\nset -e\n{script}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "grubenv").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("GRUB_ENV", str(tmp_path / "grubenv"))
    return folder


def boot(host: Host, line: str, release: str, boot_id: str) -> None:
    """Have the host run a kernel."""
    host.running(line, release)
    random = host.root / "proc/sys/kernel/random"
    random.mkdir(parents=True, exist_ok=True)
    (random / "boot_id").write_text(f"{boot_id}\n")
    pstate = host.root / "sys/devices/system/cpu/amd_pstate"
    pstate.mkdir(parents=True, exist_ok=True)
    (pstate / "status").write_text("active\n" if "amd_pstate=active" in line else "disable\n")
    cpufreq = host.root / "sys/devices/system/cpu/cpu0/cpufreq"
    cpufreq.mkdir(parents=True, exist_ok=True)
    (cpufreq / "scaling_driver").write_text("amd-pstate-epp\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = grub_host(tmp_path / "host")
    (made.root / "proc/self").mkdir()
    (made.root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n")
    boot(made, OLD_LINE, OLD, "first")
    return made


def step(host: Host, state: str, check: bool = False, **more: Any) -> dict[str, Any]:
    arguments = {
        **host.arguments(),
        "modules": [],
        "accept_no_fallback": False,
        "release": "",
        "state": state,
    }
    arguments.update(more)
    return KernelBoot(arguments, roots_from(arguments)).run(check)


def guard(host: Host, **more: Any) -> dict[str, Any]:
    return step(host, "guarded", release=NEW, parameters=TOKENS, **more)


def set_line(host: Host) -> None:
    arguments = host.arguments(*TOKENS)
    kernel_cmdline.run(kernel_cmdline.request(arguments), check=False)


def menu(host: Host):
    return read((host.root / "boot/grub/grub.cfg").read_text())


def upgrade(host: Host) -> None:
    guard(host)
    set_line(host)
    step(host, "armed", release=NEW, parameters=TOKENS)


def test_the_way_back_has_the_old_command_line_and_is_the_default(host: Host) -> None:
    old = manifest(host.root)
    assert guard(host, check=True)["changed"]
    assert changed_paths(old, manifest(host.root)) == []
    assert guard(host)["changed"]
    set_line(host)
    found = menu(host)
    way_back = found.find(found.default)
    assert way_back is not None
    assert way_back.path == WAY_BACK
    assert way_back.release == OLD
    assert "initrd" in way_back.body
    # A quoted value in GRUB's own quoting, so that the kernel gets what it was running with.
    assert way_back.line.text == "root=UUID=6d1f ro quiet 'dyndbg=file x.c +p'"
    ordinary = found.for_release(OLD)
    assert ordinary is not None
    assert "amd_pstate=active" in ordinary.line.text
    assert not guard(host)["changed"]


def test_arming_books_one_boot_and_keeps_the_default(host: Host, tmp_path: Path) -> None:
    upgrade(host)
    path = f"gnulinux-advanced-6d1f>gnulinux-{NEW}-advanced-6d1f"
    assert (tmp_path / "grubenv").read_text() == f"next_entry={path}\n"
    assert menu(host).default == WAY_BACK
    state = json.loads((host.root / "state/kernel-upgrade.json").read_text())
    assert (state["phase"], state["release"], state["before"]["boot_id"]) == ("armed", NEW, "first")
    assert step(host, "verified")["outcome"] == "pending"


def test_a_good_kernel_becomes_the_default_and_nothing_of_ours_stays(host: Host) -> None:
    old = manifest(host.root)
    upgrade(host)
    boot(host, NEW_LINE, NEW, "second")
    verdict = step(host, "verified")
    assert (verdict["outcome"], verdict["changed"], verdict["msg"]) == ("good", True, None)
    found = menu(host)
    default = found.find(found.default)
    assert default is not None
    assert default.release == NEW
    left = [p for p in changed_paths(old, manifest(host.root)) if p.startswith("etc/")]
    assert left == ["etc/default/grub.d/zz-gpu-tuning-cmdline.cfg"]
    again = step(host, "verified")
    assert (again["outcome"], again["changed"]) == ("good", False)


def test_default_that_means_an_older_kernel_is_replaced(host: Host) -> None:
    defaults = host.root / "etc/default/grub"
    defaults.write_text(defaults.read_text().replace("GRUB_DEFAULT=0", "GRUB_DEFAULT='1>2'"))
    upgrade(host)
    boot(host, NEW_LINE, NEW, "second")
    step(host, "verified")
    found = menu(host)
    assert found.default == f"gnulinux-advanced-6d1f>gnulinux-{NEW}-advanced-6d1f"


def test_saved_default_is_saved(host: Host, tmp_path: Path) -> None:
    defaults = host.root / "etc/default/grub"
    defaults.write_text(defaults.read_text().replace("GRUB_DEFAULT=0", "GRUB_DEFAULT=saved"))
    upgrade(host)
    boot(host, NEW_LINE, NEW, "second")
    step(host, "verified")
    assert menu(host).default == "saved"
    path = f"gnulinux-advanced-6d1f>gnulinux-{NEW}-advanced-6d1f"
    assert (tmp_path / "grubenv").read_text() == f"saved_entry={path}\n"


def test_fallen_back(host: Host) -> None:
    upgrade(host)
    boot(host, OLD_LINE, OLD, "third")
    verdict = step(host, "verified")
    assert verdict["outcome"] == "fell_back"
    assert verdict["msg"] == (
        f"kernel {NEW} did not come up: it panicked, hung or was reset, and the host came back by itself "
        f"on kernel {OLD} with its old command line"
    )
    assert verdict["record"]["phase"] == "failed"
    assert menu(host).default == WAY_BACK


def test_came_up_wrong(host: Host) -> None:
    upgrade(host)
    boot(host, NEW_LINE.replace("amd_pstate=active", "amd_pstate=passive"), NEW, "second")
    verdict = step(host, "verified")
    assert verdict["outcome"] == "wrong"
    assert "cmdline amd_pstate=active: wanted amd_pstate=active, found None" in verdict["msg"]
    assert "amd_pstate: wanted active, found disable" in verdict["msg"]
    assert menu(host).default == WAY_BACK
    # Killed before the reboot to the old kernel: the next run finds the same.
    assert step(host, "verified")["outcome"] == "wrong"


def test_somebody_reboots_before_it_is_armed(host: Host) -> None:
    guard(host)
    set_line(host)
    boot(host, OLD_LINE, OLD, "second")
    assert step(host, "verified")["outcome"] == "pending"


def test_a_kernel_booted_by_hand_is_judged_too(host: Host) -> None:
    guard(host)
    set_line(host)
    boot(host, NEW_LINE, NEW, "second")
    assert step(host, "verified")["outcome"] == "good"


def test_a_second_attempt_keeps_the_first_way_back(host: Host) -> None:
    """Whatever runs while an upgrade is under way may be what is being tried."""
    upgrade(host)
    boot(host, NEW_LINE, NEW, "second")
    guard(host)
    found = menu(host)
    way_back = found.find(WAY_BACK)
    assert way_back is not None
    assert way_back.release == OLD


def test_arming_without_the_parameters_in_the_entry_is_refused(host: Host) -> None:
    guard(host)
    with pytest.raises(BootError, match=f"boot entry of kernel {re.escape(NEW)} lacks amd_pstate=active"):
        step(host, "armed", release=NEW, parameters=TOKENS)


def test_arming_without_a_way_back_is_refused(host: Host) -> None:
    with pytest.raises(BootError, match="there is no way back yet"):
        step(host, "armed", release=NEW, parameters=TOKENS)


@pytest.mark.parametrize(
    ("mount", "device", "said"),
    [
        ("- zfs rpool/ROOT/pve-1 rw", None, "on zfs"),
        ("- btrfs /dev/sda2 rw", None, "on btrfs"),
        ("- ext4 /dev/mapper/pve-root rw", "dm", "LVM"),
        ("- ext4 /dev/md0 rw", "md", "MD RAID"),
    ],
)
def test_no_one_time_boot_on_this_disk(host: Host, mount: str, device: str | None, said: str) -> None:
    (host.root / "proc/self/mountinfo").write_text(f"22 1 8:1 / / rw shared:1 {mount}\n")
    if device:
        (host.root / "sys/dev/block/8:1" / device).mkdir(parents=True)
    guard(host)
    set_line(host)
    with pytest.raises(BootError, match=f"{said}.*kernel_upgrade_accept_no_fallback"):
        step(host, "armed", release=NEW, parameters=TOKENS)
    result = step(host, "armed", release=NEW, parameters=TOKENS, accept_no_fallback=True)
    assert result["outcome"] == "default"
    assert menu(host).default == f"gnulinux-advanced-6d1f>gnulinux-{NEW}-advanced-6d1f"
    # It came up, but wrong: the old kernel becomes the default again.
    boot(host, NEW_LINE.replace("amd_pstate=active", ""), NEW, "second")
    assert step(host, "verified")["outcome"] == "wrong"
    assert menu(host).default == WAY_BACK


def test_a_later_grub_default_is_named(host: Host) -> None:
    (host.root / "etc/default/grub.d/zzz.cfg").write_text("GRUB_DEFAULT=0\n")
    with pytest.raises(BootError, match=r"a file after .*zz-gpu-tuning-default.cfg sets GRUB_DEFAULT"):
        guard(host)


def test_watchdog_only_where_there_is_one(host: Host) -> None:
    upgrade(host)
    assert not (host.root / "etc" / WATCHDOG).exists()
    identity = host.root / "sys/class/watchdog/watchdog0/identity"
    identity.parent.mkdir(parents=True)
    identity.write_text("Software Watchdog\n")
    upgrade(host)
    assert not (host.root / "etc" / WATCHDOG).exists()
    identity.write_text("iTCO_wdt\n")
    upgrade(host)
    assert "RuntimeWatchdogSec=60s" in (host.root / "etc" / WATCHDOG).read_text()
    boot(host, NEW_LINE, NEW, "second")
    step(host, "verified")
    assert not (host.root / "etc" / WATCHDOG).exists()


def test_only_the_command_line(host: Host) -> None:
    """The same kernel: the way back differs from its ordinary entry in the command line alone."""
    step(host, "guarded", release=OLD, parameters=TOKENS)
    set_line(host)
    step(host, "armed", release=OLD, parameters=TOKENS)
    boot(host, OLD_LINE, OLD, "second")
    assert step(host, "verified")["outcome"] == "fell_back"


def test_gpus_and_modules_are_compared(host: Host) -> None:
    gpu = host.root / "sys/bus/pci/devices/0000:c1:00.0"
    gpu.mkdir(parents=True)
    for name, value in (
        ("vendor", "0x10de"),
        ("class", "0x030000"),
        ("current_link_width", "16"),
        ("max_link_width", "16"),
    ):
        (gpu / name).write_text(f"{value}\n")
    (host.root / "proc/modules").write_text("nvidia 1 0 - Live 0x0\nloop 1 0 - Live 0x0\n")
    upgrade(host)
    boot(host, NEW_LINE, NEW, "second")
    (gpu / "current_link_width").write_text("8\n")
    (host.root / "proc/modules").write_text("loop 1 0 - Live 0x0\n")
    msg = step(host, "verified")["msg"]
    assert "gpu 0000:c1:00.0: wanted 16, found 8: the link came up with x8 of x16 lanes" in msg
    assert "module nvidia: wanted loaded, found absent" in msg


def test_systemd_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = systemd_boot_host(tmp_path / "host")
    efivars = host.root / "sys/firmware/efi/efivars"
    monkeypatch.setenv("EFIVARS", str(efivars))
    entries = host.root / "boot/efi/loader/entries"
    line = "initrd=\\x root=UUID=6d1f ro console=ttyS0,115200"
    boot(host, line, OLD, "first")
    (entries / "new.conf").write_text((entries / "6.1.conf").read_text().replace(OLD, NEW))
    guard(host)
    set_line(host)
    way_back = (entries / f"{WAY_BACK}.conf").read_text()
    assert "options    root=UUID=6d1f ro console=ttyS0,115200\n" in way_back
    assert f"title Way back: Linux {OLD} as it was\n" in way_back
    assert "amd_pstate=active" in (entries / "6.1.conf").read_text()
    step(host, "armed", release=NEW, parameters=TOKENS)
    assert "new.conf".encode("utf-16-le") in next(efivars.glob("LoaderEntryOneShot-*")).read_bytes()
    boot(host, f"{line} {' '.join(TOKENS)}", NEW, "second")
    assert step(host, "verified")["outcome"] == "good"
    assert not (entries / f"{WAY_BACK}.conf").exists()
    assert list(efivars.glob("LoaderEntryDefault-*")) == []


def test_proxmox_boot_tool_with_systemd_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`refresh` gives every entry the new command line; the way back is none of its own, on both ESPs."""
    host = proxmox_host(tmp_path / "host")
    efivars = host.root / "sys/firmware/efi/efivars"
    monkeypatch.setenv("EFIVARS", str(efivars))
    old, new, line = "6.5.13-6-pve", "6.8.12-9-pve", "initrd=\\x root=ZFS=rpool/ROOT/pve-1 boot=zfs quiet"
    boot(host, line, old, "first")
    step(host, "guarded", release=new, parameters=TOKENS)
    set_line(host)
    for esp in host.esps:
        entries = Path(esp, "loader/entries")
        assert "amd_pstate=active" in (entries / f"proxmox-{old}.conf").read_text()
        assert "boot=zfs quiet\n" in (entries / f"{WAY_BACK}.conf").read_text()
    step(host, "armed", release=new, parameters=TOKENS)
    booked = next(efivars.glob("LoaderEntryOneShot-*")).read_bytes()
    assert f"proxmox-{new}.conf".encode("utf-16-le") in booked
    boot(host, f"{line} {' '.join(TOKENS)}", new, "second")
    assert step(host, "verified")["outcome"] == "good"
    assert not list(host.root.glob("esp*/loader/entries/gpu-tuning*"))


def test_the_script_is_what_grub_accepts(host: Host) -> None:
    guard(host)
    done = subprocess.run(
        ["grub-script-check", host.root / "boot/grub/grub.cfg"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
