# SPDX-License-Identifier: GPL-3.0-or-later
"""Which CPUs, sockets, NUMA nodes and PCI root buses of the recorded host belong together."""

from __future__ import annotations

from collections.abc import Collection, Iterable

CPU_COUNT = 128
CORE_COUNT = 64  # two sockets; the second thread of core n is CPU n + 64
CORES_PER_SOCKET = 32
CORES_PER_CCD = 8
SOCKETS = 2

#: PCI root buses by the socket they hang on.
ROOT_BUSES = {
    "00": 0,
    "10": 0,
    "20": 0,
    "60": 0,
    "70": 0,
    "80": 1,
    "90": 1,
    "c0": 1,
    "e0": 1,
    "f0": 1,
}
GPU_BUSES = ("01", "11", "61", "71", "81", "91", "e1", "f1")


class Topology:
    """The host's CPUs as the kernel groups them: in all its lists, CPUs that are online only."""

    def __init__(self, nodes_per_socket: int = 1, offline: Collection[int] = ()) -> None:
        """Cut each socket into 1, 2 or 4 NUMA nodes and leave out the CPUs in ``offline``."""
        self.nodes_per_socket = nodes_per_socket
        self.node_count = SOCKETS * nodes_per_socket
        self.offline = sorted(offline)
        self.online = [cpu for cpu in range(CPU_COUNT) if cpu not in offline]

    def socket_cpus(self, socket: int) -> list[int]:
        """Return the CPUs of a socket."""
        return [cpu for cpu in self.online if socket_of(cpu) == socket]

    def ccd_cpus(self, cpu: int) -> list[int]:
        """Return the CPUs that share the last-level cache with ``cpu``."""
        core = cpu % CORE_COUNT // CORES_PER_CCD
        return [other for other in self.online if other % CORE_COUNT // CORES_PER_CCD == core]

    def core_cpus(self, cpu: int) -> list[int]:
        """Return the hardware threads of the core of ``cpu``."""
        return [other for other in self.online if other % CORE_COUNT == cpu % CORE_COUNT]

    def node_cpus(self, node: int) -> list[int]:
        """Return the CPUs of a NUMA node."""
        return [cpu for cpu in self.online if self.node_of_cpu(cpu) == node]

    def node_of_cpu(self, cpu: int) -> int:
        """Return the NUMA node of a CPU."""
        return cpu % CORE_COUNT // (CORES_PER_SOCKET // self.nodes_per_socket)

    def node_of_root_bus(self, bus: str) -> int:
        """Return the NUMA node of a root bus: a socket's buses are dealt to its nodes in order."""
        socket = ROOT_BUSES[bus]
        siblings = sorted(other for other in ROOT_BUSES if ROOT_BUSES[other] == socket)
        part = siblings.index(bus) * self.nodes_per_socket // len(siblings)
        return socket * self.nodes_per_socket + part


def socket_of(cpu: int) -> int:
    """Return the socket (physical package) of a CPU."""
    return cpu % CORE_COUNT // CORES_PER_SOCKET


def cpu_list(cpus: Iterable[int]) -> str:
    """Write CPUs in the kernel's list format: "0-31,64-95"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cpu_list(text: str) -> set[int]:
    """Read the kernel's list format. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for run in text.split(","):
        first, _, last = run.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def cpu_mask(cpus: Iterable[int]) -> str:
    """Write CPUs as the kernel's bitmap: words of 32 bits, the highest first."""
    bits = sum(1 << cpu for cpu in cpus)
    words = [bits >> shift & 0xFFFFFFFF for shift in range(0, CPU_COUNT, 32)]
    return ",".join(f"{word:08x}" for word in reversed(words))
