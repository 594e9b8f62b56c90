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
    power,
    processes,
    services,
    sysctls,
    system,
    topology,
)
from .reader import Facts, Host, split_unknown

#: Grows when a fact's meaning changes or one goes away; new facts leave it as it is.
SCHEMA = 1


def collect(
    host: Host, sysctl_names: Optional[Iterable[str]] = None, smi_tool: Optional[str] = None
) -> tuple[Facts, dict[str, str]]:
    """Return (facts, unknown): JSON-ready facts with None where a value could not be read, and why.

    ``unknown`` maps the dotted path of each such value ("gpus.0.acs.control") to one sentence.
    """
    numbers = processes.pids(host)
    commands = processes.commands(host, numbers)
    cpus = cpu.collect(host)
    pcie = topology.collect(host)
    machine = system.collect(host)
    majors = devices.collect(host)
    running = {name for name in (processes.container_of(host, pid) for pid in numbers) if name}
    nvidia_gpus = [gpu["address"] for gpu in pcie["gpus"] if gpu["vendor"] == "0x10de"]
    facts: dict[str, Any] = {
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
        "nvidia": nvidia.collect(host, nvidia_gpus, commands),
        "nvidia_smi": nvidia_smi.collect(host, smi_tool or nvidia_smi.find_tool(host)),
        "character_devices": majors,
        "sysctl": sysctls.collect(host, sysctl_names or sysctls.DEFAULT_NAMES),
        "services": services.collect(host, commands),
        "containers": containers.collect(host, majors, running),
        "gpu_processes": processes.gpu_processes(host, numbers),
        "kernel_log": kernel_log.collect(host),
    }
    return split_unknown(facts)
