# SPDX-License-Identifier: GPL-3.0-or-later
"""The IOMMU: what the command line asks for, and what the kernel made of it for each GPU."""

from __future__ import annotations

from typing import Optional, Union

from .reader import Facts, Host, Unknown, names_in, read_text

OFF, PASSTHROUGH, TRANSLATED, MIXED = "off", "passthrough", "translated", "mixed"

#: /sys/kernel/iommu_groups/N/type (Documentation/ABI/testing/sysfs-kernel-iommu_groups) -> mode.
_TYPES = {"DMA": TRANSLATED, "DMA-FQ": TRANSLATED, "identity": PASSTHROUGH}


def collect(host: Host, tokens: Union[dict[str, list[str]], Unknown], gpus: list[Facts]) -> Facts:
    """Return ``mode`` for the GPUs (all groups where there are none), ``asked``, and the units found."""
    groups = [gpu["iommu_group"] for gpu in gpus if gpu["iommu_group"] is not None]
    all_groups = names_in(host.sys("kernel/iommu_groups"))
    shared = {group for group in groups if groups.count(group) > 1}
    return {
        "mode": _mode(host, groups or all_groups, bool(all_groups), bool(gpus)),
        "asked": Unknown(tokens.reason) if isinstance(tokens, Unknown) else asked(tokens),
        "units": len(names_in(host.sys("class/iommu"))),
        "groups": len(all_groups),
        "gpu_group_types": {group: read_text(_type_file(host, group)) for group in sorted(set(groups))},
        "groups_with_several_gpus": sorted(shared),
    }


def _type_file(host: Host, group: str) -> str:
    return host.sys("kernel/iommu_groups", group, "type")


def _mode(host: Host, groups: list[str], any_group: bool, any_gpu: bool) -> Union[str, Unknown]:
    if not any_group or (any_gpu and not groups):
        return OFF
    found: set[str] = set()
    for group in groups:
        kind = read_text(_type_file(host, group))
        if isinstance(kind, Unknown):
            return kind
        found.add(_TYPES.get(kind, kind))
    return found.pop() if len(found) == 1 else MIXED


def asked(tokens: dict[str, list[str]]) -> Optional[str]:
    """Return what the command line asks for, None when it leaves the choice to the kernel."""
    vendor = [value for name in ("amd_iommu", "intel_iommu") for value in tokens.get(name, [])]
    common = [part for value in tokens.get("iommu", []) for part in value.split(",")]
    if "off" in vendor + common:
        return OFF
    if "pt" in common or "1" in tokens.get("iommu.passthrough", []):
        return PASSTHROUGH
    if "nopt" in common or "0" in tokens.get("iommu.passthrough", []):
        return TRANSLATED
    return None
