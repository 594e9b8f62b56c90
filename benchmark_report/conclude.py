# SPDX-License-Identifier: GPL-3.0-or-later
"""From two measurements to one conclusion: verdicts, explanations, ceilings, next steps."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any, Optional

from gpu_tuning.benchmark import roofline

from . import fingerprints
from .compare import IMPROVED, INCONCLUSIVE, NO_CHANGE, REGRESSED, compare
from .explain import changes, explain
from .metrics import Metric, metrics, pair_matrix

SCHEMA = "gpu_benchmark/report/1"
SEVERITIES = ("P0", "P1", "P2", "info")
SLOW_DECODE = (
    "neither HBM nor PCIe explains that. In this order: are CUDA graphs on, do the attention and MoE kernels "
    "fit this GPU or fall back, does NCCL use peer copies or shared memory, what do 12 KiB all-reduces take, "
    "which clock do the CPUs and GPUs hold, is time to first token counted in the rate?"
)


def rooflines(model: dict[str, Any], gpus: list[dict[str, Any]]) -> tuple[list[roofline.Roofline], list[str]]:
    """Return the decode ceilings that the model's description allows, and why another is missing.

    ``model``: tensor_parallel and pipeline_parallel sizes; active_parameters_b and bytes_per_weight for the
    recorded assumption; config and quant_config (parsed JSON) for the checkpoint's own formats;
    context_tokens; memory_bandwidth_gbps where the GPUs do not tell their clock and bus.
    """
    bandwidth = model.get("memory_bandwidth_gbps") or _bandwidth(gpus)
    if not bandwidth:
        return [], ["No roofline: no GPU told its memory clock and bus, and no memory bandwidth is given."]
    parallel = [int(model.get(f"{kind}_parallel") or 1) for kind in ("tensor", "pipeline")]
    active = roofline.gpus_active_per_step(*parallel)
    context = int(model.get("context_tokens") or 0)
    found, missing = [], []
    config = model.get("config") or {}
    if model.get("active_parameters_b"):
        kv = context * float(
            model.get("kv_bytes_per_token") or (roofline.kv_bytes_per_token(config) if config else 0)
        )
        weight = float(model.get("bytes_per_weight") or 2)
        found.append(
            roofline.from_active_parameters(model["active_parameters_b"], weight, kv / 1e9, active, bandwidth)
        )
    if config:
        try:
            found.append(
                roofline.from_checkpoint(config, model.get("quant_config"), context, active, bandwidth)
            )
        except ValueError as error:
            missing.append(f"No ceiling from the checkpoint: {error}.")
    return found, missing


def _bandwidth(gpus: list[dict[str, Any]]) -> Optional[float]:
    """Return the slowest GPU's memory bandwidth in GB/s, from its own clock and bus."""
    known = [
        roofline.memory_bandwidth_gbps(gpu["max_memory_clock_mhz"], gpu["memory_bus_bits"])
        for gpu in gpus
        if gpu.get("max_memory_clock_mhz") and gpu.get("memory_bus_bits")
    ]
    return min(known, default=None)


def _facts(measurement: dict[str, Any]) -> dict[str, Any]:
    runs = (measurement.get("fabric") or {}).get("runs") or []
    sizes = {device.get("max_payload_size") for run in runs for device in run.get("devices") or []} - {None}
    return {"max_payload": min(sizes) if sizes else "(unknown)"}


def single_stream(found: dict[str, Metric]) -> Optional[Metric]:
    """Return the decode rate of one stream, what a roofline is set against."""
    return found.get("inference.decode.c1") or found.get("inference.throughput.c1")


def _efficiency(found: dict[str, Metric], roofs: list[roofline.Roofline]) -> list[dict[str, Any]]:
    stream = single_stream(found)
    if stream is None:
        return []
    return [
        {**roof.as_dict(), "measured": stream.median, "share": stream.median / roof.tokens_per_s}
        for roof in roofs
    ]


def next_steps(findings: list[dict[str, Any]], efficiency: list[dict[str, Any]]) -> list[str]:
    """Return what to try next: the audit's findings by severity, then what the roofline points at.

    ``findings`` are the audit's rows: severity, title, remedy and effect are read. Notes are left out.
    """
    rank = {name: index for index, name in enumerate(SEVERITIES)}
    worth = [one for one in findings if one.get("severity") != "info"]
    steps = []
    for one in sorted(worth, key=lambda one: rank.get(str(one.get("severity")), len(rank))):
        words = (
            f"[{one.get('severity', '?')}] {one.get('title')}: {one.get('remedy')} {one.get('effect') or ''}"
        )
        step = " ".join(words.split())
        if step not in steps:  # one rule can find the same on eight GPUs
            steps.append(step)
    lowest = min((one["share"] for one in efficiency), default=1.0)
    if lowest < 0.25:
        steps.append(f"Decoding reaches {100 * lowest:.0f} % of what memory bandwidth allows; {SLOW_DECODE}")
    return steps


