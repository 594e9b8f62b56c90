# SPDX-License-Identifier: GPL-3.0-or-later
"""Alert rules and dashboard: they hold for what a check really writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_tuning import gpu_health, metrics
from gpu_tuning.rows import Row

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
PROMTOOL = os.environ.get("GPU_TUNING_PROMTOOL") or shutil.which("promtool")


def written() -> set[str]:
    """Return the names of all metrics."""
    rows = [Row("a", "sysctl", "a", 1, 1, 1), Row("b", "thp", "b", "never", "never", "never")]
    gpus = [gpu_health.Gpu("0000:01:00.0", True, 16, 16, {"fatal": 0})]
    return set(re.findall(r"^(gpu_tuning_\w+)", metrics.exposition(rows, gpus, ["0000:01:00.0"], 1, 1), re.M))


@pytest.mark.skipif(not PROMTOOL, reason="no promtool (Debian: prometheus); GPU_TUNING_PROMTOOL names one")
@pytest.mark.parametrize(
    "command", [("check", "rules", "gpu-tuning.rules.yml"), ("test", "rules", "gpu-tuning.test.yml")]
)
def test_promtool_takes_the_rules_and_their_tests(command: tuple[str, ...]) -> None:
    assert PROMTOOL
    folder = MONITORING / "prometheus"
    done = subprocess.run([PROMTOOL, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", ["prometheus/gpu-tuning.rules.yml", "grafana/gpu-tuning.json"])
def test_every_metric_that_is_asked_for_is_written(file: str) -> None:
    asked = set(re.findall(r"\bgpu_tuning_\w+", (MONITORING / file).read_text()))
    assert asked
    assert asked <= written()


def test_the_dashboards_panels_do_not_overlap() -> None:
    panels = json.loads((MONITORING / "grafana/gpu-tuning.json").read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
