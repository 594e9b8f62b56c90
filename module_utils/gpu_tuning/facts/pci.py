# SPDX-License-Identifier: GPL-3.0-or-later
"""PCI functions that matter to inference: GPUs, NICs, and every bridge between them and the CPUs."""

from __future__ import annotations

import os
import re
from typing import Any, Optional, Union

from ..pci_config import STANDARD_SIZE, ConfigSpaceError, Link, parse_pcie
from . import pci_extended
from .reader import (
    Facts,
    Host,
    Unknown,
    absent,
    link_name,
    names_in,
    numbers_in,
    read_bytes,
    read_choice,
    read_int,
    read_text,
)

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
#: Vendors of GPUs that run inference. A BMC's VGA (ASPEED, Matrox) has the same class and is none.
GPU_VENDORS = (NVIDIA, AMD, INTEL)
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
NIC_CLASSES = ("0x0200", "0x0207")
BRIDGE_CLASS = "0x0604"

_EXPRESS = (
    "port_type",
    "power_state",
    "max_payload_size",
    "max_payload_supported",
    "max_read_request_size",
)
_CONTROL = (
    "aspm",
    "aspm_supported",
    "autonomous_speed_change",
    "extended_tags",
    "extended_tags_supported",
    "relaxed_ordering",
    "target_speed_gts",
)
_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_SWITCH_PORTS = ("upstream-port", "downstream-port")
_UNSET = 0x20000000  # IORESOURCE_UNSET: the firmware or kernel found no room for the BAR
_MEMORY = 0x200  # IORESOURCE_MEM


def list_functions(host: Host) -> list[Facts]:
    """Return address, vendor, device and class of every PCI function, in bus order; no VFs."""
    base = host.sys("bus/pci/devices")
    functions = []
    for address in names_in(base):
        folder = f"{base}/{address}"
        if os.path.lexists(f"{folder}/physfn"):
            continue  # a virtual function answers with its own, meaningless registers
        functions.append(
            {
                "address": address,
                "vendor": read_text(f"{folder}/vendor"),
                "device": read_text(f"{folder}/device"),
                "class": read_text(f"{folder}/class"),
            }
        )
    return functions


def is_gpu(function: Facts) -> bool:
    """Tell a GPU function from its audio and USB functions and from a BMC's VGA."""
    return function["vendor"] in GPU_VENDORS and str(function["class"])[:6] in GPU_CLASSES


def is_nic(function: Facts) -> bool:
    """Tell an Ethernet or InfiniBand controller."""
    return str(function["class"])[:6] in NIC_CLASSES


def describe(host: Host, function: Facts) -> Facts:
    """Return all that is known about one function; see the module's RETURN for the fields."""
    folder = host.sys("bus/pci/devices", function["address"])
    config = read_bytes(f"{folder}/config")
    return {
        **function,
        "subsystem": _subsystem(folder),
        "driver": link_name(f"{folder}/driver"),
        "numa_node": read_int(f"{folder}/numa_node"),
        "local_cpus": read_text(f"{folder}/local_cpulist"),
        "iommu_group": link_name(f"{folder}/iommu_group"),
        "runtime_status": read_text(f"{folder}/power/runtime_status"),
        **_link(folder, config),
        **_registers(config),
        "aer": aer_counters(folder),
    }


def _subsystem(folder: str) -> str:
    parts = [read_text(f"{folder}/{name}") for name in ("subsystem_vendor", "subsystem_device")]
    return ":".join("" if isinstance(part, Unknown) else part[2:] for part in parts)


def _link(folder: str, config: Union[bytes, Unknown]) -> Facts:
    """Return the function's own link: now, and at most. The kernel's files need no privilege."""
    facts: Facts = {
        "link_speed_gts": _speed(f"{folder}/current_link_speed"),
        "link_width": read_int(f"{folder}/current_link_width"),
        "max_link_speed_gts": _speed(f"{folder}/max_link_speed"),
        "max_link_width": read_int(f"{folder}/max_link_width"),
    }
    if isinstance(facts["link_speed_gts"], Unknown) and isinstance(config, bytes):
        facts.update(_link_from_config(config))
    return facts


