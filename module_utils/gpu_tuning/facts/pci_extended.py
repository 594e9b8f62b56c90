# SPDX-License-Identifier: GPL-3.0-or-later
"""What a function's configuration space says beyond pci_config: link control, ACS, AER, ReBAR.

Register layout: PCI Express Base 4.0 (7.5.3.6 to 7.5.3.8, 7.5.3.19, 7.7.8, 7.8.4, 7.8.6), the same
offsets as linux/include/uapi/linux/pci_regs.h. Nothing here opens a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Optional

from .reader import Facts

EXTENDED_START = 0x100
EXTENDED_SIZE = 0x1000
AER, ACS, RESIZABLE_BAR = 0x01, 0x0D, 0x15

#: ACS Capability and Control bits, in the order of their positions.
ACS_BITS = (
    "source_validation",
    "translation_blocking",
    "request_redirect",
    "completion_redirect",
    "upstream_forwarding",
    "egress_control",
    "direct_translated",
)
ASPM = {0: "disabled", 1: "L0s", 2: "L1", 3: "L0s L1"}
SPEEDS_GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def walk_extended(config: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, id) of each extended capability; stop at a loop, at nothing and at all ones."""
    seen: set[int] = set()
    pointer = EXTENDED_START
    while EXTENDED_START <= pointer <= len(config) - 4 and pointer not in seen:
        seen.add(pointer)
        (header,) = struct.unpack_from("<I", config, pointer)
        if header in (0, 0xFFFFFFFF):
            return
        yield pointer, header & 0xFFFF
        pointer = header >> 20 & 0xFFC


def find_extended(config: bytes, wanted: int, size: int) -> Optional[int]:
    """Return the offset of a capability that has ``size`` readable bytes, else None."""
    for offset, ident in walk_extended(config):
        if ident == wanted and offset + size <= len(config):
            return offset
    return None


def acs(config: bytes) -> Optional[Facts]:
    """Return {"capability": [names], "control": [names], "redirect": bool}, None without ACS."""
    offset = find_extended(config, ACS, 8)
    if offset is None:
        return None
    capability, control = struct.unpack_from("<HH", config, offset + 4)
    enabled = _acs_names(control)
    return {
        "capability": _acs_names(capability),
        "control": enabled,
        "redirect": "request_redirect" in enabled or "completion_redirect" in enabled,
    }


def _acs_names(bits: int) -> list[str]:
    return [name for number, name in enumerate(ACS_BITS) if bits >> number & 1]


def aer_status(config: bytes) -> Optional[Facts]:
    """Return AER's latched status registers, {"uncorrectable": bits, "correctable": bits}."""
    offset = find_extended(config, AER, 0x14)
    if offset is None:
        return None
    (uncorrectable,) = struct.unpack_from("<I", config, offset + 0x04)
    (correctable,) = struct.unpack_from("<I", config, offset + 0x10)
    return {"uncorrectable": uncorrectable, "correctable": correctable}


def resizable_bars(config: bytes) -> list[Facts]:
    """Return [{"bar", "size_bytes", "max_size_bytes"}] of the Resizable BAR capability.

    Sizes are 2**(20+n) bytes; the capability register's bit 4+n says that 2**(20+n) is possible.
    """
    offset = find_extended(config, RESIZABLE_BAR, 12)
    if offset is None:
        return []
    (first_control,) = struct.unpack_from("<I", config, offset + 8)
    count = first_control >> 5 & 0x7
    bars = []
    for place in range(offset + 4, offset + 4 + 8 * count, 8):
        if place + 8 > len(config):
            break
        capability, control = struct.unpack_from("<II", config, place)
        top = (capability >> 4).bit_length() - 1
        bars.append(
            {
                "bar": control & 0x7,
                "size_bytes": 1 << (20 + (control >> 8 & 0x3F)),
                "max_size_bytes": 1 << (20 + top) if top >= 0 else 1 << (20 + (control >> 8 & 0x3F)),
            }
        )
    return bars


def link_control(config: bytes, offset: int) -> Facts:
    """Return what the Link and Device Control registers of the capability at ``offset`` say."""
    device_capabilities, device_control = struct.unpack_from("<IH", config, offset + 0x04)
    link_capabilities, control, status = struct.unpack_from("<IHH", config, offset + 0x0C)
    facts: Facts = {
        "aspm": ASPM[control & 3],
        "autonomous_speed_change": bool(status & 0x8000),
        "extended_tags": bool(device_control & 0x100),
        "extended_tags_supported": bool(device_capabilities & 0x20),
        "relaxed_ordering": bool(device_control & 0x10),
        "target_speed_gts": None,
        "aspm_supported": ASPM[link_capabilities >> 10 & 3],
    }
    if offset + 0x32 <= len(config) and config[offset + 2] & 0xF >= 2:
        (control2,) = struct.unpack_from("<H", config, offset + 0x30)
        facts["target_speed_gts"] = SPEEDS_GTS.get(control2 & 0xF)
    return facts
