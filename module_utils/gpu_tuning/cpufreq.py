# SPDX-License-Identifier: GPL-3.0-or-later
"""Frequency governors and boost, of every cpufreq policy.

Sources: Documentation/admin-guide/pm/cpufreq.rst, amd-pstate.rst and intel_pstate.rst of the kernel.
"""

from __future__ import annotations

import os
import re
from typing import Optional

from .attributes import INVERTED_SWITCH, SWITCH, WORD, Attribute, Attributes
from .engine import not_applicable
from .kernel_files import read_line
from .rows import Row


class CpuFrequencies(Attributes):
    """The governor of every policy, and boost: one switch, or one per policy, as the driver has it."""

    kind = "cpufreq"

    def __init__(
        self, governor: Optional[str] = None, boost: Optional[str] = None, sysfs_root: str = "/sys"
    ) -> None:
        """Take what is wanted; None leaves it alone."""
        super().__init__()
        self.governor, self.boost = governor, boost
        self.cpus = os.path.join(sysfs_root, "devices/system/cpu")

    def attributes(self) -> list[Attribute]:
        """Return the governors, then boost."""
        policies = self._policies()
        return [*(self._governor(name) for name in policies), *self._boost(policies)]

    def _policies(self) -> list[str]:
        try:
            names = os.listdir(os.path.join(self.cpus, "cpufreq"))
        except OSError:
            return []
        return sorted((n for n in names if re.match(r"policy\d+\Z", n)), key=lambda name: int(name[6:]))

    def _governor(self, policy: str) -> Attribute:
        folder = os.path.join(self.cpus, "cpufreq", policy)
        offered = (read_line(f"{folder}/scaling_available_governors") or "").split()
        return Attribute(
            f"{policy}/governor", f"{folder}/scaling_governor", WORD, self.governor, tuple(offered)
        )

    def _boost(self, policies: list[str]) -> list[Attribute]:
        common = os.path.join(self.cpus, "cpufreq/boost")
        turbo = os.path.join(self.cpus, "intel_pstate/no_turbo")
        if os.path.exists(common):
            return [Attribute("all/boost", common, SWITCH, self.boost)]
        if os.path.exists(turbo):
            return [Attribute("all/boost", turbo, INVERTED_SWITCH, self.boost)]
        single = ((name, os.path.join(self.cpus, "cpufreq", name, "boost")) for name in policies)
        return [
            Attribute(f"{n}/boost", path, SWITCH, self.boost) for n, path in single if os.path.exists(path)
        ]

    def nothing(self) -> list[Row]:
        """Say that no driver sets frequencies."""
        reason = f"no cpufreq driver: {self.cpus}/cpufreq has no policy; the firmware or hypervisor decides"
        return [not_applicable(self.kind, "all", reason)]

    def capture(self) -> list[Row]:
        """Add a row where boost is wanted and no switch is there."""
        rows = super().capture()
        if self.boost is None or any(row.target.endswith("/boost") or row.target == "all" for row in rows):
            return rows
        reason = "no boost switch: the driver or the firmware does not offer one"
        return [*rows, not_applicable(self.kind, "all/boost", reason, desired=self.boost)]
