# SPDX-License-Identifier: GPL-3.0-or-later
"""MaxReadReq of PCI Express functions: Device Control bits 14:12, through sysfs ``config`` files.

MaxPayload is read and reported, never written: both ends of a link must agree on it, and that is the
kernel's business. Setting MaxReadReq is volatile: a reboot, a driver reload or a reset undoes it.
"""

from __future__ import annotations

import os
import re
import struct

from .engine import Kind, Refused, not_applicable, writable
from .journal import Entry
from .kernel_files import FORBIDDEN, error_text, read_bytes, read_line
from .pci_config import (
    MAX_READ_REQUEST_SIZES,
    NO_PCIE_CAP,
    ConfigSpaceError,
    PcieCapability,
    parse_pcie,
    with_max_read_request,
)
from .rows import FAILED, NOT_APPLICABLE, READ_ONLY, REJECTED, WOULD_CHANGE, Row, Value
from .typed import NamedTuple, Optional

#: Enough for the capability list; the extended space is not needed and slower to read.
CONFIG_READ = 256

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])\Z")
_HEX_ID = re.compile(r"0x[0-9a-f]+\Z")


class Selector(NamedTuple):
    """Which functions: addresses, or all that match every given one of vendor, device, classes, driver.

    ``classes`` are prefixes of the 24-bit class code: 0x03 any display, 0x0300 VGA, 0x030000 with its
    programming interface.
    """

    addresses: tuple[str, ...] = ()
    vendor: Optional[str] = None
    device: Optional[str] = None
    classes: tuple[str, ...] = ()
    driver: Optional[str] = None

    def __str__(self) -> str:
        """Say what is looked for, for the row that says that nothing was found."""
        classes = " or ".join(self.classes)
        parts = {"vendor": self.vendor, "device": self.device, "class": classes, "driver": self.driver}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def selector(
    devices: Optional[list[str]] = None,
    vendor: Optional[str] = None,
    device: Optional[str] = None,
    classes: Optional[list[str]] = None,
    driver: Optional[str] = None,
) -> Selector:
    """Return a checked Selector. Raises ValueError with a sentence for the user."""
    if devices:
        return Selector(addresses=tuple(dict.fromkeys(_address(each) for each in devices)))
    return Selector(
        vendor=_hex_id("vendor", vendor, (4,)),
        device=_hex_id("device", device, (4,)),
        classes=tuple(str(_hex_id("class", each, (2, 4, 6))) for each in classes or ()),
        driver=driver,
    )


