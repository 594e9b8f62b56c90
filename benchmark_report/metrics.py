# SPDX-License-Identifier: GPL-3.0-or-later
"""From a measurement to metrics: one number per run, in groups, with the ceiling it is set against."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any, Callable, Optional

from gpu_tuning.benchmark import pcie

SAME, CROSS, ALL = "same NUMA node", "cross node", "all pairs"
#: What a link's MaxPayload is taken for when config space was not readable: the size GPUs of today report.
ASSUMED_MAX_PAYLOAD = 256


@dataclasses.dataclass
class Metric:
    """One figure of a measurement. ``samples`` has one value per run: the unit of replication.

    ``family`` is what explanations speak of (push, pull, h2d, d2h, staged, latency, throughput, ttft, tpot);
    ``floor`` the smallest relative effect worth a verdict; ``ceiling`` the physical limit in the same unit;
    ``headline`` metrics share the correction for multiple tests, the others get no verdict of their own.
    """

    id: str
    section: str
    family: str
    label: str
    unit: str
    higher_is_better: bool
    floor: float
    headline: bool
    samples: list[float]
    ceiling: Optional[float] = None
    ceiling_note: str = ""
    level: Optional[int] = None

    @property
    def median(self) -> float:
        """The middle of the runs."""
        return statistics.median(self.samples)

    @property
    def share_of_ceiling(self) -> Optional[float]:
        """The median as a share of the ceiling (0..1)."""
        return self.median / self.ceiling if self.ceiling else None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, the derived figures included."""
        derived = {"median": self.median, "share_of_ceiling": self.share_of_ceiling}
        return {**dataclasses.asdict(self), **derived}


@dataclasses.dataclass(frozen=True)
class _Group:
    """A family of cells that is reported as one figure per run."""

    id: str
    family: str
    label: str
    headline: bool
    match: Callable[[dict[str, Any], dict[str, Any]], bool]
    unit: str = "GB/s"
    direction: str = pcie.WRITE
    ways: int = 1


def _placed(kind: str, place: str, direction: Optional[str] = None, peer: bool = True) -> Callable[..., bool]:
    def match(cell: dict[str, Any], run: dict[str, Any]) -> bool:
        wanted = cell["kind"] == kind and bool(cell.get("peer", True)) == peer
        return (
            wanted and cell.get("direction", direction) in (direction, None) and place_of(cell, run) == place
        )

    return match


def _host(kind: str, local: bool) -> Callable[..., bool]:
    def match(cell: dict[str, Any], run: dict[str, Any]) -> bool:
        if cell["kind"] != kind:
            return False
        gpu = cell["target"] if kind == "h2d" else cell["source"]
        own = _node(run, gpu)
        return (cell.get("node") is None or own is None or own == cell["node"]) == local

    return match


def _latency(size: int, peer: bool) -> Callable[..., bool]:
    return lambda cell, run: (
        cell["kind"] == "latency" and cell.get("bytes", size) == size and bool(cell.get("peer", True)) == peer
    )


def _groups() -> list[_Group]:
    groups = []
    for place in (SAME, CROSS, ALL):
        name = place.split()[0]
        groups += [
            _Group(f"push.{name}", "push", f"P2P push, {place}", True, _placed("d2d", place, "push")),
            _Group(
                f"pull.{name}",
                "pull",
                f"P2P pull, {place}",
                False,
                _placed("d2d", place, "pull"),
                direction=pcie.READ,
            ),
            _Group(
                f"both.{name}", "push", f"P2P both ways, {place}", False, _placed("d2d_both", place), ways=2
            ),
            _Group(
                f"staged.{name}",
                "staged",
                f"peer access off, {place}",
                False,
                _placed("d2d", place, "push", False),
            ),
        ]
    for local, words in ((True, "own node"), (False, "other node")):
        name = "own" if local else "other"
        groups += [
            _Group(
                f"h2d.{name}", "h2d", f"H2D pinned, {words}", local, _host("h2d", local), direction=pcie.READ
            ),
            _Group(f"d2h.{name}", "d2h", f"D2H pinned, {words}", local, _host("d2h", local)),
        ]
    for size in (16, 12288):
        for peer in (True, False):
            label = f"{size} B copy, peer access {'on' if peer else 'off'}"
            match = _latency(size, peer)
            groups.append(
                _Group(f"latency.{size}.{'on' if peer else 'off'}", "latency", label, False, match, "us")
            )
    return groups


def _node(run: dict[str, Any], gpu: Optional[int]) -> Optional[int]:
    devices = run.get("devices") or []
    known = gpu is not None and gpu < len(devices)
    return devices[gpu].get("numa_node") if known and gpu is not None else None


def place_of(cell: dict[str, Any], run: dict[str, Any]) -> str:
    """Tell whether a pair is on one NUMA node, across two, or not known (``ALL``)."""
    one, other = _node(run, cell["source"]), _node(run, cell["target"])
    if one is None or other is None:
        return ALL
    return SAME if one == other else CROSS


