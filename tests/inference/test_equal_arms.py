# SPDX-License-Identifier: GPL-3.0-or-later
"""Twenty comparisons of equal arms on a real server: how often does the comparison cry wolf?"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
from inference_support import HERE, free_port

pytest.importorskip("scipy", reason="SciPy is missing: pip install -r requirements/benchmark.txt")
from gpu_tuning.benchmark.server import Server
from gpu_tuning.benchmark.sweep import Sweep

from benchmark_report import compare, metrics

REPETITIONS, RUNS, LEVEL = 20, 5, 2


def measure(folder: pathlib.Path, url: str, seed: int) -> dict[str, Any]:
    """One run at one level, against the server that is up."""
    spec = {
        "folder": str(folder), "info_url": "", "levels": [LEVEL], "repeats": 1, "restart_server": False,
        "input_length": 16, "output_length": 16, "requests_per_stream": 8, "least_requests": 1,
        "warmup_requests": 1, "seed": seed,
        "server": {"command": [], "environment": {}, "health_url": f"{url}/health", "ready_timeout_s": 10.0,
                   "stop_timeout_s": 5.0},
        "client": {
            "tool": "sglang", "environment": {}, "timeout_s": 60.0,
            "command": [sys.executable, str(HERE / "small_client.py"), "--base-url", url,
                        "--random-input-len", "{input_length}", "--random-output-len", "{output_length}",
                        "--num-prompts", "{requests}", "--max-concurrency", "{concurrency}",
                        "--seed", "{seed}", "--output-file", "{output_file}",
                        "--warmup-requests", "{warmup}"],
        },
    }  # fmt: skip
    (folder / f"client-1-{LEVEL}.json").unlink(missing_ok=True)
    sweep = Sweep(spec, lambda text: None)
    sweep._all()
    run = dict(sweep.runs[0])
    assert run["problems"] == []
    return run


def test_false_positives_of_twenty_equal_comparisons(
    serve_python: str, model: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [serve_python, str(HERE / "llama_server.py"), str(model / "model.gguf"), str(port), "4"]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        Server(
            {"command": [], "health_url": f"{url}/health", "ready_timeout_s": 60.0}, lambda text: None
        ).start()
        called = []
        for repetition in range(REPETITIONS):
            arms: tuple[list[Any], list[Any]] = ([], [])
            for run in range(RUNS):  # A B B A ...: a drift of the machine falls on both
                for arm in (0, 1) if run % 2 == 0 else (1, 0):
                    arms[arm].append(measure(tmp_path, url, 100 * repetition + run))
            found = compare.compare(*({"name": "", "inference": {"runs": runs}} for runs in arms))
            called += [
                one for one in found if one.metric.headline and one.verdict in ("improved", "regressed")
            ]
    finally:
        server.kill()
        server.wait()
    total = REPETITIONS * len([one for one in found if one.metric.headline])
    cv = max(compare.variation(one.after) for one in found if one.metric.headline)
    with capsys.disabled():
        print(
            f"\n  equal arms on a real server: {len(called)} false verdicts of {total}"
            f" (CV of the last arm up to {100 * cv:.0f} %)"
        )
    assert len(metrics.metrics({"inference": {"runs": arms[0]}})) > 5
    assert len(called) <= 3
