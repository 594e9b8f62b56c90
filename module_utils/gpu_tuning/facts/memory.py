# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory: how much, huge pages, swap, and the modules it is made of."""

from __future__ import annotations

from . import smbios
from .reader import (
    Facts,
    Host,
    Unknown,
    absent,
    colon_fields,
    names_in,
    numbers_in,
    read_bytes,
    read_choice,
    read_int,
    read_text,
)


def collect(host: Host) -> Facts:
    """Return sizes in bytes, transparent and reserved huge pages, swap and the DIMM slots."""
    return {
        **_meminfo(host),
        "transparent_hugepage": {
            "enabled": read_choice(host.sys("kernel/mm/transparent_hugepage/enabled")),
            "defrag": read_choice(host.sys("kernel/mm/transparent_hugepage/defrag")),
        },
        "hugepages": _hugepages(host),
        "dimms": _dimms(host),
    }


def _meminfo(host: Host) -> Facts:
    path = host.proc("meminfo")
    text = read_text(path)
    names = {"total_bytes": "MemTotal", "available_bytes": "MemAvailable"}
    names.update({"swap_total_bytes": "SwapTotal", "swap_free_bytes": "SwapFree"})
    if isinstance(text, Unknown):
        return dict.fromkeys(names, text)
    sizes = {name: numbers_in(value)[:1] for name, value in colon_fields(text).items()}
    return {
        name: sizes[field][0] * 1024 if sizes.get(field) else Unknown(f"{path} gives no {field}")
        for name, field in names.items()
    }


def _hugepages(host: Host) -> Facts:
    """Return {"2048kB": {"total": n, "free": n}, ...}."""
    base = host.sys("kernel/mm/hugepages")
    return {
        name.partition("-")[2]: {
            "total": read_int(f"{base}/{name}/nr_hugepages"),
            "free": read_int(f"{base}/{name}/free_hugepages"),
        }
        for name in names_in(base)
        if name.startswith("hugepages-")
    }


def _dimms(host: Host) -> object:
    table = read_bytes(host.sys("firmware/dmi/tables/DMI"))
    if isinstance(table, Unknown):
        return table
    devices = smbios.memory_devices(table)
    if not devices:
        return absent("the firmware's SMBIOS tables list no memory slots (usual in a VM)")
    facts = smbios.summary(devices)
    if facts["channels"] is None:
        names = ", ".join(sorted({device["locator"] for device in devices})[:3])
        lost = Unknown(f"the firmware's slot names ({names}, ...) do not say which channel a slot is on")
        facts.update(channels=lost, channels_empty=lost)
    return {**facts, "modules": devices}
