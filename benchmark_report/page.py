# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a report: one self-contained HTML page, a section of system-improve.md, and JSON."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jinja2
from gpu_tuning.benchmark.documents import write_text

from . import plots
from .compare import percent
from .conclude import summary

TEMPLATES = pathlib.Path(__file__).parent / "templates"
BEGIN, END = "<!-- gpu_benchmark begin -->", "<!-- gpu_benchmark end -->"


def _environment(autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=autoescape, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(number=number, percent=percent, oneline=oneline)
    return environment


def number(value: float) -> str:
    """Return a figure with three or four digits that mean something."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def oneline(text: Any) -> str:
    """Return text that cannot break out of a Markdown table's cell."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;")


def html(report: dict[str, Any]) -> str:
    """Return the page; it loads nothing from anywhere."""
    old = report["baseline"] or {"metrics": [], "pairs": []}
    drawn = {
        "heat_map": plots.heat_map(old["pairs"], report["pairs"]),
        "bars": plots.ceiling_bars(old["metrics"], report["metrics"]),
        "concurrency": plots.over_concurrency(old["metrics"], report["metrics"]),
        "waterfall": plots.waterfall(report["roofline"]),
    }
    page = _environment(autoescape=True).get_template("report.html.j2")
    return page.render(report=report, plots=drawn, summary=summary(report))


def markdown(report: dict[str, Any]) -> str:
    """Return the section of system-improve.md."""
    return (
        _environment(autoescape=False)
        .get_template("record.md.j2")
        .render(report=report, summary=summary(report))
    )


def put_section(path: str, section: str) -> bool:
    """Put the section into the record, in place of an earlier one; return whether the file changed.

    Everything outside the two marker comments stays byte for byte as it was.
    """
    target = pathlib.Path(path)
    old = target.read_bytes().decode() if target.exists() else ""  # bytes: line ends stay as they are
    block = f"{BEGIN}\n{section.strip()}\n{END}"
    start, end = old.find(BEGIN), old.find(END)
    if 0 <= start < end:
        new = old[:start] + block + old[end + len(END) :]
    else:
        new = (old.rstrip("\n") + "\n\n" if old else "# System record\n\n") + block + "\n"
    if new != old:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, new)
    return new != old
