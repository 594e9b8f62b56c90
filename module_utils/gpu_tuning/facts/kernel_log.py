# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel has said about GPUs, links and the IOMMU since boot (/dev/kmsg)."""

from __future__ import annotations

import errno
import os
import re
from typing import Union

from .reader import Facts, Host, Unknown, failure

#: Topic -> lines that speak of it.
PATTERNS = {
    "xid": re.compile(r"NVRM: Xid \(PCI:(?P<device>[0-9a-f:.]+)\): (?P<code>\d+)"),
    "gpu_init_failed": re.compile(r"NVRM: .*(?:RmInitAdapter failed|fallen off the bus)"),
    "io_page_fault": re.compile(r"IO_PAGE_FAULT|DMAR: \[DMA (?:Read|Write)[^]]*\] .*fault"),
    "aer": re.compile(r"AER: .*(?:error|Error)"),
    "link_limited": re.compile(r"available PCIe bandwidth, limited by"),
    "link_flap": re.compile(r"pcieport .*(?:Link Down|Card not present|link is down)"),
    "bar_no_space": re.compile(r"BAR \d+.*(?:no space for|failed to assign)"),
    "acs_override": re.compile(r"PCIe ACS overrides enabled"),
    "machine_check": re.compile(r"\[Hardware Error\]|Machine check events logged"),
}
_PREFIX = re.compile(r"^\d+,\d+,\d+,[^;]*;")  # Documentation/ABI/testing/dev-kmsg
_MOST_BYTES = 1 << 24
_SAMPLES = 5


def collect(host: Host) -> Union[Facts, Unknown]:
    """Return {topic: {"count", "lines"}}; ``lines`` are the first few."""
    text = _read(os.path.join(host.dev, "kmsg"))
    return text if isinstance(text, Unknown) else summarise(text)


def summarise(text: str) -> Facts:
    """Sort the log's lines by topic."""
    facts: Facts = {}
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    for topic, pattern in PATTERNS.items():
        found = [line.strip() for line in lines if pattern.search(line)]
        facts[topic] = {"count": len(found), "lines": found[:_SAMPLES]}
    codes = {match.group("code") for line in lines for match in [PATTERNS["xid"].search(line)] if match}
    facts["xid"]["codes"] = sorted(int(code) for code in codes)
    return facts


def _read(path: str) -> Union[str, Unknown]:
    """Read the log to its present end: each read gives one record, none waits for the next."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return failure(path, error)
    try:
        return _records(handle).decode("utf-8", "replace")
    except OSError as error:
        return failure(path, error)
    finally:
        os.close(handle)


def _records(handle: int) -> bytes:
    parts, size = [], 0
    while size < _MOST_BYTES:
        try:
            record = os.read(handle, 1 << 16)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno == errno.EPIPE:
                continue  # this record was overwritten meanwhile; the next read gives the oldest left
            raise
        if not record:
            break
        parts.append(record)
        size += len(record)
    return b"".join(parts)
