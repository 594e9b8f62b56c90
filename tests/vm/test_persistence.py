# SPDX-License-Identifier: GPL-3.0-or-later
"""What persists, by real reboots: values are there without a run, and gone once that was taken back."""

from __future__ import annotations

import time
from typing import Any

from vm.conftest import Controller, Ingredients
from vm.machine import Machine
from vm.test_grub_upgrade import add_modules

GPUS = ("c1:00.0", "c2:00.0", "d1:00.0", "d2:00.0")
SYSCTLS = ("kernel.numa_balancing", "vm.swappiness", "vm.dirty_ratio", "vm.dirty_background_ratio")


SCRIPT = f"""
for name in {" ".join(SYSCTLS)}; do echo "$name $(cat /proc/sys/$(echo $name | tr . /))"; done
for gpu in {" ".join(GPUS)}; do echo "$gpu $((0x$(setpci -s $gpu CAP_EXP+8.w) >> 12 & 7))"; done
echo "disabled $(cat /sys/devices/system/cpu/cpu*/cpuidle/state*/disable | grep -c 1)"
"""


def values(vm: Machine) -> dict[str, str]:
    """Return sysctls, MaxReadReq's code of every GPU, and how many idle states are disabled."""
    deadline = time.monotonic() + 120
    # A machine on busy CPUs may not answer within ssh's time-out.
    while not (said := vm.run(SCRIPT, check=False)):
        assert time.monotonic() < deadline, vm.console()
        time.sleep(1)
    return dict(line.split() for line in said.splitlines())


def reboot(vm: Machine) -> None:
    """Reboot, and return when every unit of the new boot has started."""
    boot = vm.run("cat /proc/sys/kernel/random/boot_id")
    vm.run("systemctl reboot", check=False)
    deadline = time.monotonic() + 900
    while vm.run("cat /proc/sys/kernel/random/boot_id", check=False) in ("", boot):
        vm.disconnect()
        assert time.monotonic() < deadline, vm.console()
        time.sleep(1)
    vm.run("systemctl is-system-running --wait", check=False)


def test_values_outlive_a_reboot_until_that_is_taken_back(
    machine: Any, controller: Any, ingredients: Ingredients
) -> None:
    vm: Machine = machine(False)
    control: Controller = controller(vm)
    add_modules(vm, ingredients)
    found = values(vm)
    assert found["vm.swappiness"] == "60"
    assert {found[gpu] for gpu in GPUS} == {"2"}

    control.play("playbooks/persist.yml")
    tuned = values(vm)
    assert tuned["vm.swappiness"] == "10"
    assert {tuned[gpu] for gpu in GPUS} == {"5"}
    assert int(tuned["disabled"]) > 0
    reboot(vm)
    assert values(vm) == tuned
    control.play("playbooks/verify.yml")
    assert vm.run("systemctl is-failed 'gpu-tuning-*' || true").strip() in ("", "inactive", "active")

    # A driver that is bound again finds its GPU set again.
    vm.run(
        "setpci -s c1:00.0 CAP_EXP+8.w=2000:7000; cd /sys/bus/pci/devices/0000:c1:00.0/driver\n"
        "echo 0000:c1:00.0 >unbind; echo 0000:c1:00.0 >/sys/bus/pci/drivers/nvidia/bind; udevadm settle\n"
        "while systemctl list-jobs --no-legend | grep -q gpu-tuning; do sleep 0.2; done"
    )
    assert values(vm) == tuned

    # The distribution's own tool agrees on what sets the values at boot.
    assert "90-gpu-tuning.conf" in vm.run("systemd-analyze cat-config sysctl.d")
    control.play("playbooks/unpersist.yml")
    assert values(vm) == tuned
    reboot(vm)
    assert values(vm) == found
    assert vm.run("find /etc /usr/local -name '*gpu-tuning*'").strip() == ""