def _address(text: str) -> str:
    match = _ADDRESS.match(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a PCI address: write it like 0000:01:00.0")
    return f"{match.group(1) or '0000'}:{match.group(2)}"


def _hex_id(what: str, text: Optional[str], digits: tuple[int, ...]) -> Optional[str]:
    if text is None:
        return None
    if not _HEX_ID.match(text.lower()) or len(text) - 2 not in digits:
        wanted = " or ".join(str(n) for n in digits)
        raise ValueError(
            f"{what} {text!r} must be 0x and {wanted} hexadecimal digits, in quotes "
            "(YAML reads a bare 0x10de as 4318)"
        )
    return text.lower()


def checked_size(value: int) -> int:
    """Return a MaxReadReq size that has an encoding. Raises ValueError with the allowed ones."""
    if value not in MAX_READ_REQUEST_SIZES:
        allowed = ", ".join(map(str, MAX_READ_REQUEST_SIZES))
        raise ValueError(f"MaxReadReq cannot be {value} bytes: allowed are {allowed}")
    return value


class MaxReadRequests(Kind):
    """MaxReadReq of the selected functions below one sysfs, in bytes."""

    kind = "pcie_mrrs"

    def __init__(
        self,
        chosen: Selector,
        value: Optional[int] = None,
        allow_above_max_payload: bool = False,
        procfs_root: str = "/proc",
        sysfs_root: str = "/sys",
    ) -> None:
        """Take a checked selector and size; None as size only captures."""
        self.chosen, self.value = chosen, value
        self.allow_above_max_payload = allow_above_max_payload
        self.devices = os.path.join(sysfs_root, "bus/pci/devices")
        self.cmdline = os.path.join(procfs_root, "cmdline")
        self.lockdown = os.path.join(sysfs_root, "kernel/security/lockdown")

    def capture(self) -> list[Row]:
        """Return a row per selected function, or the one that says that there is none."""
        if self.chosen.addresses:
            return [self._captured(address) for address in self.chosen.addresses]
        present = self._present()
        rows = [self._captured(address) for address in present if self._selected(address)]
        if rows:
            return rows
        what = "NVIDIA GPU" if self.chosen.vendor == "0x10de" else "matching PCI device"
        reason = f"no {what}: none of {len(present)} PCI devices has {self.chosen}"
        return [not_applicable(self.kind, "none", reason, desired=self.value)]

    def _present(self) -> list[str]:
        try:
            return sorted(os.listdir(self.devices))
        except OSError:
            return []

    def _attribute(self, address: str, name: str) -> str:
        return os.path.join(self.devices, address, name)

    def _selected(self, address: str) -> bool:
        """Match ids from sysfs, which keeps them even when the device reads all ff; leave out VFs."""
        chosen = self.chosen
        # The class first: it rules out most functions with one read.
        return (
            (
                not chosen.classes
                or (read_line(self._attribute(address, "class")) or "").startswith(chosen.classes)
            )
            and (chosen.vendor is None or read_line(self._attribute(address, "vendor")) == chosen.vendor)
            and (chosen.device is None or read_line(self._attribute(address, "device")) == chosen.device)
            and (chosen.driver is None or self._driver(address) == chosen.driver)
            and not self._is_virtual_function(address)
        )

    def _driver(self, address: str) -> Optional[str]:
        try:
            return os.path.basename(os.readlink(self._attribute(address, "driver")))
        except OSError:
            return None

    def _is_virtual_function(self, address: str) -> bool:
        return os.path.lexists(self._attribute(address, "physfn"))

    def _captured(self, address: str) -> Row:
        row = Row(f"pcie_mrrs:{address}", self.kind, address, desired=self.value)
        if self._is_virtual_function(address):
            return row.with_status(
                NOT_APPLICABLE, "virtual function: its physical function's MaxReadReq counts"
            )
        try:
            pcie = self._pcie(address)
        except Refused as refused:
            return row.with_status(refused.status, refused.reason)
        if pcie.port_type == "pcie-to-pci-bridge":
            # Bit 15 of its Device Control is no reset but a setting, and what reads is the bus behind it.
            return row.with_status(NOT_APPLICABLE, "PCI bridge: MaxReadReq is set on the devices that read")
        row.before = pcie.max_read_request_size
        if self.value is None or self.value == row.before:
            row.reason = _state(pcie)
            return row
        return self._permitted(row, pcie)

    def _permitted(self, row: Row, pcie: PcieCapability) -> Row:
        """Decide whether a write may be tried at all."""
        assert self.value is not None
        if pcie.max_read_request_size not in MAX_READ_REQUEST_SIZES:
            code = pcie.device_control >> 12 & 7
            return row.with_status(
                FAILED,
                f"{row.target} has the reserved code {code} as its MaxReadReq, which could not be given "
                "back: left as it is; look for a firmware update",
            )
        if self.value > pcie.max_payload_size and not self.allow_above_max_payload and self._bus_perf():
            return row.with_status(
                REJECTED,
                "unsafe: the kernel runs with pci=pcie_bus_perf, where MaxReadReq must not exceed "
                f"the device's MaxPayload of {pcie.max_payload_size}; "
                "boot without it, or set allow_above_max_payload",
            )
        lockdown = read_line(self.lockdown)
        if lockdown and "[none]" not in lockdown:
            return row.with_status(
                READ_ONLY, f"kernel lockdown ({lockdown}) forbids writing PCI configuration space"
            )
        if not writable(self._attribute(row.target, "config")):
            return row.with_status(
                READ_ONLY, f"not writable: {self._attribute(row.target, 'config')}; run as root on the host"
            )
        return row.with_status(WOULD_CHANGE, f"found {row.before}, {_state(pcie)}")

    def _bus_perf(self) -> bool:
        """Tell whether the command line has pci=...,pcie_bus_perf,... (kernel-parameters.txt)."""
        options = [word[4:] for word in (read_line(self.cmdline) or "").split() if word.startswith("pci=")]
        return any("pcie_bus_perf" in option.split(",") for option in options)

    def _pcie(self, address: str) -> PcieCapability:
        """Return what a function's configuration space says. Raises Refused with the reason."""
        path = self._attribute(address, "config")
        try:
            return parse_pcie(read_bytes(path, CONFIG_READ))
        except ConfigSpaceError as error:
            status = NOT_APPLICABLE if error.outcome == NO_PCIE_CAP else FAILED
            raise Refused(status, f"{address}: {error}") from error
        except FileNotFoundError as error:
            raise Refused(FAILED, f"no such PCI device: {path} is not there") from error
        except OSError as error:
            status = READ_ONLY if error.errno in FORBIDDEN else FAILED
            raise Refused(status, f"cannot read {path}: {error_text(error)}") from error

    def read(self, row: Row) -> Value:
        """Return MaxReadReq in bytes. Raises Refused."""
        return self._pcie(row.target).max_read_request_size

    def write(self, row: Row) -> None:
        """Read Device Control, change bits 14:12, write that one register. Raises OSError or Refused."""
        if row.desired not in MAX_READ_REQUEST_SIZES:
            raise Refused(FAILED, f"MaxReadReq cannot be {row.desired}, as the journal has it")
        pcie = self._pcie(row.target)
        register = struct.pack("<H", with_max_read_request(pcie.device_control, int(row.desired)))
        fd = os.open(self._attribute(row.target, "config"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.pwrite(fd, register, pcie.device_control_offset) != len(register):
                raise Refused(REJECTED, f"the kernel took no write to Device Control of {row.target}")
        finally:
            os.close(fd)

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded function."""
        return Row(f"pcie_mrrs:{entry['target']}", self.kind, entry["target"])

    def restoring(self, entries: dict[str, Entry]) -> list[Row]:
        """Give back the recorded sizes: of all functions, or of the named addresses."""
        if self.chosen.addresses:
            entries = {i: e for i, e in entries.items() if e["target"] in self.chosen.addresses}
        return super().restoring(entries)


def _state(pcie: PcieCapability) -> str:
    """Report what is left alone: MaxPayload, and a power state other than D0."""
    asleep = f" (in {pcie.power_state})" if pcie.power_state not in (None, "D0") else ""
    return f"MaxPayload {pcie.max_payload_size} is left as it is{asleep}"
