# SPDX-License-Identifier: GPL-3.0-or-later
"""What a PCIe link can carry as payload, by generation, width, payload size and direction.

A figure in GB/s is set against this ceiling, never against the round number of the link's marketing name.
Sources: PCI Express Base Specification (encoding, TLP framing); the overhead counts agree with the vendors'
application notes on link efficiency (5 to 7 DW per TLP).
"""

from __future__ import annotations

from typing import Optional

#: Framing 4 B + header 16 B (64 bit addresses) + LCRC 4 B of a posted write.
WRITE_OVERHEAD = 24
#: Framing 4 B + header 12 B + LCRC 4 B of a completion with data.
COMPLETION_OVERHEAD = 20
#: Share of the link that is left after skip ordered sets (16 B in about 370 blocks).
SKIP = 0.9973
#: Generation 6 sends 256 B units that carry 236 B of TLPs; framing and LCRC are the unit's, not the TLP's.
FLIT = 236 / 256
FLIT_FROM_GTS = 64.0

READ, WRITE = "read", "write"


def parse_speed(text: str) -> float:
    """Return GT/s of a sysfs link speed ("32.0 GT/s PCIe"); raises ValueError for "Unknown"."""
    number = text.split()[0] if text.split() else ""
    try:
        return float(number)
    except ValueError:
        raise ValueError(f"The link speed {text!r} is not a number of GT/s") from None


def link_gbps(gts: float, width: int) -> float:
    """Return the raw rate of a link in one direction in GB/s (1e9 bytes per second), after line encoding."""
    if gts <= 0 or width <= 0:
        raise ValueError(f"A link of {gts} GT/s and width {width} carries nothing")
    encoding = 1.0 if gts >= FLIT_FROM_GTS else 128 / 130 if gts >= 8 else 8 / 10
    return gts * width / 8 * encoding


def payload_ceiling_gbps(
    gts: float, width: int, max_payload: int, direction: str, completion: Optional[int] = None
) -> float:
    """Return the most payload a link carries in one direction, in GB/s.

    ``direction`` is seen from the device that moves the data: WRITE (posted writes: device to host, a peer
    push) is bounded by ``max_payload`` bytes; READ (host to device, a peer pull) by the size of a completion,
    which is ``max_payload`` at best and 64 or 128 bytes on platforms that split at the read boundary.
    """
    if max_payload not in (128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"MaxPayload {max_payload} is none that PCI Express has")
    payload = max_payload if direction == WRITE else min(completion or max_payload, max_payload)
    overhead = WRITE_OVERHEAD if direction == WRITE else COMPLETION_OVERHEAD
    if gts >= FLIT_FROM_GTS:
        return link_gbps(gts, width) * FLIT * payload / (payload + overhead - 8)
    return link_gbps(gts, width) * payload / (payload + overhead) * SKIP
