# SPDX-License-Identifier: GPL-3.0-or-later
"""How the GPUs hang together: paths to the root ports, switches, and the relation of each pair."""

from __future__ import annotations

import itertools
from typing import Any

from . import pci
from .reader import Facts, Host, Unknown, absent

#: Relations of a pair, nearest first, in the words of nvidia-smi topo.
RELATIONS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def collect(host: Host) -> Facts:
    """Return ``gpus``, ``nics``, ``bridges``, ``switches``, ``gpu_pairs`` and what else was seen."""
    functions = pci.list_functions(host)
    shown = [function for function in functions if pci.is_gpu(function) or pci.is_nic(function)]
    chains = {function["address"]: pci.chain(host, function["address"]) for function in shown}
    by_address = {function["address"]: function for function in functions}
    wanted = {address for chain in chains.values() for address in chain} & set(by_address)
    described = {address: pci.describe(host, by_address[address]) for address in sorted(wanted)}
    for address, chain in chains.items():
        described.setdefault(address, pci.describe(host, by_address[address]))
        chains[address] = [part for part in chain if part in described] or [address]
    devices = [_device(host, function["address"], chains, described) for function in shown]
    gpus = [device for device in devices if pci.is_gpu(device)]
    pairs = [_pair(one, other, host) for one, other in itertools.combinations(gpus, 2)]
    return {
        "gpus": gpus,
        "gpu_count": len(gpus),
        "nics": [device for device in devices if not pci.is_gpu(device)],
        "bridges": _bridges(described, chains, [gpu["address"] for gpu in gpus]),
        "switches": _switches(described, chains, [gpu["address"] for gpu in gpus]),
        "gpu_pairs": pairs,
        "pair_counts": {name: sum(pair["relation"] == name for pair in pairs) for name in RELATIONS},
        "other_display": _other_display(functions),
        "aspm_policy": pci.aspm_policy(host),
        "functions": len(functions),
        "nvidia_bridges": _nvswitches(functions),
    }


def _device(host: Host, address: str, chains: dict[str, list[str]], described: dict[str, Facts]) -> Facts:
    path = [described[part] for part in chains[address]]
    return {
        **described[address],
        "root_bus": pci.host_bridge(host, address),
        "path": [hop["address"] for hop in path],
        "slot": pci.slot_link(path),
        "path_min_payload": _least_payload(path),
        "path_aspm": _path_aspm(path),
        "bars": pci.bars(host, address),
        "virtual_functions": pci.virtual_functions(host, address),
    }


def _least_payload(path: list[Facts]) -> Any:
    """Return the smallest MaxPayload set on the bridges above, None for a function without any."""
    above = [hop["max_payload_size"] for hop in path[:-1]]
    known = [size for size in above if not isinstance(size, Unknown)]
    if known:
        return min(known)
    return above[0] if above else absent("no bridge is above the device")


def _path_aspm(path: list[Facts]) -> Any:
    """Return the addresses on the path whose link may go to sleep."""
    known = [hop for hop in path if not isinstance(hop["aspm"], Unknown)]
    if not known:
        return path[-1]["aspm"]
    return [hop["address"] for hop in known if hop["aspm"] != "disabled"]


def _pair(one: Facts, other: Facts, host: Host) -> Facts:
    return {
        "gpus": [one["address"], other["address"]],
        "relation": relation(one, other),
        "nodes": [one["numa_node"], other["numa_node"]],
    }


def relation(one: Facts, other: Facts) -> str:
    """Return the relation of two GPUs: PIX, PXB, PHB, NODE or SYS."""
    shared = [part for part in one["path"][:-1] if part in other["path"][:-1]]
    if shared:
        below = len(one["path"]) + len(other["path"]) - 2 * len(shared) - 2
        return "PIX" if below <= 2 else "PXB"
    if one["root_bus"] is not None and one["root_bus"] == other["root_bus"]:
        return "PHB"
    return "NODE" if one["numa_node"] == other["numa_node"] else "SYS"


def _bridges(described: dict[str, Facts], chains: dict[str, list[str]], gpus: list[str]) -> list[Facts]:
    """Return the bridges above GPUs and NICs; ``between_gpus``: a GPU below it has a peer that is not."""
    bridges = []
    for address, function in described.items():
        below = [device for device, chain in chains.items() if address in chain[:-1]]
        if not below:
            continue
        gpus_below = [device for device in below if device in gpus]
        between = 0 < len(gpus_below) < len(gpus)
        bridges.append({**function, "below": below, "gpus_below": gpus_below, "between_gpus": between})
    return bridges


def _switches(described: dict[str, Facts], chains: dict[str, list[str]], gpus: list[str]) -> list[Facts]:
    """Return switches above GPUs, one per upstream port that is not on a graphics card itself."""
    found: dict[str, Facts] = {}
    for gpu in gpus:
        path = [described[part] for part in chains[gpu]]
        _port, card = pci.slot(path)
        for hop in path[: path.index(card)]:
            if hop["port_type"] == "upstream-port":
                switch = found.setdefault(hop["address"], _switch(hop))
                switch["gpus_below"].append(gpu)
    return list(found.values())


def _switch(port: Facts) -> Facts:
    names = ("address", "vendor", "device", "link_width", "link_speed_gts", "max_link_width")
    return {**{name: port[name] for name in names}, "gpus_below": []}


def _other_display(functions: list[Facts]) -> list[Facts]:
    """Return display controllers that are no GPU: a BMC's VGA."""
    return [one for one in functions if str(one["class"])[:4] == "0x03" and not pci.is_gpu(one)]


def _nvswitches(functions: list[Facts]) -> list[str]:
    """Return NVIDIA's NVSwitch functions: class 0x0680, other bridge."""
    return [
        one["address"]
        for one in functions
        if one["vendor"] == pci.NVIDIA and str(one["class"]).startswith("0x0680")
    ]
