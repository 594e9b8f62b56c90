# SPDX-License-Identifier: GPL-3.0-or-later
"""What a check counts beside settings: which GPUs answer, their links' widths, their errors.

Sources: Documentation/ABI/testing/sysfs-bus-pci and sysfs-bus-pci-devices-aer_stats of the kernel.
"""

from __future__ import annotations

import os
import re

from .kernel_files import read_line
from .typed import NamedTuple, Optional

#: NVIDIA, AMD, Intel. A BMC's VGA has a display's class, too, and another vendor.
VENDORS = ("0x10de", "0x1002", "0x8086")
#: VGA, 3D and other display controllers, processing accelerators.
CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
SEVERITIES = ("correctable", "nonfatal", "fatal")

_TOTAL = re.compile(r"^TOTAL_ERR_\w+ (\d+)$", re.M)
_ALL_ONES = b"\xff" * 4


class Gpu(NamedTuple):
    """One GPU: its address, whether it answers, lanes now and at most, errors since boot by severity."""

    address: str
    answers: bool
    width: Optional[int]
    max_width: Optional[int]
    errors: dict[str, int]


def addresses(sysfs_root: str) -> list[str]:
    """Return the addresses of the GPUs; integrated ones of the CPU's vendor without a link are left out."""
    devices = os.path.join(sysfs_root, "bus/pci/devices")
    return [address for address in _names(devices) if _is_gpu(os.path.join(devices, address))]


def _is_gpu(folder: str) -> bool:
    # The class first: it rules out most functions with one read.
    return (
        (read_line(f"{folder}/class") or "").startswith(CLASSES)
        and read_line(f"{folder}/vendor") in VENDORS
        and os.path.exists(f"{folder}/max_link_width")
        and not os.path.lexists(f"{folder}/physfn")
    )


def look(sysfs_root: str) -> list[Gpu]:
    """Return what every GPU shows."""
    devices = os.path.join(sysfs_root, "bus/pci/devices")
    return [_looked_at(devices, address) for address in addresses(sysfs_root)]


def _looked_at(devices: str, address: str) -> Gpu:
    folder = os.path.join(devices, address)
    return Gpu(
        address,
        _answers(f"{folder}/config"),
        _number(f"{folder}/current_link_width"),
        _number(f"{folder}/max_link_width"),
        _errors(folder),
    )


def _answers(config: str) -> bool:
    try:
        with open(config, "rb", buffering=0) as stream:
            return stream.read(4) not in (b"", _ALL_ONES)
    except OSError:
        return False


def _number(path: str) -> Optional[int]:
    text = read_line(path) or ""
    return int(text) if text.isdigit() else None


def _errors(folder: str) -> dict[str, int]:
    """Return the kernel's totals; a kernel without AER statistics (before 4.19) has none."""
    found = {}
    for severity in SEVERITIES:
        match = _TOTAL.search(read_line(f"{folder}/aer_dev_{severity}") or "")
        if match:
            found[severity] = int(match.group(1))
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
