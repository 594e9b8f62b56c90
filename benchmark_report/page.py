# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a report: one self-contained HTML page, a section of system-improve.md, and JSON."""

from __future__ import annotations

import pathlib
from typing import Any

import jinja2
from markdown_text import plain

from . import plots
from .compare import percent
from .conclude import summary

TEMPLATES = pathlib.Path(__file__).parent / "templates"


def _environment(autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=autoescape, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(number=number, percent=percent, oneline=plain)
    return environment


def number(value: float) -> str:
    """Return a figure with three or four digits that mean something."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


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
