# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a PCI function's configuration space: where PCI Express lives in it, and what it says.

Input is the content of a sysfs ``config`` file: 4096 bytes, 256 on a conventional device, 64 without
privilege, 0 when the device went away. Nothing here opens a file or writes one.

Register layout: PCI Local Bus 3.0 (header, capability list) and PCI Express Base 4.0, 7.5.3 (PCI
Express Capability); the same offsets as linux/include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from .typed import NamedTuple, Optional

HEADER_SIZE = 0x40
STANDARD_SIZE = 0x100  # the capability list lives below this; extended capabilities above

TRUNCATED = "truncated"
NOT_RESPONDING = "not-responding"
NO_PCIE_CAP = "no-pcie-cap"
CORRUPT = "corrupt"

POWER_MANAGEMENT = 0x01
PCI_EXPRESS = 0x10
DEVICE_CONTROL = 0x08  # offset of Device Control inside the PCI Express Capability
LINK_STATUS_END = 0x14  # end of the last register that is read from it

#: MaxReadReq sizes in bytes, in the order of their encoding; codes 6 and 7 are reserved.
MAX_READ_REQUEST_SIZES = (128, 256, 512, 1024, 2048, 4096)

PORT_TYPES = {
    0: "endpoint",
    1: "legacy-endpoint",
    4: "root-port",
    5: "upstream-port",
    6: "downstream-port",
    7: "pcie-to-pci-bridge",
    8: "pci-to-pcie-bridge",
    9: "rc-integrated-endpoint",
    10: "rc-event-collector",
}
LINKLESS_PORT_TYPES = (9, 10)  # inside the root complex: their link registers mean nothing
LINK_SPEEDS = {1: "2.5GT/s", 2: "5GT/s", 3: "8GT/s", 4: "16GT/s", 5: "32GT/s", 6: "64GT/s"}


class ConfigSpaceError(Exception):
    """A configuration space that cannot be read to the end: one sentence for the user, and a code.

    ``outcome`` is "truncated", "not-responding", "no-pcie-cap" or "corrupt".
    """

    def __init__(self, outcome: str, message: str) -> None:
        """Keep the code beside the sentence."""
        super().__init__(message)
        self.outcome = outcome


class Link(NamedTuple):
    """A PCI Express link: ``speed`` per lane as lspci writes it ("32GT/s"), ``width`` in lanes."""

    speed: str
    width: int


class PcieCapability(NamedTuple):
    """What a function's PCI Express Capability says. Sizes are in bytes.

    ``offset`` is the capability's place in configuration space, so Device Control is at
    ``device_control_offset``. Links are None inside the root complex, and ``power_state`` ("D0" to
    "D3") is None without a Power Management capability.
    """

    offset: int
    version: int
    port_type: str
    device_control: int
    max_payload_size: int
    max_payload_supported: int
    max_read_request_size: int
    link_capability: Optional[Link]
    link_status: Optional[Link]
    power_state: Optional[str]

    @property
    def device_control_offset(self) -> int:
        """Return where the 16-bit Device Control register is in configuration space."""
        return self.offset + DEVICE_CONTROL