def _link_from_config(config: bytes) -> Facts:
    """Read the link from the registers: kernels before 4.13 have no such files."""
    try:
        pcie = parse_pcie(config)
    except ConfigSpaceError:
        return {}
    if pcie.link_status is None or pcie.link_capability is None:
        return {}
    now, most = pcie.link_status, pcie.link_capability
    return {
        "link_speed_gts": _gts(now),
        "link_width": now.width,
        "max_link_speed_gts": _gts(most),
        "max_link_width": most.width,
    }


def _gts(link: Link) -> Union[float, Unknown]:
    number = link.speed.partition("GT/s")[0]
    return Unknown("the link speed code is not a known one") if number == "unknown" else float(number)


def _speed(path: str) -> Union[float, Unknown]:
    """Return a link speed in GT/s of "16.0 GT/s PCIe" or "8 GT/s"."""
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text)
    return float(match.group(1)) if match else Unknown(f"{path} says {text!r}")


def _registers(config: Union[bytes, Unknown]) -> Facts:
    """Return what only the configuration space says, each value unknown with the same reason if not."""
    names = (*_EXPRESS, *_CONTROL)
    beyond = ("acs", "aer_status", "resizable_bars")
    if isinstance(config, Unknown):
        return {"responds": config, **dict.fromkeys(names + beyond, config)}
    facts: Facts = {"responds": True}
    try:
        pcie = parse_pcie(config)
    except ConfigSpaceError as error:
        facts["responds"] = error.outcome != "not-responding"
        facts.update(dict.fromkeys(names, Unknown(str(error), error.outcome == "no-pcie-cap")))
    else:
        facts.update({name: getattr(pcie, name) for name in _EXPRESS})
        facts.update(pci_extended.link_control(config, pcie.offset))
    facts.update(_beyond(config))
    return facts


def _beyond(config: bytes) -> Facts:
    """Return the extended capabilities; a short read says that it was short."""
    names = ("acs", "aer_status", "resizable_bars")
    if len(config) == STANDARD_SIZE:
        return dict.fromkeys(names, absent("a conventional PCI function has no extended configuration space"))
    if len(config) < pci_extended.EXTENDED_SIZE:
        lost = f"only {len(config)} bytes of the configuration space can be read: more takes root's rights"
        return dict.fromkeys(names, Unknown(lost))
    found = pci_extended.acs(config)
    status = pci_extended.aer_status(config)
    return {
        "acs": absent("the function has no ACS capability") if found is None else found,
        "aer_status": absent("the function has no AER capability") if status is None else status,
        "resizable_bars": pci_extended.resizable_bars(config),
    }


def aer_counters(folder: str) -> Facts:
    """Return the kernel's error counts since boot: {"correctable": {...}, "nonfatal", "fatal"}."""
    return {kind: _counts(f"{folder}/aer_dev_{kind}") for kind in ("correctable", "nonfatal", "fatal")}


def _counts(path: str) -> Union[Facts, Unknown]:
    """Return {"total": n, "kinds": {name: n}}; only kinds that were counted at all."""
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    pairs = [line.split() for line in text.splitlines() if len(line.split()) == 2]
    counts = {name: numbers_in(number)[0] for name, number in pairs if numbers_in(number)}
    kinds = {name: number for name, number in counts.items() if number and not name.startswith("TOTAL")}
    return {"total": sum(kinds.values()), "kinds": kinds}


def chain(host: Host, address: str) -> list[str]:
    """Return the addresses from the root port down to the function itself, as sysfs nests them."""
    real = os.path.realpath(host.sys("bus/pci/devices", address))
    return [part for part in real.split("/") if _ADDRESS.match(part)]


