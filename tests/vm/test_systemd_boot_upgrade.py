# SPDX-License-Identifier: GPL-3.0-or-later
"""The same through systemd-boot under EFI: entries of their own, EFI variables, a kernel that hangs."""

from __future__ import annotations

from typing import Any

from vm.conftest import Controller, Ingredients
from vm.machine import Machine
from vm.test_grub_upgrade import (
    KERNEL,
    PLAY,
    REBOOT,
    REFRESH,
    UPGRADE,
    WANTED,
    add_modules,
    max_read_requests,
    recap,
)

ENTRIES = "/boot/efi/loader/entries"
WATCHDOG = "/sys/class/watchdog/watchdog0"
FIRST_BOOT = "/etc/systemd/system.conf.d/gpu-tuning-first-boot.conf"
#: Hangs the new kernel before anyone can log in, as soon as systemd feeds the watchdog.
HANG = """\
cat >/etc/systemd/system/hang.service <<'END'
[Unit]
ConditionKernelVersion={release}
Before=ssh.service
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'until grep -qx active {watchdog}/state; do sleep 1; done'
ExecStart=modprobe hang
[Install]
WantedBy=multi-user.target
END
systemctl enable --quiet hang
"""


def default_entry(vm: Machine) -> str:
    variable = "/sys/firmware/efi/efivars/LoaderEntryDefault-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    # Not tail alone: it believes the size, and a variable just made has none.
    return vm.run(f"cat {variable} 2>/dev/null | tail -c +5 | tr -d '\\0'", check=False)


def test_upgrade_with_a_hang_on_the_way(machine: Any, controller: Any, ingredients: Ingredients) -> None:
    vm: Machine = machine(True)
    control: Controller = controller(vm)
    old_release, new_release = ingredients.parts.old_release, ingredients.new_release
    assert vm.run("uname -r").strip() == old_release
    old_line = vm.run("cat /proc/cmdline").split()

    # This kernel was told to keep MaxReadReq within MaxPayload: the GPUs are left alone, the rest is set.
    add_modules(vm, ingredients)
    found = max_read_requests(vm)
    said = control.play("tune.yml", "--tags", "runtime", fails=True)
    assert "pcie_mrrs:0000:c1:00.0: rejected" in said
    assert "pci=pcie_bus_perf" in said
    assert max_read_requests(vm) == found
    assert vm.run("sysctl -n vm.swappiness").strip() == "10"

    said = control.play(PLAY, *KERNEL, *REFRESH, *UPGRADE)
    assert "An ordinary reboot boots the old kernel" in said.replace("\n", " ")
    assert default_entry(vm) == "gpu-tuning-way-back.conf"
    way_back = vm.run(f"cat {ENTRIES}/gpu-tuning-way-back.conf")
    assert WANTED[0] not in way_back
    assert WANTED[0] in vm.run(f"cat {ENTRIES}/*-{new_release}.conf")

    assert vm.run(f"cat {WATCHDOG}/state {WATCHDOG}/bootstatus").split() == ["inactive", "0"]
    vm.run(HANG.format(release=new_release, watchdog=WATCHDOG))
    said = control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, fails=True)
    assert f"kernel {new_release} did not come up: it panicked, hung or was reset" in said
    assert int(vm.run(f"cat {WATCHDOG}/bootstatus")) == 32  # WDIOF_CARDRESET: it was the watchdog
    assert "This kernel hangs" in vm.serial.read_text(errors="replace"), vm.console()
    assert vm.run("uname -r").strip() == old_release
    assert [t for t in vm.run("cat /proc/cmdline").split() if "initrd" not in t] == [
        t for t in old_line if "initrd" not in t
    ]

    vm.run(f"test ! -e {FIRST_BOOT} && systemctl disable --quiet hang")
    control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, "-e", "kernel_upgrade_retry=true")
    assert vm.run("uname -r").strip() == new_release
    assert set(WANTED) <= set(vm.run("cat /proc/cmdline").split())
    assert "gpu-tuning" not in vm.run(f"ls {ENTRIES}")
    assert recap(control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT))["changed"] == 0