def ceiling_of(cell: dict[str, Any], run: dict[str, Any], direction: str) -> tuple[Optional[float], str]:
    """Return (payload ceiling in GB/s, note) of the slower link that a copy uses; (None, why) if unknown."""
    ends = [gpu for gpu in (cell.get("source"), cell.get("target")) if gpu is not None]
    ceilings, assumed = [], False
    for gpu in ends:
        device = (run.get("devices") or [{}] * (gpu + 1))[gpu]
        link = cell.get("link_under_load") or device.get("link") or {}
        if not link.get("speed") or not link.get("width"):
            return None, "the link's speed and width are not known"
        payload = device.get("max_payload_size")
        assumed = assumed or payload is None
        try:
            gts = pcie.parse_speed(link["speed"])
            size = payload or ASSUMED_MAX_PAYLOAD
            ceilings.append(pcie.payload_ceiling_gbps(gts, link["width"], size, direction))
        except ValueError as error:
            return None, str(error)
    note = f"MaxPayload {ASSUMED_MAX_PAYLOAD} assumed: config space was not readable" if assumed else ""
    return (min(ceilings), note) if ceilings else (None, "no link")


def _figure(cell: dict[str, Any]) -> float:
    return float(cell["median_us"] if "median_us" in cell else cell["median_gbps"])


def _fabric(measurement: dict[str, Any]) -> Iterable[Metric]:
    runs = [run for run in measurement["runs"] if run["status"] == "complete"]
    for group in _groups():
        samples, ceilings, notes = [], [], set()
        for run in runs:
            cells = [cell for cell in run["measurements"] if group.match(cell, run)]
            if not cells:
                continue
            samples.append(statistics.median(_figure(cell) for cell in cells))
            for cell in cells if group.unit == "GB/s" else []:
                ceiling, note = ceiling_of(cell, run, group.direction)
                ceilings += [ceiling * group.ways] if ceiling else []
                notes |= {note} if note else set()
        if samples:
            is_rate = group.unit == "GB/s"
            ceiling = statistics.median(ceilings) if ceilings and group.family != "staged" else None
            yield Metric(
                f"fabric.{group.id}", "fabric", group.family, group.label, group.unit, is_rate,
                0.01 if is_rate else 0.1, group.headline, samples, ceiling, "; ".join(sorted(notes)),
            )  # fmt: skip


#: field path -> (id, family, label, unit, higher is better, floor, headline)
_INFERENCE: list[tuple[tuple[str, ...], str, str, str, str, bool, float, bool]] = [
    (("output_tokens_per_s",), "throughput", "throughput", "output tokens/s", "tok/s", True, 0.03, True),
    (("ttft_ms", "median"), "ttft", "ttft", "TTFT median", "ms", False, 0.05, True),
    (("ttft_ms", "p99"), "ttft_p99", "ttft", "TTFT p99", "ms", False, 0.10, False),
    (("tpot_ms", "median"), "tpot", "tpot", "TPOT median", "ms", False, 0.03, False),
    (("tpot_ms", "p99"), "tpot_p99", "tpot", "TPOT p99", "ms", False, 0.10, False),
    (("itl_ms", "median"), "itl", "tpot", "ITL median", "ms", False, 0.03, False),
    (("itl_ms", "p99"), "itl_p99", "tpot", "ITL p99", "ms", False, 0.10, False),
    (("decode_tokens_per_s",), "decode", "tpot", "decode tokens/s of one stream", "tok/s", True, 0.03, False),
]


def _inference(measurement: dict[str, Any]) -> Iterable[Metric]:
    good = [run for run in measurement["runs"] if run["figures"] and not run["problems"]]
    for level in sorted({run["level"] for run in good}):
        runs = [run["figures"] for run in good if run["level"] == level]
        for path, name, family, label, unit, higher, floor, headline in _INFERENCE:
            values = [run[path[0]] if len(path) == 1 else run[path[0]][path[1]] for run in runs]
            samples = [float(value) for value in values if value]
            if len(samples) == len(runs):
                yield Metric(
                    f"inference.{name}.c{level}", "inference", family, f"{label}, concurrency {level}", unit,
                    higher, floor, headline, samples, level=level,
                )  # fmt: skip


def metrics(measurement: dict[str, Any]) -> dict[str, Metric]:
    """Return a measurement's metrics by id; one that records figures only gives those as they stand."""
    found: list[Metric] = [Metric(**recorded) for recorded in measurement.get("recorded_metrics") or []]
    if measurement.get("fabric"):
        found += _fabric(measurement["fabric"])
    if measurement.get("inference"):
        found += _inference(measurement["inference"])
    return {metric.id: metric for metric in found}


def pair_matrix(measurement: dict[str, Any]) -> list[list[Optional[float]]]:
    """Return the push figures per ordered pair in GB/s (medians over the runs), None on the diagonal."""
    runs = (measurement.get("fabric") or {}).get("runs") or []
    cells: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        for cell in run["measurements"]:
            if cell["kind"] == "d2d" and cell.get("direction") == "push" and cell.get("peer", True):
                cells.setdefault((cell["source"], cell["target"]), []).append(cell["median_gbps"])
    size = 1 + max((max(pair) for pair in cells), default=-1)
    return [
        [
            statistics.median(cells[(row, column)]) if (row, column) in cells else None
            for column in range(size)
        ]
        for row in range(size)
    ]
