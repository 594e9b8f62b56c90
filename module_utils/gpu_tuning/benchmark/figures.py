# SPDX-License-Identifier: GPL-3.0-or-later
"""What a load generator measured, in one shape, and whether it may be believed.

A tool's exit code proves nothing: four of five exit 0 and print a plausible tokens/s with 40 of 48 requests
failed. A run counts only if as many requests completed and as many tokens came out as were planned.
"""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Optional

#: Latencies in milliseconds: time to first token, time per output token, between tokens, end to end.
LATENCIES = ("ttft", "tpot", "itl", "e2e")


class BadResult(ValueError):
    """A tool's output that cannot be used; the text is one sentence for the user."""


def number(value: Any, name: str, positive: bool = True) -> float:
    """Return a finite number; raises BadResult naming the field for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadResult(f"{name} is {value!r} and not a number")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise BadResult(f"{name} is {value!r}, which no run can measure")
    return float(value)


def _fields(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadResult(f"{name} is no JSON object")
    return data


def _percentiles(data: dict[str, Any], pattern: str, tool: str) -> dict[str, Optional[float]]:
    """Return mean, median, p90, p95, p99 as far as the tool gives them; the median is a must."""
    found = {}
    for statistic in ("mean", "median", "p90", "p95", "p99"):
        name = pattern.format(statistic)
        value = data.get(name, data.get(name.replace("median", "p50")) if statistic == "median" else None)
        known = value is not None or statistic == "median"
        found[statistic] = number(value, f"{tool} {name}", positive=False) if known else None
    return found


def last_json_line(text: str) -> dict[str, Any]:
    """Return the last object of a JSON lines text; raises BadResult when the last line is cut off."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadResult("the load generator wrote no result")
    try:
        return _fields(json.loads(lines[-1]), "the load generator's result")
    except ValueError as error:
        if isinstance(error, BadResult):
            raise
        raise BadResult("the load generator's last result line is cut off") from None


def _sglang(text: str) -> dict[str, Any]:
    data = last_json_line(text)
    run = _serving(data, "sglang", {"e2e": "{}_e2e_latency_ms"})
    details = data.get("errors")
    run["errors"] = sorted({str(one) for one in details if one})[:5] if isinstance(details, list) else []
    info = data.get("server_info")
    run["server_version"] = info.get("version") if isinstance(info, dict) else None
    report = data.get("cache_report")
    run["cached_tokens"] = report.get("total_cached_tokens") if isinstance(report, dict) else None
    return run


def _vllm(text: str) -> dict[str, Any]:
    try:
        data = _fields(json.loads(text), "the vLLM result")
    except ValueError as error:
        raise error if isinstance(error, BadResult) else BadResult("the vLLM result is cut off") from None
    return {**_serving(data, "vllm", {"e2e": "{}_e2el_ms"}), "failed": data.get("failed")}


def _serving(data: dict[str, Any], tool: str, names: dict[str, str]) -> dict[str, Any]:
    run: dict[str, Any] = {
        "tool": tool,
        "duration_s": number(data.get("duration"), f"{tool} duration"),
        "completed": int(number(data.get("completed"), f"{tool} completed", positive=False)),
        "output_tokens": int(number(data.get("total_output_tokens"), f"{tool} total_output_tokens", False)),
        "output_tokens_per_s": number(data.get("output_throughput"), f"{tool} output_throughput", False),
    }
    if run["completed"] == 0:
        raise BadResult(f"{tool}: no request completed")
    for latency in LATENCIES:
        pattern = names.get(latency, "{}_" + latency + "_ms")
        read = _optional if latency == "e2e" else _percentiles
        run[f"{latency}_ms"] = read(data, pattern, tool)
    return run


def _optional(data: dict[str, Any], pattern: str, tool: str) -> Optional[dict[str, Optional[float]]]:
    known = pattern.format("median") in data or pattern.format("p50") in data
    return _percentiles(data, pattern, tool) if known else None


def _guidellm(text: str) -> dict[str, Any]:
    try:
        benchmark = json.loads(text)["benchmarks"][0]
        metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
        rate = metrics["output_tokens_per_second"]["successful"]["mean"]
        spreads = {name: metrics[field]["successful"] for name, field in GUIDELLM.items()}
        tokens = metrics["output_token_count"]["successful"]["total_sum"]
        duration = benchmark["duration"]
    except KeyError as error:
        raise BadResult(f"guidellm's result has no {error}") from None
    except (ValueError, IndexError, TypeError):
        raise BadResult("guidellm's result is cut off or has no benchmark") from None
    run: dict[str, Any] = {
        "tool": "guidellm",
        "duration_s": number(duration, "guidellm duration"),
        "completed": int(number(totals.get("successful"), "guidellm request_totals.successful", False)),
        "failed": int(totals.get("errored") or 0) + int(totals.get("incomplete") or 0),
        "output_tokens": int(number(tokens, "guidellm output_token_count", False)),
        "output_tokens_per_s": number(rate, "guidellm output_tokens_per_second", False),
    }
    if run["completed"] == 0:
        raise BadResult("guidellm: no request completed")
    for name, spread in spreads.items():
        scale = 1000 if name == "e2e" else 1  # request_latency is in seconds
        flat = {
            "mean": spread.get("mean"),
            "median": spread.get("median"),
            **(spread.get("percentiles") or {}),
        }
        wanted = {key: flat.get(key) for key in ("mean", "median", "p90", "p95", "p99")}
        run[f"{name}_ms"] = {
            key: None if value is None else scale * number(value, f"guidellm {name} {key}", False)
            for key, value in wanted.items()
        }
    return run


GUIDELLM = {
    "ttft": "time_to_first_token_ms",
    "tpot": "time_per_output_token_ms",
    "itl": "inter_token_latency_ms",
    "e2e": "request_latency",
}

PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "guidellm": _guidellm,
}


def parse(tool: str, text: str) -> dict[str, Any]:
    """Return one run's figures from a tool's result file; raises BadResult with one sentence.

    The figures: duration_s, completed, output_tokens, output_tokens_per_s, decode_tokens_per_s (one stream,
    from the median TPOT: the output rate includes the prefill), and {mean, median, p90, p95, p99} in
    milliseconds for ttft_ms, tpot_ms, itl_ms and, where told, e2e_ms.
    """
    run = PARSERS[tool](text)
    median = run["tpot_ms"]["median"]
    run["decode_tokens_per_s"] = 1000 / median if median else None
    return run


def problems(run: dict[str, Any], planned: int, output_length: int) -> list[str]:
    """Return why a run does not count, as sentences; none when it is whole."""
    found = []
    if run["completed"] != planned:
        causes = f" ({'; '.join(run['errors'])})" if run.get("errors") else ""
        found.append(f"{run['completed']} of {planned} requests completed{causes}")
    if run.get("failed"):
        found.append(f"the tool counts {run['failed']} failed requests")
    wanted = planned * output_length
    if run["output_tokens"] != wanted:
        found.append(f"{run['output_tokens']} output tokens where {wanted} were planned")
    return found
