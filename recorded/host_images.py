# SPDX-License-Identifier: GPL-3.0-or-later
"""The configuration spaces of the recorded host's PCI functions. VALUES.md says where each comes from."""

from __future__ import annotations

import struct

from host_pci import ASPEED, NVIDIA, VGA_CLASS
from pci_image import (
    ACCESS_CONTROL_SERVICES,
    ADVANCED_ERROR_REPORTING,
    ALTERNATIVE_ROUTING_ID,
    BRIDGE_SUBSYSTEM,
    DATA_LINK_FEATURE,
    ENDPOINT,
    HYPERTRANSPORT,
    LANE_MARGINING,
    LATENCY_TOLERANCE_REPORTING,
    LEGACY_ENDPOINT,
    MSI,
    MSI_X,
    PCIE_TO_PCI_BRIDGE,
    PHYSICAL_LAYER_16GT,
    PHYSICAL_LAYER_32GT,
    RESIZABLE_BAR,
    ROOT_PORT,
    SECONDARY_PCI_EXPRESS,
    VENDOR_SPECIFIC,
    VENDOR_SPECIFIC_EXTENDED,
    VIRTUAL_CHANNEL,
    Express,
    PciImage,
)

AMD = 0x1022
SAMSUNG = 0x144D
MELLANOX = 0x15B3

GPU_DEVICE_CAPABILITIES = 0x112C8DE1
GPU_LINK_CAPABILITIES = 0x00466905  # 32 GT/s x16
DEVICE_CONTROL = 0x2937  # MaxPayload 256, MaxReadReq 512: what firmware leaves
MAX_PAYLOAD = 0x00E0
MAX_READ_REQUEST = 0x7000
LINK_SPEED = 0x000F
LINK_WIDTH = 0x03F0
MEBIBYTE = 1 << 20


def gpu_link_status(faults: set[str], idle: bool) -> int:
    """Return a GPU's Link Status: 32 GT/s x16 under load, 2.5 GT/s x16 at idle."""
    status = 0x1101 if idle else 0x1105
    if "x8" in faults:
        status = status & ~LINK_WIDTH | 8 << 4
    if "gen4" in faults:
        status = status & ~LINK_SPEED | 4
    return status


def gpu_device_control(faults: set[str]) -> int:
    """Return a GPU's Device Control."""
    control = DEVICE_CONTROL
    if "mps128" in faults:
        control &= ~MAX_PAYLOAD
    if "mrrs128" in faults:
        control &= ~MAX_READ_REQUEST
    if "mrrs4096" in faults:
        control = control & ~MAX_READ_REQUEST | 5 << 12
    return control


def megabyte_sizes(smallest: int, largest: int) -> int:
    """Return a bitmap of BAR sizes: bit n is 2^n MiB."""
    return sum(1 << size for size in range(smallest, largest + 1))


def root_complex_function(device: int, class_code: int, has_capabilities: bool) -> PciImage:
    """Return a host bridge or IOMMU: no PCI Express capability."""
    image = PciImage(
        AMD,
        device,
        class_code,
        revision=0,
        command=0,
        status=0x0010 if has_capabilities else 0,
        interrupt_pin=0,
        interrupt_line=0,
    )
    return image.capability(0x48, VENDOR_SPECIFIC, b"\x08" + bytes(5)) if has_capabilities else image


def root_port(
    primary: int,
    secondary: int,
    subordinate: int,
    *,
    link_status: int,
    link_capabilities: int = 0x00737905,
) -> PciImage:
    """Return a root port with the layout of a Milan GPP bridge."""
    registers = Express(
        ROOT_PORT,
        device_capabilities=0x00008022,
        device_control=DEVICE_CONTROL,
        link_capabilities=link_capabilities,
        link_status=link_status,
        link_control=0x0040,
        slot_capabilities=0x00080000 | 75 << 7,
        device_capabilities_2=0x0070059F,
        link_capabilities_2=0x0180003E,
        link_control_2=5,
        link_status_2=0x1E,
    )
    image = PciImage(AMD, 0x153E, 0x060400, header=1, revision=1)
    image.buses(primary, secondary, subordinate)
    image.power_management(0x50, capabilities=0xC803).express(0x58, registers)
    image.capability(0xA0, MSI, struct.pack("<HIIH", 0x0081, 0xFEE00000, 0, 0))
    image.capability(0xC0, BRIDGE_SUBSYSTEM, struct.pack("<HHH", 0, 0x1022, 0x1234))
    image.capability(0xC8, HYPERTRANSPORT, struct.pack("<H", 0xA803))
    return with_root_port_extended(image)


