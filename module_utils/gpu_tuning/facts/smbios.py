# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory modules from the firmware's SMBIOS tables (DMTF DSP0134, Memory Device, type 17)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Optional

from .reader import Facts

MEMORY_DEVICE, END_OF_TABLE = 17, 127
_UNKNOWN_SIZE, _EXTENDED_SIZE = 0xFFFF, 0x7FFF
MEMORY_TYPES = {0x18: "DDR3", 0x1A: "DDR4", 0x1E: "LPDDR4", 0x22: "DDR5", 0x23: "LPDDR5", 0x20: "HBM"}

#: Forms of a module's place, as board makers write it: "P0 CHANNEL A", "DIMM_P1_C0", "CPU2_DIMM_B1".
_CHANNEL_FORMS = (
    re.compile(
        r"(?:P|CPU|NODE|PROC)[ _]?(?P<socket>\d+)[ _-]*(?:NODE ?\d+[ _]*)?CHANNEL[ _]?(?P<channel>[A-P]|\d+)"
    ),
    re.compile(r"DIMM[ _]?P(?P<socket>\d+)[ _](?P<channel>[A-P])\d"),
    re.compile(r"(?:P|CPU)[ _]?(?P<socket>\d+)[ _-]*DIMM[ _-]?(?P<channel>[A-P])\d?"),
    re.compile(r"P(?P<socket>\d+)[ _-]*DIMM(?P<channel>[A-P])\d?"),
    re.compile(r"^(?P<socket>)DIMM[ _-]?(?P<channel>[A-P])\d?"),
)


def structures(table: bytes) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield (type, formatted area, strings) of each structure; a cut or wrong table just ends."""
    place = 0
    while place + 4 <= len(table):
        kind, length = table[place], table[place + 1]
        if length < 4 or place + length > len(table) or kind == END_OF_TABLE:
            return
        end = table.find(b"\0\0", place + length)
        if end < 0:
            return
        texts = table[place + length : end].split(b"\0")
        yield kind, table[place : place + length], [text.decode("latin-1").strip() for text in texts]
        place = end + 2


def memory_devices(table: bytes) -> list[Facts]:
    """Return one dict for each memory slot; ``size_bytes`` 0 means an empty slot."""
    return [
        _memory_device(area, texts)
        for kind, area, texts in structures(table)
        if kind == MEMORY_DEVICE and len(area) >= 0x15
    ]


def _memory_device(area: bytes, texts: list[str]) -> Facts:
    locator, bank = _text(area, texts, 0x10), _text(area, texts, 0x11)
    return {
        "locator": locator,
        "bank": bank,
        "size_bytes": _size(area),
        "type": MEMORY_TYPES.get(area[0x12], f"type {area[0x12]:#x}"),
        "rated_mts": _speed(area, 0x15, 0x54),
        "configured_mts": _speed(area, 0x20, 0x58),
        "part": _text(area, texts, 0x1A),
        "ranks": area[0x1B] & 0xF if len(area) > 0x1B else 0,
        "ecc": struct.unpack_from("<H", area, 0x08)[0] > struct.unpack_from("<H", area, 0x0A)[0],
        "channel": channel_of(locator, bank),
    }


def _text(area: bytes, texts: list[str], place: int) -> str:
    number = area[place] if place < len(area) else 0
    return texts[number - 1] if 0 < number <= len(texts) else ""


def _size(area: bytes) -> Optional[int]:
    """Return a module's size in bytes: 0 for an empty slot, None where the firmware does not know."""
    (word,) = struct.unpack_from("<H", area, 0x0C)
    if word == _UNKNOWN_SIZE:
        return None
    if word == _EXTENDED_SIZE and len(area) >= 0x20:
        return int((struct.unpack_from("<I", area, 0x1C)[0] & 0x7FFFFFFF) << 20)
    return int((word & 0x7FFF) << (10 if word & 0x8000 else 20))


def _speed(area: bytes, place: int, extended: int) -> Optional[int]:
    """Return MT/s, None where the firmware does not say; 0xffff points to the field of SMBIOS 3.3."""
    if place + 2 > len(area):
        return None
    (speed,) = struct.unpack_from("<H", area, place)
    if speed == 0xFFFF and extended + 4 <= len(area):
        (speed,) = struct.unpack_from("<I", area, extended)
    return int(speed) or None


def channel_of(locator: str, bank: str) -> Optional[str]:
    """Return "<socket>/<channel>" of a slot's names, None where no known form fits."""
    for text in (bank.upper(), locator.upper()):
        for form in _CHANNEL_FORMS:
            match = form.search(text)
            if match:
                return f"{match.group('socket') or '0'}/{match.group('channel')}"
    return None


def summary(devices: list[Facts]) -> Facts:
    """Return what the slots add up to; ``channels_empty`` lists channels without any module."""
    populated = [device for device in devices if device["size_bytes"] != 0]
    channels: dict[str, int] = {}
    for device in devices:
        if device["channel"] is not None:
            channels[device["channel"]] = channels.get(device["channel"], 0) + (device["size_bytes"] != 0)
    complete = all(device["channel"] is not None for device in devices)
    return {
        "slots": len(devices),
        "populated": len(populated),
        "sizes_bytes": sorted({device["size_bytes"] for device in populated if device["size_bytes"]}),
        "parts": sorted({device["part"] for device in populated}),
        "rated_mts": sorted({device["rated_mts"] for device in populated if device["rated_mts"]}),
        "configured_mts": sorted({d["configured_mts"] for d in populated if d["configured_mts"]}),
        "ecc": all(device["ecc"] for device in populated),
        "channels": len(channels) if complete else None,
        "channels_empty": sorted(name for name, count in channels.items() if not count) if complete else None,
    }
