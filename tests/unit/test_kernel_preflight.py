# SPDX-License-Identifier: GPL-3.0-or-later
"""What stands in the way of an upgrade is found before anything changes. apt, dpkg and dkms are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import kernel_dkms, kernel_packages, kernel_preflight
from gpu_tuning.boot_loader import roots_from
from gpu_tuning.kernel_preflight import Preflight
from support.boot import NEW, OLD, Host, grub_host
from support.tree import changed_paths, manifest

META, IMAGE = "linux-image-6.12-cloud-amd64", f"linux-image-{NEW}"
CPUINFO = "vendor_id\t: {vendor}\nflags\t\t: fpu cppc\n"

# Each answers from files in $APT: policy/NAME (a candidate), depends/NAME, installed, held, removes.
TOOLS = {
    "apt-cache": """
case $1 in
policy) echo "$2:"; echo "  Candidate: $(cat "$APT/policy/$2" 2>/dev/null || echo '(none)')" ;;
show) name=${3%%=*}; printf 'Package: %s\\nInstalled-Size: 1024\\nDepends: %s\\n' "$name" \
    "$(cat "$APT/depends/$name" 2>/dev/null)" ;;
esac""",
    "apt-get": """
[ ! -e "$APT/broken" ] || { echo "E: you have held broken packages." >&2; exit 100; }
cat "$APT/removes" 2>/dev/null; echo "Inst linux-image-new (1 local)" """,
    "apt-mark": 'cat "$APT/held" 2>/dev/null || :',
    "dpkg-query": """
for name; do :; done
grep -qx "$name" "$APT/installed" 2>/dev/null || { echo "no packages found" >&2; exit 1; }
echo "installed 1" """,
    "dkms": """
