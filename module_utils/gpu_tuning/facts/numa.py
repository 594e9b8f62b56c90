# SPDX-License-Identifier: GPL-3.0-or-later
"""NUMA nodes: CPUs, memory and distances (/sys/devices/system/node)."""

from __future__ import annotations

import re
from typing import Union

from .reader import Facts, Host, Unknown, absent, format_ranges, numbered, numbers_in, parse_ranges, read_text

_MEMORY = re.compile(r"^Node \d+ (\w+):\s+(\d+) kB", re.MULTILINE)


def collect(host: Host, sockets: Union[int, Unknown]) -> Facts:
    """Return ``nodes`` (one dict each) and how many nodes with CPUs a socket is cut into (NPS)."""
    found = nodes(host)
    if not found:
        lost = absent(f"{host.sys('devices/system/node')} does not exist: this kernel has no NUMA support")
        return {"nodes": lost, "node_count": lost, "nodes_per_socket": lost, "max_distance": lost}
    with_cpus = [node for node in found if node["cpu_count"]]
    per_socket = sockets if isinstance(sockets, Unknown) else max(1, len(with_cpus) // max(1, sockets))
    distances = [distance for node in found for distance in node["distances"]]
    return {
        "nodes": found,
        "node_count": len(with_cpus),
        "nodes_per_socket": per_socket,
        "max_distance": max(distances, default=10),
    }


def nodes(host: Host) -> list[Facts]:
    """Return one dict for each online node."""
    base = host.sys("devices/system/node")
    return [_node(base, number) for number in numbered(base, "node")]


def _cpus(folder: str) -> Union[str, Unknown]:
    """Return a node's CPUs as a list. Kernels have the mask, as lscpu reads it; not all have the list."""
    mask = read_text(f"{folder}/cpumap")
    if isinstance(mask, Unknown):
        return read_text(f"{folder}/cpulist")
    try:
        bits = int(mask.replace(",", ""), 16)
    except ValueError:
        return Unknown(f"{folder}/cpumap holds no mask: {mask[:40]!r}")
    return format_ranges(number for number in range(bits.bit_length()) if bits >> number & 1)


def _node(base: str, number: int) -> Facts:
    folder = f"{base}/node{number}"
    cpus = _cpus(folder)
    distances = read_text(f"{folder}/distance")
    memory = read_text(f"{folder}/meminfo")
    kilobytes = {} if isinstance(memory, Unknown) else dict(_MEMORY.findall(memory))
    lost = memory if isinstance(memory, Unknown) else Unknown(f"{folder}/meminfo does not say it")
    return {
        "id": number,
        "cpus": cpus,
        "cpu_count": 0 if isinstance(cpus, Unknown) else len(parse_ranges(cpus)),
        "distances": [] if isinstance(distances, Unknown) else numbers_in(distances),
        "memory_total_bytes": int(kilobytes["MemTotal"]) * 1024 if "MemTotal" in kilobytes else lost,
        "memory_free_bytes": int(kilobytes["MemFree"]) * 1024 if "MemFree" in kilobytes else lost,
    }