def host_bridge(host: Host, address: str) -> Optional[str]:
    """Return the root bus ("0000:60") a function hangs below, None outside a nested sysfs."""
    real = os.path.realpath(host.sys("bus/pci/devices", address))
    roots = [part[3:] for part in real.split("/") if re.match(r"^pci[0-9a-f]{4,}:[0-9a-f]{2}$", part)]
    return roots[0] if roots else None


def slot(path: list[Facts]) -> tuple[Optional[Facts], Facts]:
    """Return (the port above the card, the card's topmost function) of a path root port to GPU.

    Arc and AMD cards carry their own switch and report 2.5GT/s x1 or the like at the GPU itself: the
    link that counts is the one between the slot and the card's upstream port.
    """
    top = len(path) - 1
    vendor = path[-1]["vendor"]
    while top > 0 and path[top - 1]["vendor"] == vendor and path[top - 1]["port_type"] in _SWITCH_PORTS:
        top -= 1
    return (path[top - 1] if top else None), path[top]


def slot_link(path: list[Facts]) -> Facts:
    """Return the true link of a card: width and speed now, and the most both of its ends can do."""
    port, card = slot(path)
    ends = [card] if port is None else [card, port]
    return {
        "port": None if port is None else port["address"],
        "card": card["address"],
        "width": card["link_width"],
        "speed_gts": card["link_speed_gts"],
        "max_width": _least(ends, "max_link_width"),
        "max_speed_gts": _least(ends, "max_link_speed_gts"),
        "card_max_width": card["max_link_width"],
    }


def _least(ends: list[Facts], name: str) -> Any:
    known = [end[name] for end in ends if not isinstance(end[name], Unknown)]
    return min(known) if known else ends[0][name]


def bars(host: Host, address: str) -> Facts:
    """Return BAR sizes in bytes, those without an address, and what the largest could be resized to."""
    folder = host.sys("bus/pci/devices", address)
    text = read_text(f"{folder}/resource")
    if isinstance(text, Unknown):
        return {"sizes": text, "largest_bytes": text, "unassigned": text, "resizable_to_bytes": text}
    sizes, unassigned = {}, []
    for number, (start, end, flags) in enumerate(_resources(text)[:6]):
        if not flags & _MEMORY:
            continue
        sizes[str(number)] = end - start + 1 if end > start else 0
        if flags & _UNSET or (start == 0 and end == 0):
            unassigned.append(number)
    possible = [_resizable_to(folder, number) for number in range(6)]
    known = [size for size in possible if size]
    return {
        "sizes": sizes,
        "largest_bytes": max(sizes.values(), default=0),
        "unassigned": unassigned,
        "resizable_to_bytes": max(known)
        if known
        else absent(f"{folder} has no resourceN_resize: no resizable BAR, or a kernel before 6.1"),
    }


def _resources(text: str) -> list[tuple[int, int, int]]:
    """Return (first address, last address, flags) of each line of a ``resource`` file."""
    line = re.compile(r"^0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})$", re.MULTILINE)
    return [(int(start, 16), int(end, 16), int(flags, 16)) for start, end, flags in line.findall(text)]


def _resizable_to(folder: str, number: int) -> Optional[int]:
    # The file holds a mask in hexadecimal; bit n stands for 2**n megabytes.
    mask = read_int(f"{folder}/resource{number}_resize", 16)
    return None if isinstance(mask, Unknown) or mask <= 0 else 1 << (mask.bit_length() - 1 + 20)


def virtual_functions(host: Host, address: str) -> Facts:
    """Return how many SR-IOV virtual functions a device can have, and has."""
    folder = host.sys("bus/pci/devices", address)
    return {
        "possible": read_int(f"{folder}/sriov_totalvfs"),
        "enabled": read_int(f"{folder}/sriov_numvfs"),
    }


def aspm_policy(host: Host) -> Union[str, Unknown]:
    """Return the kernel's ASPM policy."""
    return read_choice(host.sys("module/pcie_aspm/parameters/policy"))
