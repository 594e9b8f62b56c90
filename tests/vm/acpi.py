# SPDX-License-Identifier: GPL-3.0-or-later
"""ACPI tables that give an emulated machine what an EPYC's firmware gives: idle states (_CST), CPPC (_CPC)
and a watchdog (WDAT).

An SSDT adds both to each CPU. CPPC's registers are in a platform communication channel (PCCT) whose memory
is an nvdimm at 4 GiB. Its doorbell register is its own status word, and what is written there when it rings
is "command complete": the channel answers by itself. The watchdog is the one that QEMU's chipset has; the
table tells the kernel's generic driver which registers to use, as servers' firmware does.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

MEMORY_BASE = 0x1_0000_0000  # where QEMU puts the nvdimm for a machine of up to 2 GiB
MEMORY_SIZE = 16 << 20
_CHANNEL = 0x1000
#: Exit latency of C2 in microseconds; the governor then leaves it alone, which saves the host a core.
C2_LATENCY_US = 100_000

_CPU = """\
External (\\_SB.CPUS.C{cpu:03X}, DeviceObj)
Scope (\\_SB.CPUS.C{cpu:03X}) {{
  Name (_CST, Package () {{ 3,
    Package () {{ ResourceTemplate () {{ Register (FFixedHW, 0, 0, 0, 0) }}, 1, 1, 1000 }},
    Package () {{ ResourceTemplate () {{ Register (SystemIO, 8, 0, 0x0E14, 1) }}, 2, {c2}, 500 }},
    Package () {{ ResourceTemplate () {{ Register (SystemIO, 8, 0, 0x0E15, 1) }}, 3, {c3}, 100 }} }})
  Name (_CPC, Package () {{ 23, 3, 166, 122, 50, 20,
    {none}, {desired}, {minimum}, {maximum}, {none}, {none}, {none},
    {delivered}, {reference}, {none}, {enable}, {selection}, {none}, {preference}, 122, 400, 2450 }}) }}
"""


def write(directory: Path, cpus: int, watchdog: bool = False) -> list[str]:
    """Write the tables and the memory into a directory; return QEMU's arguments for them."""
    directory.mkdir(parents=True, exist_ok=True)
    source = "".join(_cpu(cpu) for cpu in range(cpus))
    (directory / "ssdt.asl").write_text(
        f'DefinitionBlock ("", "SSDT", 2, "VMTEST", "VMTSTCPU", 1) {{\n{source}}}\n'
    )
    subprocess.run(
        ["iasl", "-p", directory / "ssdt", directory / "ssdt.asl"], check=True, stdout=subprocess.DEVNULL
    )
    (directory / "pcct.aml").write_bytes(_pcct())
    (directory / "memory.bin").write_bytes(_memory(cpus))
    backend = f"memory-backend-file,id=pcc,size=16M,mem-path={directory}/memory.bin,share=off"
    arguments = ["-acpitable", f"file={directory}/ssdt.aml", "-acpitable", f"file={directory}/pcct.aml"]
    arguments += ["-object", backend, "-device", "nvdimm,memdev=pcc,id=pccmem,node=0"]
    if watchdog:
        (directory / "wdat.aml").write_bytes(_wdat())
        arguments += ["-acpitable", f"file={directory}/wdat.aml", "-global", "ICH9-LPC.noreboot=false"]
    return arguments


def _register(space: str, width: int, address: int, access: int) -> str:
    return f"ResourceTemplate () {{ Register ({space}, {width}, 0, 0x{address:X}, {access}) }}"


def _cpu(cpu: int) -> str:
    counters, channel = MEMORY_BASE + cpu * 0x40, cpu * 0x40
    offsets = {"desired": 0, "minimum": 4, "maximum": 8, "preference": 12, "enable": 16, "selection": 20}
    return _CPU.format(
        cpu=cpu,
        c2=C2_LATENCY_US,
        c3=2 * C2_LATENCY_US,
        none=_register("SystemMemory", 0, 0, 0),
        delivered=_register("SystemMemory", 64, counters + 8, 4),
        reference=_register("SystemMemory", 64, counters, 4),
        # In space PCC the access size is the number of the channel.
        **{name: _register("PCC", 32, channel + offset, 0) for name, offset in offsets.items()},
    )


def _memory(cpus: int) -> bytes:
    memory = bytearray(MEMORY_SIZE)
    struct.pack_into("<I", memory, _CHANNEL, 0x50434300)  # the signature "PCC", channel 0
    for cpu in range(cpus):
        struct.pack_into("<QQ", memory, cpu * 0x40, 1000, 1000)
        struct.pack_into("<6I", memory, _CHANNEL + 8 + cpu * 0x40, 0, 0, 166, 0x80, 1, 0)
    return bytes(memory)


def _pcct() -> bytes:
    status = struct.pack("<BBBBQ", 0, 16, 0, 2, MEMORY_BASE + _CHANNEL + 6)
    channel = struct.pack("<BB6xQQ", 0, 62, MEMORY_BASE + _CHANNEL, 0x1000) + status
    channel += struct.pack("<QQIIH", 0xFFFE, 1, 0, 0, 0)
    return _table(b"PCCT", 2, struct.pack("<IQ", 0, 0) + channel)


class _Register(NamedTuple):
    """Where a register is: the number of its address space, bits, code of its width, address."""

    space: int
    bits: int
    width: int
    address: int


#: Of the chipset's timer: it counts down in steps of 0.6 s, twice, and then resets the machine if it may.
_RELOAD, _CONTROL, _STATUS, _COUNT = (_Register(1, 16, 2, port) for port in (0x660, 0x668, 0x666, 0x672))
_MAY_NOT_RESET = _Register(0, 32, 3, 0xFED1F410)
#: Action, instruction, register, lowest bit, value, mask: of WDAT's specification. 0x80 keeps the other bits.
_WATCHDOG = (
    (0x01, 0x82, _MAY_NOT_RESET, 5, 0, 1),  # feed it; it runs from power-on, and may do nothing yet
    (0x01, 0x02, _RELOAD, 0, 1, 0xFF),
    (0x06, 0x83, _COUNT, 0, 0, 0x3FF),  # set the countdown
    (0x08, 0x00, _CONTROL, 11, 0, 1),  # running?
    (0x09, 0x82, _CONTROL, 11, 0, 1),  # run
    (0x0A, 0x00, _CONTROL, 11, 1, 1),  # stopped?
    (0x0B, 0x82, _CONTROL, 11, 1, 1),  # stop
    (0x20, 0x00, _STATUS, 1, 1, 1),  # has it reset the machine?
    (0x21, 0x02, _STATUS, 1, 1, 1),  # forget that
)


def _wdat() -> bytes:
    entries = b"".join(
        struct.pack(
            "<BBHBBBBQII", action, instruction, 0, at.space, at.bits, bit, at.width, at.address, value, mask
        )
        for action, instruction, at, bit, value, mask in _WATCHDOG
    )
    head = struct.pack("<IH3B3xIIIB3xI", 32, 0xFF, 0xFF, 0xFF, 0xFF, 600, 0x3FF, 2, 1, len(_WATCHDOG))
    return _table(b"WDAT", 1, head + entries)


def _table(signature: bytes, revision: int, body: bytes) -> bytes:
    length, name = 36 + len(body), b"VMTST" + signature[:3]
    header = struct.pack("<4sIBB6s8sI4sI", signature, length, revision, 0, b"VMTEST", name, 1, b"TEST", 1)
    table = bytearray(header + body)
    table[9] = -sum(table) & 0xFF
    return bytes(table)