case $1 in
status) [ "$2" = -k ] || cat "$APT/dkms" ;;
build) echo "$*" >>"$APT/builds"; [ ! -e "$APT/dkms-fails" ] || { echo "bad exit status: 2" >&2; exit 10; } ;;
esac""",
}


@pytest.fixture(autouse=True)
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, answers = tmp_path / "tools", tmp_path / "apt"
    for each in (folder, answers / "policy", answers / "depends"):
        each.mkdir(parents=True)
    for name, script in TOOLS.items():
        if name == "dkms":
            continue
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    for name in (META, IMAGE):
        (answers / "policy" / name).write_text("6.12.117-1")
    (answers / "depends" / META).write_text(f"{IMAGE} (= 6.12.117-1), linux-base (>= 4.9)")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("APT", str(answers))
    return answers


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = grub_host(tmp_path / "host")
    (made.root / "proc/self").mkdir()
    (made.root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n")
    (made.root / "proc/cpuinfo").write_text(CPUINFO.format(vendor="AuthenticAMD"))
    cpuidle = made.root / "sys/devices/system/cpu/cpuidle"
    cpuidle.mkdir(parents=True)
    (cpuidle / "current_driver").write_text("acpi_idle\n")
    (made.root / f"boot/vmlinuz-{OLD}").write_bytes(b"x" * 100)
    return made


def look(host: Host, **more: Any) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    arguments = {
        **host.arguments("amd_pstate=active", "processor.max_cstate=1"),
        **{"package": META, "headers": False, "retry": False, "dkms_trial": True},
        **{"accept_no_fallback": False, "panic_seconds": 0},
        **more,
    }
    result = Preflight(arguments, roots_from(arguments)).run()
    return result, {row["target"]: (row["status"], row["reason"]) for row in result["rows"]}


def test_all_is_well_and_nothing_is_changed(host: Host) -> None:
    old = manifest(host.root)
    result, rows = look(host)
    assert not result["failed"], result.get("msg")
    assert changed_paths(old, manifest(host.root)) == []
    assert (result["release"], result["running_release"]) == (NEW, OLD)
    assert result["packages"] == [META, IMAGE]
    assert result["parameters"] == ["amd_pstate=active", "processor.max_cstate=1"]
    assert rows["package"] == ("ok", f"{META} is {IMAGE}, kernel {NEW}")
    assert rows["way_back"] == ("ok", f"kernel {OLD} stays installed")
    assert rows["watchdog"][0] == "not_applicable"
    assert (result["one_time_boot"], result["settled"], result["unfinished"]) == (True, False, False)


def fails(host: Host, target: str, **more: Any) -> str:
    result, rows = look(host, **more)
    assert result["failed"]
    assert rows[target][0] == "failed", rows
    assert result["msg"].startswith("nothing was changed: ")
    assert result["packages"] == []
    return rows[target][1]


def test_unknown_package(host: Host) -> None:
    assert "no configured source has linux-image-7" in fails(host, "package", package="linux-image-7")


def test_pinned_away(host: Host, apt: Path) -> None:
    (apt / "policy" / IMAGE).unlink()
    assert "its pin forbids every version" in fails(host, "package")


def test_package_that_is_no_kernel(host: Host, apt: Path) -> None:
    (apt / "policy/hello").write_text("1")
    assert "hello leads to no kernel image" in fails(host, "package", package="hello")


def test_on_hold(host: Host, apt: Path) -> None:
    (apt / "held").write_text(f"{IMAGE}\n")
    assert f"{IMAGE} on hold" in fails(host, "held")


def test_apt_would_remove_the_way_back(host: Host, apt: Path) -> None:
    (apt / "removes").write_text(f"Remv linux-image-{OLD} [6.1]\n")
    assert f"would remove linux-image-{OLD}" in fails(host, "simulation")


def test_apt_would_not(host: Host, apt: Path) -> None:
    (apt / "broken").touch()
    assert "held broken packages" in fails(host, "simulation")


def test_no_space(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_preflight, "_free_mib", lambda path: 31)
    assert "has 31 MiB free and the kernel needs 32" in fails(host, "space")


def test_the_running_kernels_image_is_gone(host: Host) -> None:
    (host.root / f"boot/vmlinuz-{OLD}").unlink()
    assert "no kernel to come back to" in fails(host, "way_back")


def test_no_one_time_boot(host: Host) -> None:
    (host.root / "proc/self/mountinfo").write_text("22 1 0:9 / / rw - zfs rpool rw\n")
    assert "tried again and again; to go on" in fails(host, "one_time_boot")
    result, rows = look(host, accept_no_fallback=True)
    assert not result["failed"]
    assert not result["one_time_boot"]
    assert rows["one_time_boot"][0] == "not_applicable"


@pytest.mark.parametrize(
    ("change", "token", "reason"),
    [
        (("proc/cpuinfo", CPUINFO.format(vendor="GenuineIntel")), "amd_pstate=active", "no AMD CPU"),
        (("proc/cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t: fpu\n"), "amd_pstate=active", "no CPPC"),
        (
            ("sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n"),
            "processor.max_cstate=1",
            "the idle driver is intel_idle",
        ),
    ],
)
def test_parameters_that_can_do_nothing_are_left_out(
    host: Host, change: tuple[str, str], token: str, reason: str
) -> None:
    (host.root / change[0]).write_text(change[1])
    result, rows = look(host)
    assert not result["failed"]
    assert token not in result["parameters"]
    assert rows[f"parameter {token}"][0] == "not_applicable"
    assert rows[f"parameter {token}"][1].startswith(reason)


def test_too_old_a_kernel_for_the_parameter(host: Host) -> None:
    _, rows = look(host, package="")
    assert "has no amd_pstate=active: that came with 6.3" in rows["parameter amd_pstate=active"][1]


def test_panic_is_added_only_where_nothing_reboots(host: Host) -> None:
    assert "panic=30" in look(host, panic_seconds=30)[0]["parameters"]
    host.running(f"BOOT_IMAGE=/boot/vmlinuz-{OLD} root=UUID=6d1f ro panic=5")
    assert "panic=30" not in look(host, panic_seconds=30)[0]["parameters"]


def test_settled(host: Host) -> None:
    host.running("BOOT_IMAGE=/x amd_pstate=active processor.max_cstate=1", NEW)
    result, rows = look(host, panic_seconds=30)
    assert result["settled"]
    assert result["packages"] == []
    assert "space" not in rows


def give_dkms(folder: Path) -> None:
    (folder.parent / "tools/dkms").write_text(f"#!/bin/sh\n{TOOLS['dkms']}\n")
    (folder.parent / "tools/dkms").chmod(0o755)


def test_dkms_modules_bring_headers_and_must_build(
    host: Host, apt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_dkms(apt)
    (apt / "dkms").write_text(f"nvidia/550.54.14, {OLD}, x86_64: installed\n")
    headers = f"linux-headers-{NEW}"
    monkeypatch.setattr(kernel_dkms, "_unpacked_headers", lambda name, release, scratch: scratch)
    result, rows = look(host)
    assert result["packages"] == [META, IMAGE, headers]
    assert rows["dkms"] == ("ok", f"nvidia/550.54.14 built for {NEW} in a scratch directory")
    assert f"build -m nvidia -v 550.54.14 -k {NEW}" in (apt / "builds").read_text()
    (apt / "dkms-fails").touch()
    assert f"nvidia 550.54.14 does not build for kernel {NEW}" in fails(host, "dkms")


def test_secure_boot_wants_the_key_enrolled(host: Host, apt: Path) -> None:
    give_dkms(apt)
    (apt / "dkms").write_text("nvidia/550.54.14: added\n")
    efivars = host.root / "sys/firmware/efi/efivars"
    efivars.mkdir(parents=True)
    (efivars / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(b"\6\0\0\0\1")
    assert "not enrolled: mokutil --import" in fails(host, "secure_boot", dkms_trial=False)


def test_guests_are_listed(host: Host) -> None:
    (host.root / "sys/fs/cgroup/lxc.payload.gpu").mkdir(parents=True)
    (host.root / "sys/fs/cgroup/lxc/101").mkdir(parents=True)
    result, rows = look(host)
    assert result["guests"] == ["container 101", "container gpu"]
    assert rows["guests"] == ("ok", "a reboot stops container 101, container gpu")


def test_what_was_given_up_is_not_tried_again_unless_told(host: Host) -> None:
    parameters = '["amd_pstate=active", "processor.max_cstate=1"]'
    (host.root / "state/kernel-upgrade.json").write_text(
        f'{{"phase": "failed", "release": "{NEW}", "parameters": {parameters}, "failure": "it panicked"}}'
    )
    assert "given up: it panicked; to try it again" in fails(host, "earlier_failure")
    assert not look(host, retry=True)[0]["failed"]


@pytest.mark.parametrize(
    ("package", "release"),
    [
        ("linux-image-6.1.0-57-cloud-amd64", "6.1.0-57-cloud-amd64"),
        ("linux-image-unsigned-6.8.0-45-generic", "6.8.0-45-generic"),
        ("proxmox-kernel-6.8.12-9-pve-signed", "6.8.12-9-pve"),
        ("pve-kernel-5.15.158-2-pve", "5.15.158-2-pve"),
        ("proxmox-kernel-6.8", None),
        ("linux-image-6.12-cloud-amd64", None),
        ("linux-image-generic", None),
    ],
)
def test_releases_in_package_names(package: str, release: str | None) -> None:
    assert kernel_packages.image_release(package) == release


def test_proxmox_metapackage(apt: Path) -> None:
    image = "proxmox-kernel-6.8.12-9-pve-signed"
    (apt / "policy/proxmox-kernel-6.8").write_text("6.8.12-9")
    (apt / "policy" / image).write_text("6.8.12-9")
    (apt / "depends/proxmox-kernel-6.8").write_text(f"pve-firmware, {image} | proxmox-kernel-6.8.12-9-pve")
    kernel = kernel_packages.resolve("proxmox-kernel-6.8")
    assert (kernel.package, kernel.release) == (image, "6.8.12-9-pve")
    assert kernel_packages.headers_package(kernel) == "proxmox-headers-6.8.12-9-pve"