def with_root_port_extended(image: PciImage) -> PciImage:
    """Add a root port's extended capabilities."""
    image.extended(0x100, VENDOR_SPECIFIC_EXTENDED, 1, struct.pack("<III", 0x01010001, 0, 0))
    image.extended(0x150, ADVANCED_ERROR_REPORTING, 2, struct.pack("<III", 0, 0x04000000, 0x00462030))
    image.extended(0x270, SECONDARY_PCI_EXPRESS, 1)
    image.extended(0x2A0, ACCESS_CONTROL_SERVICES, 1, struct.pack("<HH", 0x005F, 0x1D))
    image.extended(0x410, PHYSICAL_LAYER_16GT, 1).extended(0x450, LANE_MARGINING, 1)
    return image.extended(0x500, PHYSICAL_LAYER_32GT, 1)


def gpu_bars(index: int) -> tuple[int, int, int, int]:
    """Return the addresses of BAR0 (registers), BAR1 (video memory), BAR3 and BAR5 (I/O ports)."""
    registers = (0xA0 + 8 * index) << 24
    video_memory = (0x1000 + 0x200 * index) << 32
    return registers, video_memory, (0x3000 + index) << 32, 0x1000 * (index + 1)


def gpu_resources(index: int, resizable: bool) -> list[tuple[int, int, int]]:
    """Return the GPU's BARs as (first, last, kernel resource flags)."""
    registers, video_memory, bar3, io_ports = gpu_bars(index)
    video_memory_size = (128 << 10 if resizable else 256) * MEBIBYTE
    empty = (0, 0, 0)  # the upper half of the 64-bit BAR before it
    return [
        (registers, registers + 64 * MEBIBYTE - 1, 0x40200),
        (video_memory, video_memory + video_memory_size - 1, 0x14220C),
        empty,
        (bar3, bar3 + 32 * MEBIBYTE - 1, 0x14220C),
        empty,
        (io_ports, io_ports + 127, 0x40101),
    ]


def gpu(index: int, device_control: int, link_status: int, asleep: bool, resizable: bool) -> PciImage:
    """Return an RTX PRO 6000 Blackwell: capabilities at 40, 48 and 60 as on other GB202 cards."""
    registers = Express(
        LEGACY_ENDPOINT,
        device_capabilities=GPU_DEVICE_CAPABILITIES,
        device_control=device_control,
        link_capabilities=GPU_LINK_CAPABILITIES,
        link_status=link_status,
        device_capabilities_2=0x00070993,
        device_control_2=0x0400,
        link_capabilities_2=0x0180003E,
        link_control_2=5,
        link_status_2=0x1E,
    )
    bar0, bar1, bar3, io_ports = gpu_bars(index)
    image = PciImage(NVIDIA, 0x2BB1, VGA_CLASS, header=0x80, subsystem=(NVIDIA, 0x204B))
    image.bars(bar0, 0xC, bar1 >> 32, 0xC, bar3 >> 32, io_ports & 0xFFFF | 1)
    image.power_management(0x40, state=3 if asleep else 0)
    image.capability(0x48, MSI, struct.pack("<H20x", 0x0188)).express(0x60, registers)
    image.capability(0x9C, VENDOR_SPECIFIC, b"\x14" + bytes(17))
    image.capability(0xB0, MSI_X, struct.pack("<HII", 0x8008, 0x00B90000, 0x00BA0000))
    return with_gpu_extended(image, resizable)


