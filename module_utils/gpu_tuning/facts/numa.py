# SPDX-License-Identifier: GPL-3.0-or-later
"""NUMA nodes: CPUs, memory and distances (/sys/devices/system/node)."""

from __future__ import annotations

import re
from typing import Union

from .reader import Facts, Host, Unknown, numbered, parse_ranges, read_text

_MEMORY = re.compile(r"^Node \d+ (\w+):\s+(\d+) kB", re.MULTILINE)


def collect(host: Host, sockets: Union[int, Unknown]) -> Facts:
    """Return ``nodes`` (one dict each) and how many nodes with CPUs a socket is cut into (NPS)."""
    base = host.sys("devices/system/node")
    nodes = [_node(base, number) for number in numbered(base, "node")]
    if not nodes:
        lost = Unknown(f"{base} does not exist: this kernel has no NUMA support")
        return {"nodes": lost, "node_count": lost, "nodes_per_socket": lost, "max_distance": lost}
    with_cpus = [node for node in nodes if node["cpu_count"]]
    per_socket = sockets if isinstance(sockets, Unknown) else max(1, len(with_cpus) // max(1, sockets))
    distances = [distance for node in nodes for distance in node["distances"]]
    return {
        "nodes": nodes,
        "node_count": len(with_cpus),
        "nodes_per_socket": per_socket,
        "max_distance": max(distances, default=10),
    }


def _node(base: str, number: int) -> Facts:
    folder = f"{base}/node{number}"
    cpus = read_text(f"{folder}/cpulist")
    distances = read_text(f"{folder}/distance")
    memory = read_text(f"{folder}/meminfo")
    kilobytes = {} if isinstance(memory, Unknown) else dict(_MEMORY.findall(memory))
    lost = memory if isinstance(memory, Unknown) else Unknown(f"{folder}/meminfo does not say it")
    return {
        "id": number,
        "cpus": cpus,
        "cpu_count": 0 if isinstance(cpus, Unknown) else len(parse_ranges(cpus)),
        "distances": [] if isinstance(distances, Unknown) else [int(part) for part in distances.split()],
        "memory_total_bytes": int(kilobytes["MemTotal"]) * 1024 if "MemTotal" in kilobytes else lost,
        "memory_free_bytes": int(kilobytes["MemFree"]) * 1024 if "MemFree" in kilobytes else lost,
    }
