# SPDX-License-Identifier: GPL-3.0-or-later
"""Persistence mode: the NVIDIA driver keeps a GPU initialised while nobody uses it.

Source: nvidia-smi(1), --persistence-mode. nvidia-persistenced is the vendor's daemon for the same; where it
runs it sets the mode itself.
"""

from __future__ import annotations

import os
from typing import Optional

from .engine import Kind, Refused, not_applicable
from .journal import Entry
from .rows import FAILED, REJECTED, WOULD_CHANGE, Row, Value

ON, OFF = "on", "off"
_MODES = {"Enabled": ON, "Disabled": OFF}
_TIMEOUT_S = 60  # a GPU that is being initialised answers late; one that hangs never does


class GpuPersistence(Kind):
    """Persistence mode of every NVIDIA GPU, through nvidia-smi."""

    kind = "gpu_persistence"

    def __init__(
        self, mode: Optional[str] = None, sysfs_root: str = "/sys", nvidia_smi: Optional[str] = None
    ) -> None:
        """Take "on" or "off"; a recorded machine has no driver to ask unless ``nvidia_smi`` is given."""
        self.mode = mode
        self.sysfs_root = sysfs_root
        live = os.path.realpath(sysfs_root) == "/sys"
        self.tool = nvidia_smi or ("nvidia-smi" if live else None)
        self._modes: Optional[dict[str, str]] = None

    def capture(self) -> list[Row]:
        """Return a row per GPU, or one that says why there is none."""
        missing = self._missing()
        if missing:
            return [not_applicable(self.kind, "none", missing, desired=self.mode)]
        try:
            self._modes = self._query()
        except Refused as refused:
            row = Row(f"{self.kind}:all", self.kind, "all", desired=self.mode)
            return [row.with_status(refused.status, refused.reason)]
        if not self._modes:
            return [not_applicable(self.kind, "none", "no NVIDIA GPU: nvidia-smi lists none")]
        return [self._captured(address, mode) for address, mode in self._modes.items()]

    def _missing(self) -> Optional[str]:
        module = os.path.join(self.sysfs_root, "module/nvidia")
        if not os.path.isdir(module):
            return f"no NVIDIA driver: {module} is not there"
        if self.tool is None:
            return f"recorded machine: {self.sysfs_root} belongs to no running driver that could be asked"
        return None

    def _captured(self, address: str, mode: str) -> Row:
        row = self.recorded_row({"target": address})
        row.before, row.desired = mode, self.mode
        if self.mode in (None, mode):
            return row
        return row.with_status(WOULD_CHANGE, f"found {mode}")

    def _query(self) -> dict[str, str]:
        """Return {address: mode} of all GPUs in one call. Raises Refused."""
        said = self._run("--query-gpu=pci.bus_id,persistence_mode", "--format=csv,noheader")
        pairs = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
        return {_address(bus): _MODES.get(mode.strip(), mode.strip()) for bus, mode in pairs}

    def read(self, row: Row) -> Value:
        """Return "on" or "off"; all GPUs are asked once after the writes. Raises Refused."""
        if self._modes is None:
            self._modes = self._query()
        if row.target not in self._modes:
            raise Refused(FAILED, f"{row.target} vanished: nvidia-smi does not list it any more")
        return self._modes[row.target]

    def write(self, row: Row) -> None:
        """Set one GPU's mode. Raises Refused."""
        self._modes = None
        self._run("-i", row.target, "-pm", "1" if row.desired == ON else "0")

    def _run(self, *arguments: str) -> str:
        if self.tool is None:
            raise Refused(FAILED, "a recorded machine has no driver to ask")
        import subprocess  # most policies never get here, and a check's time is short

        try:
            done = subprocess.run(
                [self.tool, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Refused(FAILED, f"cannot run {self.tool}: {error}") from error
        if done.returncode:
            said = " ".join((done.stderr + done.stdout).split()) or f"exit status {done.returncode}"
            raise Refused(REJECTED, f"{self.tool} {' '.join(arguments)} failed: {said}")
        return done.stdout

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded GPU."""
        return Row(f"{self.kind}:{entry['target']}", self.kind, entry["target"])


def _address(bus: str) -> str:
    """Return the kernel's form of nvidia-smi's 00000000:01:00.0."""
    domain, _, rest = bus.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
