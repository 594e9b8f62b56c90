# SPDX-License-Identifier: GPL-3.0-or-later
"""Draw a host's PCIe topology as SVG: sockets, NUMA nodes, ports, switches, GPUs, links, findings.

Nothing is told by colour alone: severities are words in boxes of different shape, a link that is slower
or narrower than it could be is dashed and says so.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any, Optional

from .evaluate import FINDING
from .rules import SEVERITIES

BOX_W, BOX_H, GAP_X, GAP_Y, PAD = 132, 46, 14, 46, 16
HEAD_H = 70  # the three lines of text at the top of a NUMA node
LETTER_W = 6.3  # of the small text, on average, in pixels
ROW_WIDTH = 1240  # NUMA nodes wrap beyond it
_ENDPOINTS = ("gpu", "nic")


class Device:
    """A box of the drawing with what hangs below it; ``kind`` is gpu, nic, port or switch."""

    def __init__(self, facts: dict[str, Any], kind: str) -> None:
        """Start without children."""
        self.facts, self.kind = facts, kind
        self.below: list[Device] = []

    @property
    def width(self) -> int:
        """Return how wide the box and all below it are."""
        return max(BOX_W, self.inner_width)

    @property
    def inner_width(self) -> int:
        """Return how wide all below the box is."""
        return sum(child.width for child in self.below) + GAP_X * max(0, len(self.below) - 1)

    @property
    def depth(self) -> int:
        """Return how many levels of boxes there are from here down."""
        return 1 + max((child.depth for child in self.below), default=0)


def topology(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the drawing as an SVG element, ready to stand in an HTML page."""
    marks = _marks(rows)
    nodes = _trees(facts)
    canvas = Canvas(marks)
    x, y, row_height = PAD, PAD + 24, 0
    for number, trees in nodes.items():
        width, height = _node_size(_node_lines(facts, number), trees)
        if x > PAD and x + width > ROW_WIDTH:
            x, y, row_height = PAD, y + row_height + GAP_Y, 0
        canvas.node(facts, number, trees, (x, y, width, height))
        x, row_height = x + width + GAP_X, max(row_height, height)
    return canvas.finish(_caption(facts))


