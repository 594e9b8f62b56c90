# SPDX-License-Identifier: GPL-3.0-or-later
"""Character device numbers: which driver owns which major (/proc/devices)."""

from __future__ import annotations

import re
from typing import Union

from .reader import Facts, Host, Unknown, read_text


def collect(host: Host) -> Union[Facts, Unknown]:
    """Return {"nvidia-uvm": 511, ...}: the first major of each whole name."""
    text = read_text(host.proc("devices"))
    return text if isinstance(text, Unknown) else character_majors(text)


def character_majors(text: str) -> dict[str, int]:
    """Return {name: major} of the character section; the block section has names of its own."""
    majors: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("Block devices"):
            break
        match = re.match(r"\s*(\d+)\s+(\S.*?)\s*$", line)
        if match:
            majors.setdefault(match.group(2), int(match.group(1)))
    return majors
