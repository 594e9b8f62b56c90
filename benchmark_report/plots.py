# SPDX-License-Identifier: GPL-3.0-or-later
"""Draw a report's figures as SVG texts, readable without telling colours apart."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

BEFORE, AFTER, LIMIT, LOSS, TEXT, MUTED = "#9aa5b1", "#1f6feb", "#c2410c", "#e4e7eb", "#1f2933", "#616e7c"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gpu_benchmark",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#cbd2d9",
    "axes.labelcolor": MUTED,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlecolor": TEXT,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
}


@contextmanager
def _figure(width: float, height: float, columns: int = 1) -> Iterator[tuple[Figure, Any, list[str]]]:
    """Yield a figure, its axes and a list that receives its SVG text."""
    made: list[str] = []
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, columns, figsize=(width, height), layout="constrained", squeeze=False
        )
        yield figure, axes[0], made
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    made.append(_inline(buffer.getvalue()))


def _inline(svg: str) -> str:
    """Return the svg element alone, scaling with the page."""
    element = svg[svg.index("<svg") :]
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    )


def interval_of(samples: Sequence[float]) -> Optional[tuple[float, float]]:
    """Return the 95 % interval of the typical run (Student's t on logarithms), None for a single run."""
    if len(samples) < 2:
        return None
    logs = np.log(np.asarray(samples, dtype=float))
    half = stats.t.ppf(0.975, len(samples) - 1) * logs.std(ddof=1) / math.sqrt(len(samples))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def heat_map(before: list[list[Optional[float]]], after: list[list[Optional[float]]]) -> str:
    """Return the push bandwidth of every pair, before (if known) and after, with the numbers in the cells."""
    panels = [("before", before), ("after", after)] if before else [("measured", after)]
    panels = [(title, matrix) for title, matrix in panels if matrix]
    if not panels:
        return ""
    values = [cell for _, matrix in panels for row in matrix for cell in row if cell is not None]
    size = max(3.2, 0.55 * len(panels[0][1]) + 1.4)
    with _figure(size * len(panels) + 0.8, size, len(panels)) as (figure, axes, made):
        for axis, (title, matrix) in zip(axes, panels):
            cells = np.array([[math.nan if cell is None else cell for cell in row] for row in matrix])
            low, high = min(values), max(values)
            image = axis.imshow(cells, cmap="Blues", vmin=low - 0.4 * (high - low or 1), vmax=high)
            _cells(axis, matrix, low, high)
            axis.set_title(f"P2P push, GB/s: {title}")
        figure.colorbar(image, ax=list(axes), shrink=0.7, label="GB/s")
    return made[0]


def _cells(axis: Axes, matrix: list[list[Optional[float]]], low: float, high: float) -> None:
    for row, cells in enumerate(matrix):
        for column, cell in enumerate(cells):
            dark = cell is not None and cell > low + 0.55 * (high - low)
            text = "·" if cell is None else f"{cell:.0f}" if len(matrix) > 4 else f"{cell:.1f}"
            axis.text(
                column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else TEXT
            )
    axis.set_xticks(range(len(matrix)), [f"{index}" for index in range(len(matrix))])
    axis.set_yticks(range(len(matrix)), [f"{index}" for index in range(len(matrix))])
    axis.set_xlabel("to GPU")
    axis.set_ylabel("from GPU")
    axis.spines[:].set_visible(False)


def _errors(samples: Sequence[float]) -> Optional[list[list[float]]]:
    found = interval_of(samples)
    if found is None:
        return None
    middle = statistics.median(samples)
    return [[max(0.0, middle - found[0])], [max(0.0, found[1] - middle)]]


def ceiling_bars(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return bars of the fabric's bandwidths against each link's payload ceiling, in percent of it."""
    shown = [one for one in after if one["section"] == "fabric" and one["unit"] == "GB/s"]
    shown = [one for one in shown if one["family"] != "staged"]
    if not shown:
        return ""
    old = {one["id"]: one for one in before}
    with _figure(8.6, 0.62 * len(shown) + 1.3) as (figure, axes, made):
        axis = axes[0]
        for place, one in enumerate(shown):
            _bar(axis, place, one, old.get(one["id"]))
        axis.set_yticks(range(len(shown)), [one["label"] for one in shown])
        axis.invert_yaxis()
        axis.set_xlabel("GB/s (1e9 bytes per second)")
        axis.set_title("Bandwidth against the link's payload ceiling")
        axis.xaxis.grid(True)
        handles = [Line2D([], [], color=LIMIT, lw=2), Rectangle((0, 0), 1, 1, color=AFTER)]
        names = ["payload ceiling", "after" if old else "measured"]
        if old:
            handles.append(Rectangle((0, 0), 1, 1, color=BEFORE))
            names.append("before")
        figure.legend(handles, names, loc="outside lower center", ncols=3)
    return made[0]


def _bar(axis: Axes, place: int, one: dict[str, Any], old: Optional[dict[str, Any]]) -> None:
    height = 0.34 if old else 0.56
    shift = height / 2 if old else 0
    if old:
        axis.barh(place - shift, old["median"], height, color=BEFORE, hatch="///", edgecolor="white", lw=0)
    axis.barh(place + shift, one["median"], height, color=AFTER, xerr=_errors(one["samples"]), ecolor=TEXT)
    label = f"{one['median']:.1f}"
    if one["ceiling"]:
        axis.plot([one["ceiling"]] * 2, [place - 0.42, place + 0.42], color=LIMIT, lw=2)
        label += f"  ({100 * one['share_of_ceiling']:.0f} %)"
    axis.text(
        one["median"] * 0.98,
        place + shift,
        label,
        ha="right",
        va="center",
        color="white",
        fontsize=9,
        weight="bold",
    )


def over_concurrency(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return throughput and time to first token over concurrency, each with its 95 % interval."""
    wanted = [("throughput", "output tokens/s"), ("ttft", "time to first token, median, ms")]
    wanted = [
        one for one in wanted if any(metric["id"].startswith(f"inference.{one[0]}.c") for metric in after)
    ]
    if not wanted:
        return ""
    with _figure(4.6 * len(wanted), 3.5, len(wanted)) as (_, axes, made):
        for axis, (name, title) in zip(axes, wanted):
            ticks: set[int] = set()
            for style, color, label, metrics in (
                ("s--", BEFORE, "before", before), ("o-", AFTER, "after" if before else "measured", after)
            ):  # fmt: skip
                ticks |= _curve(axis, [one for one in metrics if one["id"].startswith(f"inference.{name}.c")],
                                style, color, label)  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.yaxis.grid(True)
            axis.set_xlabel("concurrent requests")
            axis.set_title(title)
        axes[0].legend(loc="upper left")
    return made[0]


def _curve(axis: Axes, metrics: list[dict[str, Any]], style: str, color: str, label: str) -> set[int]:
    points = sorted((one["level"], one["median"], one["samples"]) for one in metrics if one["level"])
    if not points:
        return set()
    levels = [point[0] for point in points]
    axis.plot(levels, [point[1] for point in points], style, color=color, label=label, lw=2, ms=6)
    for level, middle, samples in points:
        errors = _errors(samples)
        if errors:
            axis.errorbar([level], [middle], yerr=errors, color=color, capsize=4, lw=1.5)
        axis.plot([level] * len(samples), samples, ".", color=color, ms=3, alpha=0.6)
    return set(levels)


def waterfall(roofs: list[dict[str, Any]]) -> str:
    """Return the way from the highest decode ceiling down to the measured rate of one stream."""
    if not roofs:
        return ""
    ordered = sorted(roofs, key=lambda one: -one["tokens_per_s"])
    steps = [(one["name"], one["tokens_per_s"]) for one in ordered]
    measured = ordered[0]["measured"]
    with _figure(8.6, 3.6) as (_, axes, made):
        axis = axes[0]
        names: list[str] = []
        previous = steps[0][1]
        for name, value in steps:
            if names:
                _fall(axis, len(names), previous, value)
                names.append("weights kept\nin wider formats")
            axis.bar(len(names), value, 0.6, color=BEFORE)
            axis.text(len(names), value, f"{value:.0f}", ha="center", va="bottom", weight="bold")
            names.append(f"ceiling:\n{name}")
            previous = value
        _fall(axis, len(names), previous, measured)
        names.append("not explained\nby memory")
        axis.bar(len(names), measured, 0.6, color=AFTER)
        share = 100 * measured / steps[-1][1]
        axis.text(len(names), measured, f"{measured:.1f}\n{share:.1f} % of {steps[-1][1]:.0f}", ha="center",
                  va="bottom", weight="bold")  # fmt: skip
        names.append("measured")
        axis.set_xticks(range(len(names)), names)
        axis.set_ylabel("tok/s, one stream")
        axis.set_ylim(0, 1.18 * steps[0][1])
        axis.set_title("Decode rate against the memory roofline")
        axis.yaxis.grid(True)
    return made[0]


def _fall(axis: Axes, place: int, upper: float, lower: float) -> None:
    axis.bar(place, upper - lower, 0.6, bottom=lower, color=LOSS, hatch="...", edgecolor=BEFORE, lw=0)
    axis.text(place, (upper + lower) / 2, f"-{upper - lower:.0f}", ha="center", va="center", color=TEXT)