def _marks(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return {target: severities} of the findings that are about one thing; notes mark nothing."""
    marks: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] == FINDING and row["target"] and row["severity"] != "info":
            marks.setdefault(row["target"], []).append(row["severity"])
    return marks


def _trees(facts: dict[str, Any]) -> dict[Optional[int], list[Device]]:
    """Return {NUMA node: trees of devices below it}; every node has its entry, empty ones too."""
    nodes: dict[Optional[int], list[Device]] = {node["id"]: [] for node in facts["numa"]["nodes"] or []}
    bridges = {bridge["address"]: bridge for bridge in facts["bridges"]}
    made: dict[str, Device] = {}
    for kind, devices in (("gpu", facts["gpus"]), ("nic", facts["nics"])):
        for facts_of in devices:
            device = Device(facts_of, kind)
            above = _above(facts_of["path"][:-1], bridges, made, nodes)
            (above.below if above else nodes.setdefault(facts_of["numa_node"], [])).append(device)
    return nodes


def _above(
    path: list[str],
    bridges: dict[str, Any],
    made: dict[str, Device],
    nodes: dict[Optional[int], list[Device]],
) -> Optional[Device]:
    """Return the box right above a device, making those of its path that are not there yet."""
    parent: Optional[Device] = None
    for address in path:
        if address not in bridges:
            continue
        if address not in made:
            made[address] = Device(bridges[address], "port")
            siblings = parent.below if parent else nodes.setdefault(bridges[address]["numa_node"], [])
            siblings.append(made[address])
        parent = made[address]
    return parent


def _node_size(texts: list[str], trees: list[Device]) -> tuple[int, int]:
    boxes = sum(tree.width for tree in trees) + GAP_X * max(0, len(trees) - 1)
    words = round(LETTER_W * max(len(text) for text in texts))
    depth = max((tree.depth for tree in trees), default=0)
    return max(boxes, words) + 2 * PAD, HEAD_H + depth * (BOX_H + GAP_Y) - (GAP_Y - PAD if depth else 0)


def _caption(facts: dict[str, Any]) -> str:
    pairs = ", ".join(f"{count} {name}" for name, count in facts["pair_counts"].items() if count)
    sockets = facts["cpu"]["sockets"]
    nodes = len(facts["numa"]["nodes"] or [])
    return (
        f"{'unknown' if sockets is None else sockets} socket(s), {nodes} NUMA node(s), "
        f"{facts['gpu_count']} GPU(s), {len(facts['nics'])} network function(s); GPU pairs: {pairs or 'none'}"
    )


class Canvas:
    """An SVG element that grows with what is drawn on it."""

    def __init__(self, marks: dict[str, list[str]]) -> None:
        """Take the severities to mark each address with."""
        self._svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
        self._marks = marks
        self._right = self._bottom = 0

    def finish(self, caption: str) -> str:
        """Return the whole as text; ``caption`` is what a screen reader says."""
        self._text(PAD, PAD + 4, caption, "caption")
        size = (self._right + PAD, self._bottom + PAD)
        self._svg.set("viewBox", f"0 0 {size[0]} {size[1]}")
        self._svg.set("width", str(size[0]))
        self._svg.set("height", str(size[1]))
        title = ElementTree.Element("title")
        title.text = "PCIe topology: " + caption
        self._svg.insert(0, title)
        return ElementTree.tostring(self._svg, encoding="unicode")

    def node(
        self,
        facts: dict[str, Any],
        number: Optional[int],
        trees: list[Device],
        place: tuple[int, int, int, int],
    ) -> None:
        """Draw one NUMA node with its trees."""
        x, y, width, height = place
        self._rect(x, y, width, height, "node")
        for line, text in enumerate(_node_lines(facts, number)):
            self._text(x + PAD, y + 18 + 16 * line, text, "small" if line else "head")
        left = x + PAD
        for tree in trees:
            self._tree(tree, left, y + HEAD_H)
            left += tree.width + GAP_X

    def _tree(self, device: Device, x: int, y: int) -> None:
        middle = x + device.width // 2
        left = (
            x
            + (device.width - sum(c.width for c in device.below) - GAP_X * max(0, len(device.below) - 1)) // 2
        )
        for child in device.below:
            self._link(device, child, (middle, y + BOX_H), (left + child.width // 2, y + BOX_H + GAP_Y))
            self._tree(child, left, y + BOX_H + GAP_Y)
            left += child.width + GAP_X
        self._box(device, middle - BOX_W // 2, y)

    def _box(self, device: Device, x: int, y: int) -> None:
        address = device.facts["address"]
        self._rect(x, y, BOX_W, BOX_H, device.kind, round_by=14 if device.kind == "nic" else 3)
        self._text(x + 8, y + 18, _label(device), "head")
        self._text(x + 8, y + 35, address, "small")
        self._badges(self._marks.get(address, []), x + BOX_W, y)

    def _badges(self, severities: list[str], right: int, y: int) -> None:
        """Mark a box with its worst severity and the number of findings."""
        if not severities:
            return
        worst = min(severities, key=SEVERITIES.index)
        text = worst if len(severities) == 1 else f"{worst} x{len(severities)}"
        width = 12 + 7 * len(text)
        self._rect(right - width + 6, y - 9, width, 18, f"badge {worst}", round_by=9 if worst == "P2" else 0)
        self._text(right - width // 2 + 6, y + 4, text, f"mark {worst}")

    def _link(self, above: Device, below: Device, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Draw the link below a port; inside a switch there is none, just a line."""
        inside = above.facts.get("port_type") == "upstream-port"
        width, reduced = above.facts["link_width"], _reduced(above.facts, below.facts)
        line = ElementTree.SubElement(self._svg, "line", {"class": "link reduced" if reduced else "link"})
        for name, value in zip(("x1", "y1", "x2", "y2"), (*start, *end)):
            line.set(name, str(value))
        line.set("stroke-width", "1" if inside or not width else str(1 + width // 4))
        if not inside:
            # Beside the line's lower end, on the side that it does not come from.
            left = end[0] < start[0]
            text = _link_text(below.facts, reduced)
            self._text(end[0] + (-8 if left else 8), end[1] - 10, text, "small end" if left else "small")

    def _rect(self, x: int, y: int, width: int, height: int, kind: str, round_by: int = 0) -> None:
        values = {"x": x, "y": y, "width": width, "height": height, "rx": round_by}
        ElementTree.SubElement(self._svg, "rect", {"class": kind, **{k: str(v) for k, v in values.items()}})
        self._right, self._bottom = max(self._right, x + width), max(self._bottom, y + height)

    def _text(self, x: int, y: int, text: str, kind: str) -> None:
        element = ElementTree.SubElement(self._svg, "text", {"x": str(x), "y": str(y), "class": kind})
        element.text = text
        if kind == "caption":
            self._right = max(self._right, x + 7 * len(text))


def _node_lines(facts: dict[str, Any], number: Optional[int]) -> list[str]:
    """Return what stands at the top of a NUMA node: its name, CPUs and memory, distances."""
    nodes = facts["numa"]["nodes"] or []
    place = next((i for i, node in enumerate(nodes) if node["id"] == number), None)
    if place is None:
        return [f"NUMA node not said ({number})"]
    node, per_socket = nodes[place], facts["numa"]["nodes_per_socket"] or 1
    size = node["memory_total_bytes"]
    memory = "memory unknown" if size is None else f"{round(size / (1 << 30))} GiB"
    return [
        f"socket {place // per_socket} - NUMA node {number}",
        f"CPUs {node['cpus']}; {memory}",
        f"distances {' '.join(map(str, node['distances']))}",
    ]


#: What is written in a bridge's box.
_PORTS = {"root-port": "root port", "upstream-port": "switch, up", "downstream-port": "switch, down"}


def _label(device: Device) -> str:
    if device.kind == "gpu":
        return f"GPU {device.facts['device'][2:]}"
    if device.kind == "nic":
        return "network"
    return _PORTS.get(device.facts["port_type"], device.facts["port_type"] or "bridge")


def _reduced(above: dict[str, Any], below: dict[str, Any]) -> bool:
    """Tell a link that is narrower than both ends; a low speed may be rest, so it does not count."""
    ends = [above["max_link_width"], below["max_link_width"]]
    width = below["link_width"]
    return None not in (*ends, width) and 0 < width < min(ends)


def _link_text(below: dict[str, Any], reduced: bool) -> str:
    width, speed = below["link_width"], below["link_speed_gts"]
    if width is None or speed is None:
        return "link unknown"
    most = f" of x{below['max_link_width']}" if reduced else ""
    return f"x{width}{most} {speed:g} GT/s"
