# SPDX-License-Identifier: GPL-3.0-or-later
"""From one Debian kernel to another through GRUB, really booted: first with a kernel that panics."""

from __future__ import annotations

import json
import re
from typing import Any

from vm.conftest import Controller, Ingredients
from vm.machine import Machine
from vm.packages import NEW_KERNEL

WANTED = ("amd_pstate=active", "processor.max_cstate=1")
UPGRADE = ("-e", f"kernel_upgrade_package={NEW_KERNEL}")
REFRESH = ("-e", "kernel_upgrade_cache_valid_time=0")
REBOOT = ("-e", "kernel_upgrade_reboot=true")
KERNEL = ("--tags", "preflight,install,cmdline,reboot,verify")
PLAY = "playbooks/kernel.yml"


def recap(said: str) -> dict[str, int]:
    """Return the counts in the recap's line for the machine."""
    line = re.findall(r"^vm +: (.*)$", said, re.M)[-1]
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


def add_modules(vm: Machine, ingredients: Ingredients) -> None:
    """Put the stand-in drivers beside both kernels, and have boots from now on load more before them."""
    for release, folder in ingredients.modules.items():
        vm.run(f"mkdir -p /lib/modules/{release}/updates")
        for each in folder.glob("*.ko"):
            vm.put(each, f"/lib/modules/{release}/updates")
    vm.run(
        "depmod; modprobe nvidia-uvm; modprobe fakegpu; modprobe nvidia\n"
        "printf 'uio\\nvfio\\nnvidia-uvm\\nfakegpu\\nnvidia\\n' >/etc/modules-load.d/gpu.conf"
    )


def uvm_major(vm: Machine) -> int:
    return int(vm.run("awk '$2 == \"nvidia-uvm\" { print $1 }' /proc/devices"))


CONTAINER = """\
lxc.uts.name = gpu
lxc.rootfs.path = dir:/var/lib/lxc/gpu/rootfs
lxc.init.cmd = /bin/sleep 100000
lxc.net.0.type = empty
lxc.mount.auto = proc:mixed sys:ro cgroup:mixed
lxc.autodev = 1
lxc.apparmor.profile = unconfined
lxc.cgroup2.devices.deny = a
lxc.cgroup2.devices.allow = c 1:* rwm
lxc.cgroup2.devices.allow = c 5:* rwm
lxc.cgroup2.devices.allow = c 136:* rwm
lxc.cgroup2.devices.allow = c 195:* rwm
lxc.cgroup2.devices.allow = c {uvm}:* rwm
lxc.mount.entry = /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry = /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
"""


def make_nodes(vm: Machine) -> None:
    """Make the device nodes, as the vendor's tool would."""
    vm.run(f"rm -f /dev/nvidia-uvm; mknod -m 666 /dev/nvidia-uvm c {uvm_major(vm)} 0")
    vm.run("[ -e /dev/nvidia0 ] || mknod -m 666 /dev/nvidia0 c 195 0")


def add_container(vm: Machine, ingredients: Ingredients) -> None:
    """Make a container that may use both device nodes."""
    make_nodes(vm)
    top = "/var/lib/lxc/gpu"
    vm.run(f"mkdir -p {top}/rootfs/bin; cd {top}/rootfs; mkdir dev proc sys etc tmp root run")
    vm.put(ingredients.busybox, f"{top}/rootfs/bin")
    vm.run(f"cd {top}/rootfs/bin; for name in sh sleep cat; do ln -s busybox $name; done")
    config = CONTAINER.format(uvm=uvm_major(vm))
    vm.run(f"cat >{top}/config <<'END'\n{config}END\nlxc-start -n gpu; lxc-wait -n gpu -s RUNNING -t 60")


def opens(vm: Machine) -> list[str]:
    """Return what opening each node from inside the container says."""
    script = (
        "for node in nvidia0 nvidia-uvm; do lxc-attach -n gpu -- /bin/cat /dev/$node 2>&1 && echo fine; done"
    )
    return vm.run(script, check=False).splitlines()


def files(vm: Machine) -> str:
    """Return the sums of everything that decides over a boot, and the packages."""
    return vm.run(
        "find /etc/default /etc/grub.d /etc/kernel /boot -type f -exec sha256sum {} + | sort -k2; "
        "dpkg-query -W | sha256sum"
    )