def with_gpu_extended(image: PciImage, resizable: bool) -> PciImage:
    """Add the GPU's extended capabilities."""
    image.extended(0x100, VIRTUAL_CHANNEL, 1, struct.pack("<16xI4x", 0x800000FF))
    image.extended(0x250, LATENCY_TOLERANCE_REPORTING, 1)
    image.extended(0x420, ADVANCED_ERROR_REPORTING, 2, struct.pack("<III", 0, 0x00100000, 0x00462030))
    image.extended(0x900, SECONDARY_PCI_EXPRESS, 1)
    image.extended(0xBB0, RESIZABLE_BAR, 1, resizable_bars(17 if resizable else 8))
    image.extended(0xC1C, PHYSICAL_LAYER_16GT, 1).extended(0xC3C, PHYSICAL_LAYER_32GT, 1)
    image.extended(0xD00, LANE_MARGINING, 1)
    return image.extended(0xE00, DATA_LINK_FEATURE, 1, struct.pack("<II", 0x80000001, 0x80000001))


def resizable_bars(bar1_size: int) -> bytes:
    """Return the Resizable BAR registers of BARs 0, 1 and 3, sizes as powers of two of MiB."""
    bar_count = 3 << 5
    bars = ((0 | bar_count, 6, (6, 6)), (1, bar1_size, (6, 17)), (3, 5, (5, 5)))
    words = [
        word
        for control, size, supported in bars
        for word in (megabyte_sizes(*supported) << 4, control | size << 8)
    ]
    return struct.pack("<6I", *words)


def gpu_audio(index: int, device_control: int, link_status: int) -> PciImage:
    """Return the GPU's audio function: NVIDIA's vendor id, but no GPU."""
    registers = Express(
        ENDPOINT,
        device_capabilities=GPU_DEVICE_CAPABILITIES,
        device_control=device_control,
        link_capabilities=GPU_LINK_CAPABILITIES,
        link_status=link_status,
    )
    image = PciImage(NVIDIA, 0x22E8, 0x040300, header=0x80, subsystem=(NVIDIA, 0), command=6, interrupt_pin=2)
    image.bars(gpu_bars(index)[0] + 64 * MEBIBYTE)
    return image.power_management(0x40).capability(0x48, MSI).express(0x60, registers)


def bmc_bridge() -> PciImage:
    """Return the PCI Express to PCI bridge inside the BMC."""
    registers = Express(
        PCIE_TO_PCI_BRIDGE,
        device_capabilities=0x8000,
        device_control=0x2910,
        link_capabilities=0x0000DC12,
        link_status=0x1012,
    )
    image = PciImage(ASPEED, 0x1150, 0x060400, header=1, revision=6)
    return image.buses(0x21, 0x22, 0x22).power_management(0x78).express(0x80, registers)


def bmc_vga() -> PciImage:
    """Return the BMC's VGA function."""
    image = PciImage(ASPEED, 0x2000, VGA_CLASS, revision=0x52, subsystem=(ASPEED, 0x2000))
    return image.bars(0xB0000000, 0xB4000000).power_management(0x40).capability(0x50, MSI)


def endpoint(
    vendor: int,
    device: int,
    class_code: int,
    subsystem: tuple[int, int],
    express_offset: int,
    registers: Express,
    header: int = 0,
) -> PciImage:
    """Return an ordinary endpoint: power management, MSI, PCI Express, MSI-X, error reporting."""
    image = PciImage(
        vendor, device, class_code, revision=0, header=header, subsystem=subsystem, command=0x0406
    )
    image.bars(0xE0000004, 0x10).power_management(0x40).capability(0x50, MSI)
    image.express(express_offset, registers)
    image.capability(0xB0, MSI_X, struct.pack("<HII", 0x803F, 0x3000, 0x2000))
    return image.extended(0x100, ADVANCED_ERROR_REPORTING, 2)


def network_virtual_function() -> PciImage:
    """Return a virtual function: its ids read ffff, MaxPayload and MaxReadReq read 0."""
    registers = Express(
        ENDPOINT,
        device_capabilities=0x10008FE2,
        device_control=0,
        link_capabilities=0x0047F104,
        link_status=0,
        link_control=0,
    )
    image = PciImage(
        0xFFFF,
        0xFFFF,
        0x020000,
        revision=0,
        command=4,
        subsystem=(MELLANOX, 0x0016),
        interrupt_pin=0,
        interrupt_line=0,
    )
    image.express(0x60, registers)
    image.capability(0x9C, MSI_X, struct.pack("<HII", 0x800B, 0x2000, 0x3000))
    return image.extended(0x100, ALTERNATIVE_ROUTING_ID, 1)
