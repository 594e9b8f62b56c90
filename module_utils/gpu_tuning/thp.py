# SPDX-License-Identifier: GPL-3.0-or-later
"""Transparent huge pages. Source: Documentation/admin-guide/mm/transhuge.rst of the kernel."""

from __future__ import annotations

import os
from typing import Optional

from .attributes import CHOICE, Attribute, Attributes
from .engine import not_applicable
from .rows import Row


class TransparentHugePages(Attributes):
    """When huge pages are given (``enabled``) and how hard the kernel tries (``defrag``)."""

    kind = "thp"

    def __init__(
        self, enabled: Optional[str] = None, defrag: Optional[str] = None, sysfs_root: str = "/sys"
    ) -> None:
        """Take what is wanted; None leaves it alone."""
        super().__init__()
        self.wanted = {"enabled": enabled, "defrag": defrag}
        self.folder = os.path.join(sysfs_root, "kernel/mm/transparent_hugepage")

    def attributes(self) -> list[Attribute]:
        """Return both files."""
        if not os.path.isdir(self.folder):
            return []
        return [
            Attribute(name, os.path.join(self.folder, name), CHOICE, value)
            for name, value in self.wanted.items()
        ]

    def nothing(self) -> list[Row]:
        """Say that the kernel has none."""
        return [not_applicable(self.kind, "all", f"no transparent huge pages: {self.folder} is not there")]