def conclude(
    before: Optional[dict[str, Any]],
    after: dict[str, Any],
    expected: list[str],
    on_difference: str = "refuse",
    findings: Optional[list[dict[str, Any]]] = None,
) -> dict[str, Any]:
    """Return the report document of a run: with a comparison if there is a baseline that may be compared."""
    found = metrics(after)
    roofs, missing = rooflines(after.get("model") or {}, (after.get("fingerprint") or {}).get("gpus") or [])
    efficiency = _efficiency(found, roofs)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "host": after.get("host"),
        "name": after["name"],
        "date": after.get("date")
        or datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "metrics": [metric.as_dict() for metric in found.values()],
        "pairs": pair_matrix(after),
        "roofline": efficiency,
        "notes": missing + _notes(after),
        "next_steps": next_steps(findings or [], efficiency),
        "baseline": None,
        "comparison": [],
        "differences": [],
        "refused": [],
    }
    if before is not None:
        _compare(report, before, after, expected, on_difference)
    return report


def _notes(measurement: dict[str, Any]) -> list[str]:
    notes = list(measurement.get("notes") or [])
    for section in ("fabric", "inference"):
        part = measurement.get(section)
        if part and part["status"] != "complete":
            notes.append(
                f"The {section} measurement is {part['status']}: {part.get('error') or 'see its runs'}"
            )
    inference = measurement.get("inference") or {}
    runs = inference.get("runs") or []
    failed = [run for run in runs if run["problems"]]
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} inference runs do not count and were left out.")
    if measurement.get("cache") == "unknown":
        notes.append(
            "The server was neither restarted nor its prefix cache flushed between runs: a run with the "
            "seeds of an earlier one reads from the cache and looks faster."
        )
    return notes


def _compare(
    report: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    expected: list[str],
    on_difference: str,
) -> None:
    found = fingerprints.differences(before, after)
    surprises = fingerprints.unexpected(found, expected)
    report["baseline"] = {
        "name": before["name"],
        "date": before.get("date"),
        "metrics": [metric.as_dict() for metric in metrics(before).values()],
        "pairs": pair_matrix(before),
        "notes": _notes(before),
        "unrecorded": fingerprints.unrecorded(before, after),
    }
    report["differences"] = [{**vars(one), "expected": one not in surprises} for one in found]
    workload = [one for one in surprises if one.part == "workload"]
    refused = workload if on_difference == "show" else surprises
    if refused:
        report["refused"] = [one.sentence() for one in refused]
        return
    changed = changes(found)
    facts = {**_facts(after), "settings_known": "settings" not in report["baseline"]["unrecorded"]}
    for one in compare(before, after):
        entry = one.as_dict()
        entry["explanation"] = explain(one, changed, facts)
        report["comparison"].append(entry)
    if surprises:
        report["notes"].append(
            "More differs than was meant to: " + "; ".join(one.sentence() for one in surprises) + ". "
            "The verdicts hold for all of it together."
        )


def summary(report: dict[str, Any]) -> str:
    """Return the one line for the terminal."""
    if report["refused"]:
        return f"not compared with {report['baseline']['name']}: " + "; ".join(report["refused"])
    if not report["baseline"]:
        return f"{len(report['metrics'])} figures measured, no baseline to compare with"
    counts = dict.fromkeys((IMPROVED, REGRESSED, NO_CHANGE, INCONCLUSIVE), 0)
    for one in report["comparison"]:
        if one["headline"]:
            counts[one["verdict"]] += 1
    return f"against {report['baseline']['name']}: " + ", ".join(
        f"{n} {verdict}" for verdict, n in counts.items()
    )


def load(path: str) -> dict[str, Any]:
    """Return a measurement from its file; raises ValueError with one sentence for anything else."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is no complete JSON document") from None
    if not isinstance(data, dict) or data.get("schema") != "gpu_benchmark/measurement/1":
        raise ValueError(f"{path} is no measurement of gpu_benchmark")
    return data
