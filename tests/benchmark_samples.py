# SPDX-License-Identifier: GPL-3.0-or-later
"""Measurements made up from known figures, for the tests of comparison and report."""

from __future__ import annotations

import math
import pathlib
import random
import shutil
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
for folder in (str(ROOT), str(ROOT / "module_utils")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

GLM = {
    "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}  # fmt: skip
ONLY_EXPERTS = {
    "quantization": {
        "quant_algo": "NVFP4",
        "exclude_modules": [
            "lm_head",
            "model.layers.*.self_attn*",
            "*shared_experts*",
            "model.layers.0.mlp*",
        ],
    }
}
LINK = {"speed": "32.0 GT/s PCIe", "width": 16}


def standin(source: str, library: pathlib.Path) -> None:
    """Compile one of the stand-in libraries, or skip the test where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: apt-get install gcc libc6-dev")
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", library, ROOT / "tests/fixtures/benchmark" / source], check=True)


def noisy(pick: random.Random, middle: float, cv: float) -> float:
    """One run's figure around a middle."""
    return middle * math.exp(pick.gauss(0, cv))


def fabric_run(pick: random.Random, cv: float, gpus: int = 8, **scale: float) -> dict[str, Any]:
    """One P2P run of a two-node machine with the known figures; ``scale`` multiplies a kind."""

    def figure(name: str, middle: float) -> float:
        return noisy(pick, middle * scale.get(name, 1.0), cv)

    devices = [
        {"index": gpu, "name": "GPU", "numa_node": gpu * 2 // gpus, "link": LINK, "max_payload_size": 256}
        for gpu in range(gpus)
    ]
    cells: list[dict[str, Any]] = []
    for node in (0, 1):
        for gpu in range(gpus):
            own = devices[gpu]["numa_node"] == node
            common = {"node": node, "peer": True, "link_under_load": LINK}
            down = {
                "kind": "h2d",
                "source": None,
                "target": gpu,
                "median_gbps": figure("h2d", 53 if own else 41),
            }
            up = {
                "kind": "d2h",
                "source": gpu,
                "target": None,
                "median_gbps": figure("d2h", 53 if own else 40),
            }
            cells += [{**common, **down}, {**common, **up}]
    for one in range(gpus):
        for other in range(gpus):
            if one == other:
                continue
            near = devices[one]["numa_node"] == devices[other]["numa_node"]
            ends = {"source": one, "target": other, "node": None, "peer": True, "link_under_load": LINK}
            push = figure("push", 50 if near else 37)
            cells.append({"kind": "d2d", **ends, "direction": "push", "median_gbps": push})
            cells.append(
                {"kind": "d2d", **ends, "direction": "pull", "median_gbps": figure("pull", push * 0.9)}
            )
            cells.append({"kind": "latency", **ends, "bytes": 16, "median_us": figure("latency", 6.5)})
    return {"status": "complete", "error": None, "devices": devices, "measurements": cells}


def inference_run(
    pick: random.Random, cv: float, level: int, repeat: int, speed: float = 1.0
) -> dict[str, Any]:
    """One run at one level: the aggregate grows with the square root of the streams."""
    rate = noisy(pick, speed * 10.36 * math.sqrt(level), cv)
    tpot = 1000 * level / rate
    ttft = noisy(pick, 220 * (1 + level / 16) / speed, cv)

    def spread(middle: float) -> dict[str, float]:
        return {
            "mean": middle * 1.03,
            "median": middle,
            "p90": middle * 1.2,
            "p95": middle * 1.3,
            "p99": middle * 1.6,
        }

    figures = {
        "tool": "sglang", "duration_s": 60.0, "completed": level * 4, "output_tokens": level * 4 * 256,
        "output_tokens_per_s": rate, "decode_tokens_per_s": 1000 / tpot, "errors": [],
        "ttft_ms": spread(ttft), "tpot_ms": spread(tpot), "itl_ms": spread(tpot), "e2e_ms": None,
    }  # fmt: skip
    return {
        "level": level, "repeat": repeat, "seed": 1000 * repeat + level, "requests": level * 4,
        "figures": figures, "problems": [],
    }  # fmt: skip


def measurement(
    name: str,
    seed: int,
    runs: int = 5,
    cv: float = 0.01,
    speed: float = 1.0,
    settings: Any = None,
    **scale: float,
) -> dict[str, Any]:
    """A whole measurement: fabric and inference with ``runs`` runs each."""
    pick = random.Random(seed)
    fabric = {
        "status": "complete",
        "error": None,
        "runs": [fabric_run(pick, cv, **scale) for _ in range(runs)],
    }
    levels = (1, 10, 64)
    inference = [
        inference_run(pick, cv, level, repeat, speed) for repeat in range(1, runs + 1) for level in levels
    ]
    gpu = {"name": "GPU", "max_memory_clock_mhz": 14001, "memory_bus_bits": 512, "max_sm_clock_mhz": 2600}
    return {
        "schema": "gpu_benchmark/measurement/1",
        "name": name,
        "host": "gpu-host-1",
        "date": "2026-01-01T00:00:00+00:00",
        "cache": "restarted",
        "fingerprint": {
            "machine": "x86_64", "kernel": "6.8.12-4-pve", "cmdline": ["quiet", "iommu=pt"],
            "driver": "595.45",
            "gpus": [gpu] * 8, "environment": {"NCCL_P2P_LEVEL": "SYS"}, "iommu": ["identity"],
            "governor": "performance", "settings": settings or {},
        },
        "workload": {
            "fabric": {"engine": "driver", "size_mib": 256, "iterations": 50},
            "inference": {"tool": "sglang", "levels": "1 10 64", "input_length": 1024, "output_length": 256},
        },
        "model": {
            "tensor_parallel": 4, "pipeline_parallel": 2, "active_parameters_b": 40,
            "bytes_per_weight": 0.5625,
            "context_tokens": 2048, "config": GLM, "quant_config": ONLY_EXPERTS,
        },
        "fabric": {"schema": "gpu_benchmark/fabric/1", **fabric},
        "inference": {
            "schema": "gpu_benchmark/inference/1", "status": "complete", "error": None, "runs": inference,
        },
        "notes": [],
    }  # fmt: skip
