# SPDX-License-Identifier: GPL-3.0-or-later
"""What can differ between one recorded host and another."""

from __future__ import annotations

import dataclasses
from typing import Optional

#: What can be wrong with one GPU.
FAULTS = {
    "ff": "off the bus: every byte of its configuration space reads ff",
    "d3": "in D3hot",
    "x8": "link trained at half its width",
    "gen4": "link trained at 16 GT/s",
    "mps128": "MaxPayload 128",
    "mrrs128": "MaxReadReq 128",
    "mrrs4096": "MaxReadReq 4096",
    "read64": "only the first 64 bytes of its configuration space can be read",
}


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """One recorded host. The defaults are the host as it was found, before any tuning."""

    idle_links: bool = False
    resizable_bar: bool = True
    amd_pstate: Optional[str] = None  # "active", "passive" or "guided"; None: acpi-cpufreq drives
    governor: str = "performance"
    nodes_per_socket: int = 1
    c2_latency: int = 100  # exit latency, microseconds
    faults: dict[str, set[str]] = dataclasses.field(default_factory=dict)  # GPU address: kinds
    rdma: bool = False
    boot_id: Optional[str] = None
    cmdline: Optional[str] = None  # added to the kernel's command line
    offline_cpus: frozenset[int] = frozenset()
