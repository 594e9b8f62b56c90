# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the 4096-byte configuration space of a PCI Express function.

Register layout: PCI Local Bus 3.0 and PCI Express Base 4.0, the offsets of
linux/include/uapi/linux/pci_regs.h. Every method that adds something returns the image, so that a
device reads as one expression.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Optional

SIZE = 4096

# Standard capabilities
POWER_MANAGEMENT = 0x01
MSI = 0x05
HYPERTRANSPORT = 0x08
VENDOR_SPECIFIC = 0x09
BRIDGE_SUBSYSTEM = 0x0D
PCI_EXPRESS = 0x10
MSI_X = 0x11

# Extended capabilities
ADVANCED_ERROR_REPORTING = 0x01
VIRTUAL_CHANNEL = 0x02
VENDOR_SPECIFIC_EXTENDED = 0x0B
ACCESS_CONTROL_SERVICES = 0x0D
ALTERNATIVE_ROUTING_ID = 0x0E
RESIZABLE_BAR = 0x15
LATENCY_TOLERANCE_REPORTING = 0x18
SECONDARY_PCI_EXPRESS = 0x19
DATA_LINK_FEATURE = 0x25
PHYSICAL_LAYER_16GT = 0x26
LANE_MARGINING = 0x27
PHYSICAL_LAYER_32GT = 0x2A

# Port types of the PCI Express capability
ENDPOINT = 0
LEGACY_ENDPOINT = 1
ROOT_PORT = 4
PCIE_TO_PCI_BRIDGE = 7


@dataclasses.dataclass(frozen=True)
class Express:
    """The registers of a PCI Express capability, by their names in the specification.

    ``slot_capabilities`` None: no slot behind this port.
    """

    port_type: int
    device_capabilities: int
    device_control: int
    link_capabilities: int
    link_status: int
    link_control: int = 0x0140
    slot_capabilities: Optional[int] = None
    device_capabilities_2: int = 0
    device_control_2: int = 0
    link_capabilities_2: int = 0
    link_control_2: int = 0
    link_status_2: int = 0

    def encode(self) -> bytes:
        """Return the capability (version 2) without its two-byte header."""
        has_slot = self.slot_capabilities is not None
        flags = 2 | self.port_type << 4 | (0x100 if has_slot else 0)
        device = struct.pack("<HIHH", flags, self.device_capabilities, self.device_control, 0)
        link = struct.pack("<IHH", self.link_capabilities, self.link_control, self.link_status)
        presence_detected = 0x0040 if has_slot else 0
        slot_and_root = struct.pack("<IHH8x", self.slot_capabilities or 0, 0, presence_detected)
        device_2 = struct.pack("<IHH", self.device_capabilities_2, self.device_control_2, 0)
        link_2 = struct.pack("<IHH", self.link_capabilities_2, self.link_control_2, self.link_status_2)
        return device + link + slot_and_root + device_2 + link_2


class PciImage:
    """A configuration space under construction; ``bytes(image)`` is the finished one."""

    def __init__(
        self,
        vendor: int,
        device: int,
        class_code: int,
        *,
        revision: int = 0xA1,
        header: int = 0,
        command: int = 0x0407,
        status: int = 0x0010,  # has a capability list
        subsystem: tuple[int, int] = (0, 0),
        interrupt_pin: int = 1,
        interrupt_line: int = 0xFF,
    ) -> None:
        """Write the header; ``header`` bit 7 marks a function of a multi-function device."""
        self.vendor, self.device, self.class_code, self.revision = vendor, device, class_code, revision
        self.is_bridge = header & 0x7F != 0
        self.subsystem = subsystem
        self.express_registers: Optional[Express] = None
        self._data = bytearray(SIZE)
        self._last_pointer = 0x34
        self._last_extended: Optional[int] = None
        self.put("<HHHH", 0x00, vendor, device, command, status)
        self.put("<BBH", 0x08, revision, class_code & 0xFF, class_code >> 8)
        self.put("<B", 0x0E, header)
        self.put("<BB", 0x3C, interrupt_line, interrupt_pin)
        if not self.is_bridge:
            self.put("<HH", 0x2C, *subsystem)

    def __bytes__(self) -> bytes:
        """Return the image as a read of the sysfs file gives it."""
        return bytes(self._data)

    def put(self, layout: str, offset: int, *numbers: int) -> PciImage:
        """Write numbers at an offset, laid out as the struct module says."""
        struct.pack_into(layout, self._data, offset, *numbers)
        return self

    def bars(self, *registers: int) -> PciImage:
        """Write Base Address Registers, the first at 0x10; bits above 31 are dropped."""
        low_words = [register & 0xFFFFFFFF for register in registers]
        return self.put(f"<{len(low_words)}I", 0x10, *low_words)

    def buses(self, primary: int, secondary: int, subordinate: int) -> PciImage:
        """Write a bridge's bus numbers."""
        return self.put("<BBB", 0x18, primary, secondary, subordinate)

    def capability(self, offset: int, ident: int, body: bytes = b"") -> PciImage:
        """Add a capability to the end of the list; ``body`` follows its two-byte header."""
        self._data[self._last_pointer] = offset
        self._data[offset] = ident
        self._data[offset + 2 : offset + 2 + len(body)] = body
        self._last_pointer = offset + 1
        return self

    def power_management(self, offset: int, state: int = 0, capabilities: int = 0x4803) -> PciImage:
        """Add Power Management in state D0 to D3, with No_Soft_Reset set."""
        return self.capability(offset, POWER_MANAGEMENT, struct.pack("<HHH", capabilities, 8 | state, 0))

    def express(self, offset: int, registers: Express) -> PciImage:
        """Add the PCI Express capability."""
        self.express_registers = registers
        return self.capability(offset, PCI_EXPRESS, registers.encode())

    def extended(self, offset: int, ident: int, version: int, body: bytes = b"") -> PciImage:
        """Add an extended capability; the first one belongs at 0x100. Its header has four bytes."""
        if self._last_extended is not None:
            (previous,) = struct.unpack_from("<I", self._data, self._last_extended)
            self.put("<I", self._last_extended, previous | offset << 20)
        self.put("<I", offset, ident | version << 16)
        self._data[offset + 4 : offset + 4 + len(body)] = body
        self._last_extended = offset
        return self
