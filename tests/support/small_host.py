# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded machine of a few hundred files, for tests that need many of them or look at every byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from host_images import DEVICE_CONTROL, gpu, gpu_audio, network_virtual_function
from host_tree import HostTree

LINK_STATUS = 0x1105
CPUIDLE = "sys/devices/system/cpu"
PCI = "sys/bus/pci/devices"

#: Name and exit latency in microseconds.
IDLE_STATES = (("POLL", 0), ("C1", 1), ("C2", 100))
SYSCTLS: Mapping[str, object] = {
    "kernel.numa_balancing": 1,
    "kernel.osrelease": "6.8.12-9-pve",
    "kernel.perf_event_paranoid": 4,
    "vm.swappiness": 60,
    "vm.dirty_ratio": 20,
    "vm.dirty_bytes": 0,
    "vm.dirty_background_ratio": 10,
    "vm.dirty_background_bytes": 0,
    "net.core.rmem_max": 212992,
    "net.ipv4.tcp_rmem": "4096\t131072\t6291456",
}

#: What the ten fixes ask for, where this machine has it, as arguments of host_settings.
WANTED: dict[str, Any] = {
    "sysctl_snapshot": {
        "settings": [
            {"name": "kernel.numa_balancing", "value": "0"},
            {"name": "kernel.perf_event_paranoid", "value": "1", "match": "maximum"},
            {"name": "vm.swappiness", "value": "10"},
            {"name": "vm.dirty_ratio", "value": "5"},
            {"name": "vm.dirty_background_ratio", "value": "2"},
            {"name": "net.core.rmem_max", "value": "16777216", "match": "minimum"},
            {"name": "net.ipv4.tcp_rmem", "value": "4096 131072 33554432"},
        ]
    },
    "pcie_maxreadreq": {"value": 4096, "vendor": "0x10de", "class": ["0x0300", "0x0302"]},
    "cpuidle_state": {"max_exit_latency_us": 2},
}
#: Everything that can be restored.
ALL_SECTIONS: dict[str, Any] = {name: {} for name in (*WANTED, "kernel_module")}


@dataclasses.dataclass(frozen=True)
class SmallHost:
    """Where the parts of a recorded machine are."""

    root: Path

    @property
    def roots(self) -> dict[str, Any]:
        """The common arguments that point a module at this machine."""
        return {
            "procfs_root": str(self.root / "proc"),
            "sysfs_root": str(self.root / "sys"),
            "state_root": str(self.state_root),
        }

    @property
    def state_root(self) -> Path:
        """Where the journal goes; beside the machine, which stays as it was found."""
        return self.root.with_name(f"{self.root.name}-state")

    def sysctl(self, name: str) -> Path:
        """Return a key's file."""
        return self.root / "proc/sys" / name.replace(".", "/")

    def gpu(self, number: int) -> Path:
        """Return a GPU's directory."""
        return self.root / PCI / gpu_address(number)

    def config(self, number: int) -> Path:
        """Return a GPU's configuration space."""
        return self.gpu(number) / "config"

    def cpu(self, number: int) -> Path:
        """Return a CPU's directory."""
        return self.root / CPUIDLE / f"cpu{number}"

    def idle_state(self, cpu: int, index: int) -> Path:
        """Return an idle state's directory."""
        return self.cpu(cpu) / f"cpuidle/state{index}"


def gpu_address(number: int) -> str:
    """Return a GPU's PCI address."""
    return f"0000:{0x01 + number:02x}:00.0"


def small_host(
    root: Path,
    cpus: int = 4,
    gpus: int = 2,
    idle_states: Sequence[tuple[str, int]] = IDLE_STATES,
    sysctls: Mapping[str, object] = SYSCTLS,
    cmdline: str = "quiet",
) -> SmallHost:
    """Write a recorded machine into ``root``: GPUs with an audio function each, and one virtual function."""
    tree = HostTree(str(root))
    tree.file("proc/cmdline", cmdline)
    tree.writable("proc/sys", {name.replace(".", "/"): value for name, value in sysctls.items()})
    _write_cpus(tree, cpus, idle_states)
    tree.directory(PCI)
    for number in range(gpus):
        address = gpu_address(number)
        image = gpu(number, DEVICE_CONTROL, LINK_STATUS, asleep=False, resizable=True)
        _write_function(tree, address, bytes(image), "0x10de", "0x030000")
        audio = gpu_audio(number, DEVICE_CONTROL, LINK_STATUS)
        _write_function(tree, address[:-1] + "1", bytes(audio), "0x10de", "0x040300")
    _write_function(tree, "0000:f0:00.2", bytes(network_virtual_function()), "0x10de", "0x030000")
    tree.link(f"{PCI}/0000:f0:00.2/physfn", f"{PCI}/0000:f0:00.0")
    return SmallHost(root)


def _write_cpus(tree: HostTree, cpus: int, idle_states: Sequence[tuple[str, int]]) -> None:
    tree.file(f"{CPUIDLE}/cpuidle/current_driver", "acpi_idle" if idle_states else "none")
    for cpu in range(cpus):
        if cpu:
            tree.file(f"{CPUIDLE}/cpu{cpu}/online", 1)
        for index, (name, latency) in enumerate(idle_states):
            directory = f"{CPUIDLE}/cpu{cpu}/cpuidle/state{index}"
            tree.files(directory, {"name": name, "latency": latency})
            tree.writable(directory, {"disable": 0})


def _write_function(tree: HostTree, address: str, config: bytes, vendor: str, class_code: str) -> None:
    tree.files(f"{PCI}/{address}", {"vendor": vendor, "device": "0x2bb1", "class": class_code})
    tree.writable(f"{PCI}/{address}", {"config": config})
