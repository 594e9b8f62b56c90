# SPDX-License-Identifier: GPL-3.0-or-later
"""Write PCI functions as sysfs shows them: directories, links, drivers and IOMMU groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

from host_topology import Topology, cpu_list, cpu_mask
from host_tree import WRITABLE, HostTree
from pci_image import PciImage

NVIDIA = 0x10DE
ASPEED = 0x1A03
VGA_CLASS = 0x030000

RESOURCE_COUNT = 13  # six BARs, the ROM and what a bridge or a physical function may have
EMPTY_RESOURCE = (0, 0, 0)
SUBSYSTEM_OF_BRIDGES = (0x1022, 0x1234)
LINK_SPEEDS = {
    1: "2.5 GT/s PCIe",
    2: "5.0 GT/s PCIe",
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
}
FIRST_IRQ = 40


@dataclasses.dataclass(frozen=True)
class PciFunction:
    """One function of a PCI device.

    ``parent`` is the directory of the bridge above it. Functions that name the same ``iommu_group``
    share one; None is a group of its own. ``ids`` replaces the ids in the image (a virtual function's
    read ffff), ``readable`` replaces what a read of its configuration space gives.
    """

    address: str
    image: PciImage
    parent: str
    numa_node: int
    driver: Optional[str] = None
    iommu_group: Optional[str] = None
    ids: Optional[tuple[int, int]] = None
    readable: Optional[bytes] = None
    resources: Sequence[tuple[int, int, int]] = ()
    attributes: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def directory(self) -> str:
        """Return the function's own directory."""
        return f"{self.parent}/{self.address}"

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Return vendor, device, subsystem vendor and subsystem device."""
        image = self.image
        vendor, device = self.ids or (image.vendor, image.device)
        subsystem = SUBSYSTEM_OF_BRIDGES if image.is_bridge else image.subsystem
        return (vendor, device, *subsystem)


class PciWriter:
    """Writes functions into a tree, bridges before what is below them."""

    def __init__(self, tree: HostTree, topology: Topology) -> None:
        """Start with no IOMMU group."""
        self._tree = tree
        self._topology = topology
        self._groups: dict[str, int] = {}

    def add(self, function: PciFunction) -> str:
        """Write one function and return its directory."""
        directory = function.directory
        self._write_config(function)
        self._write_identity(function)
        self._write_locality(function)
        self._write_resources(function)
        self._write_controls(function)
        self._write_link_state(function)
        self._tree.link(f"sys/bus/pci/devices/{function.address}", directory)
        self._tree.link(f"{directory}/subsystem", "sys/bus/pci")
        self._bind_driver(function)
        self._join_iommu_group(function)
        return directory

    def _write_config(self, function: PciFunction) -> None:
        content = bytes(function.image) if function.readable is None else function.readable
        self._tree.file(f"{function.directory}/config", content, WRITABLE)

    def _write_identity(self, function: PciFunction) -> None:
        vendor, device, subsystem_vendor, subsystem_device = function.identity
        class_code = function.image.class_code
        base, sub, interface = class_code >> 16, class_code >> 8 & 0xFF, class_code & 0xFF
        contents = {
            "vendor": f"{vendor:#06x}",
            "device": f"{device:#06x}",
            "class": f"{class_code:#08x}",
            "revision": f"{function.image.revision:#04x}",
            "subsystem_vendor": f"{subsystem_vendor:#06x}",
            "subsystem_device": f"{subsystem_device:#06x}",
            "modalias": f"pci:v{vendor:08X}d{device:08X}sv{subsystem_vendor:08X}sd{subsystem_device:08X}"
            f"bc{base:02X}sc{sub:02X}i{interface:02x}",
        }
        if class_code == VGA_CLASS:
            contents["boot_vga"] = str(int(vendor == ASPEED))
        self._tree.files(function.directory, contents)
        self._tree.file(f"{function.directory}/uevent", self._uevent(function), WRITABLE)

    @staticmethod
    def _uevent(function: PciFunction) -> str:
        vendor, device, subsystem_vendor, subsystem_device = function.identity
        lines = [f"DRIVER={function.driver}"] if function.driver else []
        lines += [
            f"PCI_CLASS={function.image.class_code:X}",
            f"PCI_ID={vendor:04X}:{device:04X}",
            f"PCI_SUBSYS_ID={subsystem_vendor:04X}:{subsystem_device:04X}",
            f"PCI_SLOT_NAME={function.address}",
        ]
        return "\n".join(lines)

    def _write_locality(self, function: PciFunction) -> None:
        cpus = self._topology.node_cpus(function.numa_node)
        contents = {"local_cpus": cpu_mask(cpus), "local_cpulist": cpu_list(cpus)}
        self._tree.files(function.directory, contents)
        self._tree.writable(function.directory, {"numa_node": function.numa_node})

    def _write_resources(self, function: PciFunction) -> None:
        missing = RESOURCE_COUNT - len(function.resources)
        resources = [*function.resources, *[EMPTY_RESOURCE] * missing]
        lines = [" ".join(f"{number:#018x}" for number in resource) for resource in resources]
        has_interrupt = function.image.express_registers is not None
        contents = {
            "resource": "\n".join(lines),
            "irq": FIRST_IRQ + len(self._groups) if has_interrupt else 0,
            "consistent_dma_mask_bits": 32,
            "dma_mask_bits": 47 if function.identity[0] == NVIDIA else 32,
        }
        self._tree.files(function.directory, contents)

    def _write_controls(self, function: PciFunction) -> None:
        is_gpu = function.identity[0] == NVIDIA and function.image.class_code == VGA_CLASS
        self._tree.files(function.directory, {"ari_enabled": 0, "power/runtime_status": "active"})
        contents = {
            "enable": 1 if function.driver else 0,
            "d3cold_allowed": 1,
            "broken_parity_status": 0,
            "msi_bus": 1,
            "power/control": "on",
            "reset_method": "flr bus" if is_gpu else "pm",
            **function.attributes,
        }
        self._tree.writable(function.directory, contents)

    def _write_link_state(self, function: PciFunction) -> None:
        registers = function.image.express_registers
        if registers is None:
            return
        capable, trained = registers.link_capabilities, registers.link_status
        contents = {
            "max_link_speed": LINK_SPEEDS[capable & 0xF],
            "max_link_width": capable >> 4 & 0x3F,
            "current_link_speed": LINK_SPEEDS.get(trained & 0xF, "Unknown"),
            "current_link_width": trained >> 4 & 0x3F,
        }
        self._tree.files(function.directory, contents)

    def _bind_driver(self, function: PciFunction) -> None:
        if function.driver:
            driver = f"sys/bus/pci/drivers/{function.driver}"
            self._tree.link(f"{function.directory}/driver", driver)
            self._tree.link(f"{driver}/{function.address}", function.directory)

    def _join_iommu_group(self, function: PciFunction) -> None:
        name = function.iommu_group or function.address
        is_new = name not in self._groups
        number = self._groups.setdefault(name, len(self._groups))
        group = f"sys/kernel/iommu_groups/{number}"
        if is_new:
            self._tree.file(f"{group}/type", "DMA-FQ", WRITABLE)
            self._tree.file(
                f"{group}/reserved_regions",
                "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved",
            )
        self._tree.link(f"{function.directory}/iommu_group", group)
        self._tree.link(f"{group}/devices/{function.address}", function.directory)
