# SPDX-License-Identifier: GPL-3.0-or-later
"""Access Control Services of the bridges above GPUs: whether they send peer traffic up through the IOMMU.

Register layout: PCI Express Base 4.0, 7.7.8 (ACS Control, bits 2 and 3), the offsets of
linux/include/uapi/linux/pci_regs.h. Only these two bits are ever changed, in one 16-bit register.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from typing import Optional

from .engine import Kind, Refused, not_applicable, writable
from .gpu_health import addresses
from .journal import Entry
from .kernel_files import FORBIDDEN, error_text, read_bytes, read_line
from .rows import FAILED, NOT_APPLICABLE, READ_ONLY, REJECTED, WOULD_CHANGE, Row, Value

NONE = "none"
#: Bit and name; a redirected packet goes up to the root complex instead of straight to the peer.
REDIRECTS = {0x0004: "request_redirect", 0x0008: "completion_redirect"}
MASK = 0x000C

_ACS = 0x000D
_CONTROL = 6  # offset of ACS Control in the capability
_EXTENDED, _SIZE = 0x100, 0x1000
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")


def find_acs(config: bytes) -> Optional[int]:
    """Return the offset of ACS Control in a configuration space of 4096 bytes, None without ACS."""
    seen: set[int] = set()
    pointer = _EXTENDED
    while _EXTENDED <= pointer <= len(config) - 8 and pointer not in seen:
        seen.add(pointer)
        (header,) = struct.unpack_from("<I", config, pointer)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == _ACS:
            return pointer + _CONTROL
        pointer = header >> 20 & 0xFFC
    return None


def redirects(control: int) -> str:
    """Return the redirects that are on, "none" for neither."""
    return " ".join(name for bit, name in REDIRECTS.items() if control & bit) or NONE


def with_redirects(control: int, value: str) -> int:
    """Return ACS Control with exactly the named redirects on and every other bit as it was."""
    named = value.split()
    bits = sum(bit for bit, name in REDIRECTS.items() if name in named)
    return control & ~MASK | bits


class AccessControl(Kind):
    """The peer-to-peer redirects of every bridge above a GPU; restored exactly as they were found."""

    kind = "pcie_acs"

    def __init__(self, clear: bool = False, sysfs_root: str = "/sys") -> None:
        """``clear``: turn the redirects off; otherwise they are only looked at."""
        self.clear = clear
        self.sysfs_root = sysfs_root
        self.devices = os.path.join(sysfs_root, "bus/pci/devices")
        self.lockdown = os.path.join(sysfs_root, "kernel/security/lockdown")

    def capture(self) -> list[Row]:
        """Return a row per bridge, or one that says why there is none."""
        gpus = addresses(self.sysfs_root)
        if len(gpus) < 2:
            reason = f"fewer than two GPUs: {len(gpus)} found, so there is no peer traffic"
            return [not_applicable(self.kind, "none", reason)]
        bridges = dict.fromkeys(bridge for gpu in gpus for bridge in self._above(gpu))
        rows = [self._captured(bridge) for bridge in bridges]
        return rows or [not_applicable(self.kind, "none", "no bridge above any GPU: this sysfs is flat")]

    def _above(self, address: str) -> list[str]:
        """Return the bridges from the root port down to the one above a function, as sysfs nests them."""
        parts = os.path.realpath(os.path.join(self.devices, address)).split("/")
        return [part for part in parts[:-1] if _ADDRESS.match(part)]

    def _captured(self, address: str) -> Row:
        row = self.recorded_row({"target": address})
        row.desired = NONE if self.clear else None
        try:
            row.before = self.read(row)
        except Refused as refused:
            return row.with_status(refused.status, refused.reason)
        if row.desired in (None, row.before):
            return row
        return self._permitted(row)

    def _permitted(self, row: Row) -> Row:
        guests = self._passed_through(row.target)
        if guests:
            return row.with_status(
                REJECTED,
                f"unsafe: {', '.join(guests)} below this bridge belongs to vfio-pci, so a virtual machine "
                "relies on the isolation; leave ACS as it is on this host",
            )
        lockdown = read_line(self.lockdown)
        if lockdown and "[none]" not in lockdown:
            return row.with_status(
                READ_ONLY, f"kernel lockdown ({lockdown}) forbids writing PCI configuration space"
            )
        if not writable(self._config(row.target)):
            return row.with_status(
                READ_ONLY, f"not writable: {self._config(row.target)}; run as root on the host"
            )
        return row.with_status(WOULD_CHANGE, f"found {row.before}")

    def _passed_through(self, bridge: str) -> list[str]:
        """Return the functions below a bridge that vfio-pci holds."""
        top = os.path.realpath(os.path.join(self.devices, bridge))
        return sorted(address for address in _functions(top) if self._driver(address) == "vfio-pci")

    def _driver(self, address: str) -> str:
        return os.path.basename(os.path.realpath(os.path.join(self.devices, address, "driver")))

    def _config(self, address: str) -> str:
        return os.path.join(self.devices, address, "config")

    def _control(self, address: str) -> tuple[int, int]:
        """Return (offset, content) of ACS Control. Raises Refused with the reason."""
        path = self._config(address)
        try:
            config = read_bytes(path, _SIZE)
        except OSError as error:
            status = READ_ONLY if error.errno in FORBIDDEN else FAILED
            raise Refused(status, f"cannot read {path}: {error_text(error)}") from error
        if config[:4] == b"\xff" * 4:
            raise Refused(FAILED, f"{address} does not respond: its registers read all ff")
        if len(config) < _EXTENDED + 8:
            raise Refused(
                READ_ONLY, f"cannot read beyond {len(config)} bytes of {path}: run as root on the host"
            )
        offset = find_acs(config)
        if offset is None:
            raise Refused(NOT_APPLICABLE, f"no ACS capability: {address} redirects nothing")
        return offset, int(struct.unpack_from("<H", config, offset)[0])

    def read(self, row: Row) -> Value:
        """Return the redirects that are on. Raises Refused."""
        return redirects(self._control(row.target)[1])

    def write(self, row: Row) -> None:
        """Read ACS Control, change its two bits, write that one register. Raises OSError or Refused."""
        offset, control = self._control(row.target)
        register = struct.pack("<H", with_redirects(control, str(row.desired)))
        fd = os.open(self._config(row.target), os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.pwrite(fd, register, offset) != len(register):
                raise Refused(REJECTED, f"the kernel took no write to ACS Control of {row.target}")
        finally:
            os.close(fd)

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded bridge."""
        return Row(f"{self.kind}:{entry['target']}", self.kind, entry["target"])


def _functions(folder: str) -> Iterator[str]:
    """Yield the addresses of all functions below a bridge's directory."""
    with os.scandir(folder) as entries:
        for each in entries:
            if _ADDRESS.match(each.name) and each.is_dir(follow_symlinks=False):
                yield each.name
                yield from _functions(each.path)
