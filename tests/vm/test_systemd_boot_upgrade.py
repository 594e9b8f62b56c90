# SPDX-License-Identifier: GPL-3.0-or-later
"""The same through systemd-boot under EFI: entries of their own, EFI variables, a panic, then the upgrade."""

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


def default_entry(vm: Machine) -> str:
    variable = "/sys/firmware/efi/efivars/LoaderEntryDefault-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    # Not tail alone: it believes the size, and a variable just made has none.
    return vm.run(f"cat {variable} 2>/dev/null | tail -c +5 | tr -d '\\0'", check=False)


def test_upgrade_with_a_panic_on_the_way(machine: Any, controller: Any, ingredients: Ingredients) -> None:
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

    initrd = f"/boot/efi/*/{new_release}/initrd.img-{new_release}"
    vm.run(f"cp {initrd} /root/initrd; head -c 3000000 /dev/urandom >/root/broken; cp /root/broken {initrd}")
    said = control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, fails=True)
    assert f"kernel {new_release} did not come up: it panicked" in said
    assert "Kernel panic" in vm.serial.read_text(errors="replace")
    assert vm.run("uname -r").strip() == old_release
    assert [t for t in vm.run("cat /proc/cmdline").split() if "initrd" not in t] == [
        t for t in old_line if "initrd" not in t
    ]

    vm.run(f"cp /root/initrd {initrd}")
    control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, "-e", "kernel_upgrade_retry=true")
    assert vm.run("uname -r").strip() == new_release
    assert set(WANTED) <= set(vm.run("cat /proc/cmdline").split())
    assert "gpu-tuning" not in vm.run(f"ls {ENTRIES}")
    assert recap(control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT))["changed"] == 0