def walk_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, id) of each capability in list order, which need not be the order of offsets.

    Null capabilities (id 0) are walked over like any other: an A100 has one before PCI Express. The
    walk ends at a pointer into the header, at one already seen, at id 0xff (nothing answers there)
    and at the end of what was read.
    """
    seen = set()
    pointer = _first_pointer(config)
    while HEADER_SIZE <= pointer <= len(config) - 2 and pointer not in seen:
        if config[pointer] == 0xFF:
            return
        seen.add(pointer)
        yield pointer, config[pointer]
        pointer = _next_pointer(config, pointer)


def parse_pcie(config: bytes) -> PcieCapability:
    """Read the PCI Express Capability of a function from its configuration space.

    Raises ConfigSpaceError when it is not there or cannot be read. A function in D3hot still answers.
    """
    _check_header(config)
    offset = _find_pci_express(config)
    registers = config[offset:STANDARD_SIZE][:LINK_STATUS_END]
    _check_registers(registers, len(config), offset)
    flags, device_capabilities, device_control = struct.unpack_from("<HIH", registers, 2)
    link_capabilities, link_status = struct.unpack_from("<I2xH", registers, 0x0C)
    port_type = flags >> 4 & 0xF
    has_link = port_type not in LINKLESS_PORT_TYPES
    return PcieCapability(
        offset=offset,
        version=flags & 0xF,
        port_type=PORT_TYPES.get(port_type, f"type-{port_type}"),
        device_control=device_control,
        max_payload_size=_size(device_control >> 5),
        max_payload_supported=_size(device_capabilities),
        max_read_request_size=_size(device_control >> 12),
        link_capability=_link(link_capabilities) if has_link else None,
        link_status=_link(link_status) if has_link else None,
        power_state=_power_state(config),
    )


def with_max_read_request(device_control: int, size: int) -> int:
    """Return the 16-bit Device Control value to write so that MaxReadReq becomes ``size`` bytes.

    Only bits 14:12 get a new value. Bit 15 is written as 0 whatever was read: on an endpoint it is
    Initiate Function Level Reset, which reads as 0 and resets the device when a 1 is written. (On a
    PCI Express to PCI bridge it is Bridge Configuration Retry Enable: not a register for this
    function.) Raises ValueError for a size that has no encoding.
    """
    if size not in MAX_READ_REQUEST_SIZES:
        allowed = ", ".join(str(each) for each in MAX_READ_REQUEST_SIZES)
        raise ValueError(f"MaxReadReq cannot be {size}: allowed are {allowed} bytes")
    return device_control & 0x0FFF | MAX_READ_REQUEST_SIZES.index(size) << 12


def _first_pointer(config: bytes) -> int:
    """Return the head of the capability list, 0 when the status register says there is none."""
    if len(config) < HEADER_SIZE or not config[0x06] & 0x10:
        return 0
    is_cardbus = config[0x0E] & 0x7F == 2
    return config[0x14 if is_cardbus else 0x34] & 0xFC


def _next_pointer(config: bytes, offset: int) -> int:
    # The low two bits are reserved and must be masked (PCI Local Bus 3.0, 6.7).
    return config[offset + 1] & 0xFC


def _check_header(config: bytes) -> None:
    if len(config) < HEADER_SIZE:
        raise ConfigSpaceError(
            TRUNCATED,
            f"the configuration space gave {len(config)} bytes where its header alone has "
            f"{HEADER_SIZE}: the device may just have been removed",
        )
    # Sixteen bytes, not the two ids: a virtual function answers ids ffff:ffff and is well.
    if config[:16] == b"\xff" * 16:
        raise _not_responding()


def _find_pci_express(config: bytes) -> int:
    """Return the capability's offset, or raise saying why the list did not lead to it."""
    end = _first_pointer(config)
    for offset, ident in walk_capabilities(config):
        if ident == PCI_EXPRESS:
            return offset
        end = _next_pointer(config, offset)
    if end > len(config) - 2:
        raise _unreadable(len(config))
    if end >= HEADER_SIZE and config[end] == 0xFF:
        raise _not_responding()
    raise ConfigSpaceError(NO_PCIE_CAP, "the device has no PCI Express capability")


def _check_registers(registers: bytes, config_size: int, offset: int) -> None:
    if len(registers) < LINK_STATUS_END and config_size < STANDARD_SIZE:
        raise _unreadable(config_size)
    if len(registers) < LINK_STATUS_END:
        raise ConfigSpaceError(
            CORRUPT,
            f"the PCI Express capability at {offset:#x} runs past the end of the standard "
            f"configuration space ({STANDARD_SIZE:#x}): the device's answer makes no sense",
        )
    # The device can stop answering between the list's read and this one.
    if registers[2:] == b"\xff" * (LINK_STATUS_END - 2):
        raise _not_responding()


def _not_responding() -> ConfigSpaceError:
    return ConfigSpaceError(
        NOT_RESPONDING,
        "the device does not respond (its registers read all ff): it has fallen off the bus or is in D3cold",
    )


def _unreadable(size: int) -> ConfigSpaceError:
    return ConfigSpaceError(TRUNCATED, f"cannot read beyond {size} bytes without privilege (CAP_SYS_ADMIN)")


def _size(code: int) -> int:
    """Return the bytes of a three-bit size code; reserved codes 6 and 7 give what the formula gives."""
    return 128 << (code & 7)


def _link(register: int) -> Link:
    """Read Link Capabilities or Link Status: both hold speed in bits 3:0 and width in bits 9:4."""
    return Link(speed=LINK_SPEEDS.get(register & 0xF, "unknown"), width=register >> 4 & 0x3F)


def _power_state(config: bytes) -> Optional[str]:
    for offset, ident in walk_capabilities(config):
        if ident == POWER_MANAGEMENT and offset + 6 <= len(config):
            return f"D{config[offset + 4] & 3}"
    return None