def test_upgrade_with_a_panic_on_the_way(machine: Any, controller: Any, ingredients: Ingredients) -> None:
    vm: Machine = machine(False)
    control: Controller = controller(vm)
    add_modules(vm, ingredients)
    old_release, new_release = ingredients.parts.old_release, ingredients.new_release
    assert vm.run("uname -r").strip() == old_release
    old_line = vm.run("cat /proc/cmdline").split()[1:]
    old_major = uvm_major(vm)
    check_runtime_tuning(vm, control)
    add_container(vm, ingredients)
    assert opens(vm) == ["fine", "fine"]

    # Nothing is changed when something stands in the way, or when it is only looked at.
    found = files(vm)
    nowhere = ("-e", "kernel_upgrade_package=linux-image-none")
    said = control.play(PLAY, *KERNEL, *REFRESH, *REBOOT, *nowhere, fails=True)
    assert "nothing was changed: package: no configured source has linux-image-none" in said
    control.play(PLAY, *KERNEL, *UPGRADE, "--check", "--diff")
    assert files(vm) == found

    # Killed after the installation, then after the command line: each time the next run goes on.
    control.play(PLAY, "--tags", "install", *UPGRADE)
    assert vm.run("grub-editenv list").strip() == ""
    said = control.play(PLAY, *KERNEL, *UPGRADE)
    assert "An ordinary reboot boots the old kernel" in said.replace("\n", " ")
    menu = vm.run("cat /boot/grub/grub.cfg")
    assert 'set default="gpu-tuning-way-back"' in menu
    assert recap(control.play(PLAY, *KERNEL, *UPGRADE))["changed"] == 0

    # The new kernel cannot start: it panics, and the machine comes back by itself.
    initrd = f"/boot/initrd.img-{new_release}"
    vm.run(f"cp {initrd} /root/initrd; head -c 3000000 /dev/urandom >{initrd}")
    said = control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, fails=True)
    assert f"kernel {new_release} did not come up: it panicked" in said
    assert "Kernel panic" in vm.serial.read_text(errors="replace")
    assert vm.run("uname -r").strip() == old_release
    assert vm.run("cat /proc/cmdline").split()[1:] == old_line
    assert not vm.run("ls /etc/default/grub.d/zz-gpu-tuning-cmdline.cfg 2>/dev/null", check=False)
    said = control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, fails=True)
    assert "was tried and given up" in said

    # Repaired, it is tried again as told, verified and becomes the default.
    vm.run(f"cp /root/initrd {initrd}; modprobe fakegpu; modprobe nvidia")
    control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT, "-e", "kernel_upgrade_retry=true")
    assert vm.run("uname -r").strip() == new_release
    assert set(WANTED) <= set(vm.run("cat /proc/cmdline").split())
    assert vm.run("cat /sys/devices/system/cpu/amd_pstate/status").strip() == "active"
    assert "C2" not in vm.run("cat /sys/devices/system/cpu/cpu0/cpuidle/state*/name").split()
    assert uvm_major(vm) != old_major
    menu = vm.run("cat /boot/grub/grub.cfg")
    assert "gpu-tuning-way-back" not in menu
    record = json.loads((control.reports / "vm/kernel-upgrade.json").read_text())
    assert (record["before"]["release"], record["after"]["release"]) == (old_release, new_release)
    assert record["before"]["device_majors"]["nvidia-uvm"] == [old_major]
    assert [gpu["link_width"] for gpu in record["after"]["gpus"]] == [16] * 4

    assert recap(control.play(PLAY, *KERNEL, *UPGRADE, *REBOOT))["changed"] == 0

    # The container's rule names the old major, until the play corrects it.
    make_nodes(vm)
    vm.run("lxc-start -n gpu; lxc-wait -n gpu -s RUNNING -t 60")
    assert opens(vm) == ["fine", "cat: can't open '/dev/nvidia-uvm': Operation not permitted"]
    restart = ("-e", "lxc_gpu_devices_restart=true", "-e", "lxc_gpu_devices_restart_timeout=5")
    control.play(PLAY, "--tags", "containers", *restart)
    assert opens(vm) == ["fine", "fine"]
    assert recap(control.play(PLAY, "--tags", "containers"))["changed"] == 0

    # What was set at run time on the old kernel is gone, and back after the next run.
    assert max_read_requests(vm) == [512] * 4
    assert vm.run("sysctl -n kernel.numa_balancing").strip() == "1"
    # The whole play, without tags: nothing to upgrade, nothing to repair, then what the reboot has undone.
    said = control.play(PLAY, *UPGRADE, *REBOOT)
    assert said.index("Repair the configs of all containers") < said.index("Snapshot, apply, read back")
    assert vm.run("uname -r").strip() == new_release
    assert max_read_requests(vm) == [4096] * 4
    assert vm.run("sysctl -n kernel.numa_balancing").strip() == "0"
    newest = max((control.reports / "vm").glob("*/system-improve.md")).read_text()
    assert newest.count("kernel_upgrade begin") == 1
    assert f"| kernel | {old_release} | {new_release} |" in newest


def max_read_requests(vm: Machine) -> list[int]:
    """Return MaxReadReq of the four GPUs in bytes, as setpci reads it."""
    said = vm.run("for gpu in c1 c2 d1 d2; do setpci -s $gpu:00.0 CAP_EXP+8.w; done")
    return [128 << (int(value, 16) >> 12 & 7) for value in said.split()]


def idle_usage(vm: Machine) -> list[int]:
    """Return how often C2 and C3 were entered, on both CPUs, before and after a moment of idling."""
    read = "cat /sys/devices/system/cpu/cpu*/cpuidle/state[23]/usage"
    return [int(count) for count in vm.run(f"{read}; sleep 2; {read}").split()]


def check_runtime_tuning(vm: Machine, control: Controller) -> None:
    """MaxReadReq, idle states and NUMA balancing through a real kernel, with GPUs that misbehave."""
    assert vm.run("sysctl -n kernel.numa_balancing").strip() == "1"
    assert max_read_requests(vm) == [512] * 4
    vm.run("echo 2 >/sys/module/fakegpu/parameters/stuck")
    said = control.play("tune.yml", "--tags", "runtime", fails=True)
    assert "pcie_mrrs:0000:c2:00.0: clamped" in said
    assert max_read_requests(vm) == [4096, 512, 4096, 4096]
    vm.run("echo 0 >/sys/module/fakegpu/parameters/stuck; echo 8 >/sys/module/fakegpu/parameters/gone")
    said = control.play("tune.yml", "--tags", "runtime", fails=True)
    assert "pcie_mrrs:0000:d2:00.0: failed" in said
    vm.run("echo 0 >/sys/module/fakegpu/parameters/gone")
    assert recap(control.play("tune.yml", "--tags", "runtime"))["changed"] == 0
    assert max_read_requests(vm) == [4096] * 4
    assert vm.run("sysctl -n kernel.numa_balancing").strip() == "0"
    counts = idle_usage(vm)
    assert counts[:4] == counts[4:]
