# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook with its SGLang preset against SGLang itself, on CPU with a tiny model.

Heavy (2.5 GB of packages, half a minute per start): runs where GPU_TUNING_SGLANG_PYTHON names, or
.venv-sglang is, a Python with ``requirements/sglang-cpu.txt``; ``make test-inference`` makes it.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from inference_support import HERE, ROOT, Place
from test_playbook import Playbook

CPU = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--disable-overlap-schedule", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536",
    "--context-length", "2048", "--sleep-on-idle",
]  # fmt: skip


@pytest.fixture
def sglang(tmp_path: pathlib.Path, model: pathlib.Path) -> Playbook:
    python = os.environ.get("GPU_TUNING_SGLANG_PYTHON", str(ROOT / ".venv-sglang/bin/python"))
    if not os.path.exists(python):
        pytest.skip(f"no {python}: make test-inference, or set GPU_TUNING_SGLANG_PYTHON")
    playbook = Playbook(tmp_path, Place(model, python, ""))
    return playbook


def variables(playbook: Playbook, model: pathlib.Path, **changes: Any) -> dict[str, Any]:
    cpu = {"PYTHONPATH": str(HERE / "sglang_cpu"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {
        "gpu_benchmark_server": "sglang",
        "gpu_benchmark_server_python": playbook.place.python,
        "gpu_benchmark_server_command": [],
        "gpu_benchmark_server_arguments": CPU,
        "gpu_benchmark_server_environment": cpu,
        "gpu_benchmark_model": str(model),
        "gpu_benchmark_served_model": "tiny",
        "gpu_benchmark_tokenizer": str(model),
        "gpu_benchmark_client_command": [],
        "gpu_benchmark_client_environment": cpu,
        "gpu_benchmark_ready_timeout": 1200,
        "gpu_benchmark_client_timeout": 1200,
        "gpu_benchmark_levels": [1, 4],
        "gpu_benchmark_repeats": 2,
        "gpu_benchmark_restart_server": False,
        "gpu_benchmark_model_config": str(model / "config.json"),
        "gpu_benchmark_memory_bandwidth_gbps": 20,
        **changes,
    }


def test_the_preset_the_flags_and_the_cache_flush_work_on_sglang_itself(
    sglang: Playbook, model: pathlib.Path, capsys: Any
) -> None:
    done = sglang.run("--tags", "baseline", **variables(sglang, model))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = sglang.reports / "benchmarks/bench"
    kept = json.loads((folder / "baselines/before.json").read_text())
    runs = kept["inference"]["runs"]
    assert [run["problems"] for run in runs] == [[]] * 4
    assert kept["cache"] == "flushed"
    assert all(run["figures"]["cached_tokens"] is not None for run in runs)
    assert '"version"' in kept["inference"]["server_info"]
    report = sglang.report("baseline")
    assert {one["id"] for one in report["metrics"]} >= {"inference.throughput.c1", "inference.ttft.c4"}
    assert [roof["name"] for roof in report["roofline"]] == ["checkpoint's own formats"]
    with capsys.disabled():
        figures = [round(run["figures"]["output_tokens_per_s"]) for run in runs]
        print(f"\n  SGLang on CPU: {figures} tok/s at concurrency 1, 4, 1, 4")
    assert sglang.place.servers_left() == []
