# SPDX-License-Identifier: GPL-3.0-or-later
"""Active State Power Management of PCI Express: the kernel's policy, and the states of GPUs' links.

Sources: Documentation/admin-guide/kernel-parameters.txt (pcie_aspm); Documentation/ABI/testing/sysfs-bus-pci
(.../link/*_aspm, .../link/clkpm).
"""

from __future__ import annotations

import os
from typing import Optional

from .attributes import CHOICE, SWITCH, Attribute, Attributes
from .engine import not_applicable
from .gpu_health import addresses
from .rows import Row

STATES = ("l0s_aspm", "l1_aspm", "l1_1_aspm", "l1_2_aspm", "l1_1_pcipm", "l1_2_pcipm", "clkpm")


class LinkPowerManagement(Attributes):
    """The policy of all links, then every state that a GPU's link offers."""

    kind = "pcie_aspm"

    def __init__(
        self, policy: Optional[str] = None, gpu_links: Optional[str] = None, sysfs_root: str = "/sys"
    ) -> None:
        """Take the policy, and "on" or "off" for the states of GPUs' links; None leaves either alone."""
        super().__init__()
        self.policy, self.gpu_links = policy, gpu_links
        self.sysfs_root = sysfs_root
        self.parameter = os.path.join(sysfs_root, "module/pcie_aspm/parameters/policy")

    def attributes(self) -> list[Attribute]:
        """Return the policy first: writing it sets the links, which are then set on their own."""
        found = []
        if os.path.exists(self.parameter):
            found.append(Attribute("policy", self.parameter, CHOICE, self.policy))
        for address in addresses(self.sysfs_root):
            folder = os.path.join(self.sysfs_root, "bus/pci/devices", address, "link")
            found += [
                Attribute(f"{address}/{state}", f"{folder}/{state}", SWITCH, self.gpu_links)
                for state in STATES
                if os.path.exists(f"{folder}/{state}")
            ]
        return found

    def nothing(self) -> list[Row]:
        """Say that the kernel leaves links to the firmware."""
        reason = f"no ASPM control: {self.parameter} is not there and no GPU has link states"
        return [not_applicable(self.kind, "all", reason)]

    def capture(self) -> list[Row]:
        """Add a row where link states are wanted and no GPU offers any."""
        rows = super().capture()
        if self.gpu_links is None or any("/" in row.target or row.target == "all" for row in rows):
            return rows
        reason = "no link states: no GPU's link offers ASPM to the kernel, or the firmware keeps it"
        return [*rows, not_applicable(self.kind, "links", reason, desired=self.gpu_links)]
