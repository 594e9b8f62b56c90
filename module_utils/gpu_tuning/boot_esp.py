# SPDX-License-Identifier: GPL-3.0-or-later
"""EFI system partitions that are not mounted, as on a host of proxmox-boot-tool: looked at for a moment."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from . import bls
from .bls import BlsEntries, BlsEntry
from .boot_files import BootError, run

_BY_UUID = "/dev/disk/by-uuid"


@contextlib.contextmanager
def mounted(uuid: str, writable: bool = False) -> Iterator[str]:
    """Mount a partition in a private place, and never longer than the block takes.

    ``proxmox-boot-tool refresh`` mounts the same partition for writing, which fails while we hold it.
    Raises BootError.
    """
    device = os.path.join(_BY_UUID, uuid)
    if not os.path.exists(device):
        raise BootError(f"the ESP {device} is not there: a disk is missing, or its UUID is stale")
    with tempfile.TemporaryDirectory(prefix="gpu-tuning-esp-") as place:
        options = f"{'rw' if writable else 'ro'},nosuid,nodev,noexec"
        run(["mount", "-t", "vfat", "-o", options, device, place])
        try:
            yield place
        finally:
            run(["umount", place])


class HiddenEntries(BlsEntries):
    """The entries of every ESP that proxmox-boot-tool looks after."""

    def __init__(self, uuids: list[str]) -> None:
        """Take the file system UUIDs of the ESPs."""
        super().__init__([])
        self.uuids = uuids

    def found(self) -> list[BlsEntry]:
        """Return all ESPs' entries; they can be read, and only ``refresh`` writes them."""
        entries: list[BlsEntry] = []
        for uuid in self.uuids:
            with mounted(uuid) as esp:
                entries += bls.read(os.path.join(esp, "loader/entries"))
        return [entry for entry in entries if not bls.own(entry.path)]
