# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a GPU host: what the audit's rules ask about, read from files, nothing changed.

One small file per topic; each has ``collect`` and returns plain data with ``Unknown`` where a value could
not be read. ``collect`` here puts them together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Optional

from . import (
    containers,
    cpu,
    devices,
    iommu,
    kernel_log,
    memory,
    numa,
    nvidia,
    nvidia_smi,
    pci,
    power,
    processes,
    services,
    sysctls,
    system,
    topology,
)
from .reader import Facts, Host, Unknown, split_unknown

#: Grows when a fact's meaning changes or one goes away; new facts leave it as it is.
SCHEMA = 1


def collect(
    host: Host, more_sysctls: Iterable[str] = (), smi_tool: Optional[str] = None
) -> tuple[Facts, dict[str, str], dict[str, str]]:
    """Return (facts, unknown, absent): JSON-ready facts with None where there is no value, and why.

    ``unknown`` maps the dotted path of each value that could not be read ("gpus.0.acs") to one sentence,
    ``absent`` that of each value which this host has not.
    """
    known, reasons = split_unknown(_facts(host, more_sysctls, smi_tool))
    unknown = {path: why.reason for path, why in reasons.items() if not why.absent}
    return known, unknown, {path: why.reason for path, why in reasons.items() if why.absent}


def _facts(host: Host, more_sysctls: Iterable[str], smi_tool: Optional[str]) -> Facts:
    """Put the topics together, in the order in which they need one another."""
    machine = system.collect(host)
    cpus = cpu.collect(host)
    pcie = topology.collect(host)
    smi = nvidia_smi.collect(host, smi_tool or nvidia_smi.find_tool(host))
    for gpu in pcie["gpus"]:
        gpu["smi"] = nvidia_smi.of_gpu(smi, gpu["address"])
    return {
        "schema": SCHEMA,
        "collected_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hostname": system.hostname(host),
        "boot_id": system.boot_id(host),
        **machine,
        "cpu": cpus,
        "numa": numa.collect(host, cpus["sockets"]),
        "memory": memory.collect(host),
        "power": power.collect(host),
        **pcie,
        "iommu": iommu.collect(host, machine["kernel"]["tokens"], pcie["gpus"]),
        "nvidia_smi": smi,
        "sysctl": sysctls.collect(host, [*sysctls.DEFAULT_NAMES, *more_sysctls]),
        "kernel_log": kernel_log.collect(host),
        **_users(host, pcie["gpus"]),
    }


def _users(host: Host, gpus: list[Facts]) -> Facts:
    """Return what depends on the processes: the driver's daemons, other tuners, containers, servers."""
    numbers = processes.pids(host)
    commands = processes.commands(host, numbers)
    majors = devices.collect(host)
    running = {name for name in (processes.container_of(host, pid) for pid in numbers) if name}
    driver = nvidia.collect(host, [gpu["address"] for gpu in gpus if gpu["vendor"] == pci.NVIDIA], commands)
    return {
        "nvidia": driver,
        "character_devices": majors,
        "services": services.collect(host, commands),
        "containers": containers.collect(host, majors, running),
        "gpu_processes": _gpu_processes(host, numbers, gpus, driver),
        "this_process": processes.this_process(host),
    }


def _gpu_processes(host: Host, numbers: list[int], gpus: list[Facts], driver: Facts) -> Any:
    """Return the processes that hold a GPU, each with its GPUs' and its CPUs' NUMA nodes."""
    found = processes.gpu_processes(host, numbers)
    if isinstance(found, Unknown):
        return found
    by_address = {gpu["address"]: gpu for gpu in gpus}
    by_node = {
        f"nvidia{words['minor']}": by_address[address]
        for address, words in driver["gpus"].items()
        if not isinstance(words, Unknown)
    }
    nodes = numa.nodes(host)
    return [{**process, **processes.place(process, by_node, nodes)} for process in found]
