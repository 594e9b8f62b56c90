# SPDX-License-Identifier: GPL-3.0-or-later
"""The PCI devices of the recorded host: eight GPUs, and what must not be mistaken for one."""

from __future__ import annotations

from typing import Optional

import host_images as images
from host_options import HostOptions
from host_pci import PciFunction, PciWriter
from host_topology import GPU_BUSES, ROOT_BUSES, Topology
from host_tree import HostTree
from pci_image import ENDPOINT, Express, PciImage

BMC_ROOT_BUS = "20"  # the BMC and the NVMe drives
NETWORK_ROOT_BUS = "c0"
SILENCE = b"\xff" * 4096  # what the bus gives for a device that does not answer
LINK_UP = 0x6000  # a port's Data Link Layer Link Active and Link Bandwidth Management Status


class Devices:
    """Writes every PCI device of the host into a tree."""

    def __init__(self, tree: HostTree, topology: Topology, options: HostOptions) -> None:
        """Keep what the devices depend on."""
        self._tree = tree
        self._topology = topology
        self._options = options
        self._pci = PciWriter(tree, topology)

    def write(self) -> None:
        """Write the root buses in order, each with what hangs below it."""
        for root in ROOT_BUSES:
            self._add_root_complex(root)
            bus = f"{int(root, 16) + 1:02x}"
            if bus in GPU_BUSES:
                self._add_gpu(root, bus)
            if root == BMC_ROOT_BUS:
                self._add_bmc()
                self._add_nvme("0000:20:03.1", 0x25)
                self._add_nvme("0000:20:03.2", 0x26)
            if root == NETWORK_ROOT_BUS:
                self._add_network_card()
        for number in range(len(ROOT_BUSES)):
            self._tree.directory(f"sys/class/iommu/ivhd{number}/devices")
        policy = "[default] performance powersave powersupersave "
        self._tree.writable("sys/module/pcie_aspm/parameters", {"policy": policy})

    def _add_root_complex(self, root: str) -> None:
        for slot, device, class_code in (
            ("00.0", 0x153A, 0x060000),
            ("00.2", 0x153B, 0x080600),
            ("01.0", 0x153D, 0x060000),
        ):
            image = images.root_complex_function(device, class_code, has_capabilities=slot != "01.0")
            self._pci.add(PciFunction(f"0000:{root}:{slot}", image, root_of(root), self._node(root)))

    def _add_root_port(self, address: str, image: PciImage) -> str:
        root = address.split(":")[1]
        return self._pci.add(PciFunction(address, image, root_of(root), self._node(root), "pcieport"))

    def _add_gpu(self, root: str, bus: str) -> None:
        """Add a root port, the GPU below it, and the GPU's audio function."""
        faults = self._options.faults.get(f"0000:{bus}:00.0", set())
        link_status = images.gpu_link_status(faults, self._options.idle_links)
        numbers = int(root, 16), int(bus, 16), int(bus, 16)
        port_image = images.root_port(*numbers, link_status=link_status | LINK_UP)
        port = self._add_root_port(f"0000:{root}:01.1", port_image)
        self._add_gpu_function(bus, port, self._node(root), faults)
        self._add_gpu_audio(bus, port, self._node(root), faults)

    def _add_gpu_function(self, bus: str, port: str, node: int, faults: set[str]) -> None:
        index, resizable = GPU_BUSES.index(bus), self._options.resizable_bar
        control = images.gpu_device_control(faults)
        link_status = images.gpu_link_status(faults, self._options.idle_links)
        image = images.gpu(index, control, link_status, "d3" in faults, resizable)
        function = PciFunction(
            f"0000:{bus}:00.0",
            image,
            port,
            node,
            driver="nvidia",
            iommu_group=f"gpu{bus}",
            readable=readable_part(image, faults),
            resources=images.gpu_resources(index, resizable),
            attributes={"resource1_resize": f"{images.megabyte_sizes(6, 17):016x}"},
        )
        self._pci.add(function)

    def _add_gpu_audio(self, bus: str, port: str, node: int, faults: set[str]) -> None:
        control = images.gpu_device_control(faults)
        link_status = images.gpu_link_status(faults, self._options.idle_links)
        function = PciFunction(
            f"0000:{bus}:00.1",
            images.gpu_audio(GPU_BUSES.index(bus), control, link_status),
            port,
            node,
            driver="snd_hda_intel",
            iommu_group=f"gpu{bus}",
            readable=SILENCE if "ff" in faults else None,
        )
        self._pci.add(function)

    def _add_bmc(self) -> None:
        """Add the BMC's VGA: class 0x030000 like a GPU, on conventional PCI, without PCI Express."""
        node = self._node(BMC_ROOT_BUS)
        port = self._add_root_port(
            "0000:20:01.1",
            images.root_port(0x20, 0x21, 0x22, link_status=0x7012, link_capabilities=0x00737812),
        )
        bridge = self._pci.add(
            PciFunction("0000:21:00.0", images.bmc_bridge(), port, node, iommu_group="bmc")
        )
        self._pci.add(PciFunction("0000:22:00.0", images.bmc_vga(), bridge, node, "ast", iommu_group="bmc"))

    def _add_nvme(self, port_address: str, bus: int) -> None:
        port = self._add_root_port(
            port_address, images.root_port(0x20, bus, bus, link_status=0x7044, link_capabilities=0x00737845)
        )
        registers = Express(
            ENDPOINT,
            device_capabilities=0x10008FE1,
            device_control=images.DEVICE_CONTROL,
            link_capabilities=0x00437044,
            link_status=0x1044,
            link_capabilities_2=0x1E,
            link_control_2=4,
        )
        image = images.endpoint(images.SAMSUNG, 0xA80A, 0x010802, (images.SAMSUNG, 0xA813), 0x70, registers)
        self._pci.add(PciFunction(f"0000:{bus:02x}:00.0", image, port, self._node(BMC_ROOT_BUS), "nvme"))

    def _add_network_card(self) -> None:
        """Add a two-port ConnectX-6 Dx with two virtual functions on its first port."""
        port = self._add_root_port("0000:c0:01.1", images.root_port(0xC0, 0xC1, 0xC1, link_status=0x7104))
        physical = self._add_network_port(port, 0, virtual_functions=2)
        self._add_network_port(port, 1, virtual_functions=0)
        for index in (0, 1):
            self._add_virtual_function(port, physical, index)
        if self._options.rdma:
            self._add_rdma_device(physical)

    def _add_virtual_function(self, port: str, physical: str, index: int) -> None:
        function = PciFunction(
            f"0000:c1:00.{index + 2}",
            images.network_virtual_function(),
            port,
            self._node(NETWORK_ROOT_BUS),
            "mlx5_core",
            ids=(images.MELLANOX, 0x101E),
        )
        virtual = self._pci.add(function)
        self._tree.link(f"{virtual}/physfn", physical)
        self._tree.link(f"{physical}/virtfn{index}", virtual)

    def _add_network_port(self, port: str, index: int, virtual_functions: int) -> str:
        registers = Express(
            ENDPOINT,
            device_capabilities=0x11E08FE2,
            device_control=images.DEVICE_CONTROL,
            link_capabilities=0x0047F104,
            link_status=0x1104,
            link_capabilities_2=0x1E,
            link_control_2=4,
        )
        image = images.endpoint(
            images.MELLANOX, 0x101D, 0x020000, (images.MELLANOX, 0x0016), 0x60, registers, header=0x80
        )
        return self._pci.add(
            PciFunction(
                f"0000:c1:00.{index}",
                image,
                port,
                self._node(NETWORK_ROOT_BUS),
                "mlx5_core",
                attributes={"sriov_totalvfs": 8, "sriov_numvfs": virtual_functions},
            )
        )

    def _add_rdma_device(self, physical: str) -> None:
        directory = f"{physical}/infiniband/mlx5_0"
        self._tree.file(f"{directory}/node_type", "1: CA")
        self._tree.link(f"{directory}/device", physical)
        self._tree.link("sys/class/infiniband/mlx5_0", directory)

    def _node(self, root: str) -> int:
        return self._topology.node_of_root_bus(root)


def root_of(bus: str) -> str:
    """Return the directory of a root bus."""
    return f"sys/devices/pci0000:{bus}"


def readable_part(image: PciImage, faults: set[str]) -> Optional[bytes]:
    """Return what a read of a faulty GPU's configuration space gives, None when it is all there."""
    if "ff" in faults:
        return SILENCE
    return bytes(image)[:64] if "read64" in faults else None
