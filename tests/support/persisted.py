# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded host that is persisted, rebooted and looked at without Ansible."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from gpu_tuning import persist, tuner

from support.tree import make_recorded_host

#: One section of each kind that persists in its own way, as a module would have validated them.
SYSCTLS = [
    {"name": "vm.swappiness", "value": "10", "match": "exact"},
    {"name": "net.core.rmem_max", "value": "16777216", "match": "minimum"},
]
MRRS = {"value": 4096, "vendor": "0x10de", "class": ["0x0300", "0x0302"]}


def section(name: str, **given: Any) -> dict[str, Any]:
    """Return a section's arguments with every option that was not given at its default."""
    spec = tuner.SECTIONS[name].arguments
    return {option: given.get(option, about.get("default")) for option, about in spec.items()}


def policy(**changed: Any) -> dict[str, dict[str, Any]]:
    """Return a policy of four sections; None drops one."""
    sections = {
        "sysctl_snapshot": section("sysctl_snapshot", settings=SYSCTLS),
        "pcie_maxreadreq": section("pcie_maxreadreq", **MRRS),
        "cpuidle_state": section("cpuidle_state", max_exit_latency_us=2),
        "kernel_module": section("kernel_module", modules=[{"name": "nvidia_peermem", "requires": []}]),
    }
    sections.update(changed)
    return {name: each for name, each in sections.items() if each is not None}


@dataclasses.dataclass
class PersistedHost:
    """A recorded host in a directory and what is done to it."""

    root: Path

    def options(self, state: str) -> dict[str, Any]:
        """Return the module's options."""
        return {
            "state": state,
            "check_minutes": 5,
            "textfile": None,
            "python": sys.executable,
            "procfs_root": str(self.root / "proc"),
            "sysfs_root": str(self.root / "sys"),
            "state_root": str(self.root / "state"),
            "across_boot": False,
        }

    def run(
        self, state: str, sections: Optional[dict[str, Any]] = None, check: bool = False
    ) -> dict[str, Any]:
        """Run the module's logic."""
        wanted = policy() if sections is None else sections
        return persist.run(wanted, self.options(state), check)

    def rows(self, state: str, sections: Optional[dict[str, Any]] = None) -> dict[str, dict[str, Any]]:
        """Run the module's logic and return its rows by id."""
        return {row["id"]: row for row in self.run(state, sections)["rows"]}

    def agent(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed archive."""
        archive = self.root / "usr/local/lib/gpu-tuning/gpu-tuning.pyz"
        command = [str(archive), "--policy", str(self.root / "etc/gpu-tuning/policy.json"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")

    def write(self, path: str, text: str) -> Path:
        """Give the host a file."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def read(self, path: str) -> str:
        """Return a file's text."""
        return (self.root / path).read_text()

    def sysctl(self, name: str) -> str:
        """Return a sysctl's value."""
        return self.read(f"proc/sys/{name.replace('.', '/')}").strip()

    def max_read_request(self, address: str) -> int:
        """Return MaxReadReq of a recorded GPU, whose Device Control is at 0x68."""
        control = (self.root / f"sys/bus/pci/devices/{address}/config").read_bytes()[0x68:0x6A]
        return 128 << (int.from_bytes(control, "little") >> 12 & 7)

    def reboot(self) -> None:
        """Bring back what firmware and kernel set; files stay."""
        for tree in ("sys", "proc"):
            shutil.rmtree(self.root / tree)
        fresh = self.root / "fresh"
        make_recorded_host(fresh)
        for tree in ("sys", "proc"):
            (fresh / tree).rename(self.root / tree)
        shutil.rmtree(fresh)
