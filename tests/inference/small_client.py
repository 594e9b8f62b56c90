#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""A load generator of the standard library, for tests that need hundreds of runs: writes SGLang's fields.

It takes the options of SGLang's client that the role passes and ignores the rest. One connection per request,
since llama.cpp's server closes it after each streamed answer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import random
import statistics
import sys
import time
import urllib.parse
from typing import Any

WORDS = ["measure", "before", "change", "then", "read", "back", "and", "write", "the", "record"]


def request(url: urllib.parse.SplitResult, prompt: str, tokens: int) -> dict[str, Any]:
    """Send one streaming completion; return time to first token, time per token and tokens, or the error."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start, first, count = time.perf_counter(), None, 0
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            first = first or time.perf_counter()
            count = (chunk.get("usage") or {}).get("completion_tokens") or count
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        connection.close()
    if not first or count < 2:
        return {"error": "the answer broke off"}
    end = time.perf_counter()
    return {"ttft": first - start, "tpot": (end - first) / (count - 1), "tokens": count, "error": ""}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return mean, median and percentiles in milliseconds under SGLang's names."""
    ordered = sorted(1000 * value for value in values)
    at = {part: ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] for part in (90, 95, 99)}
    found = {f"p{part}_{name}_ms": value for part, value in at.items()}
    return {
        **found,
        f"mean_{name}_ms": statistics.mean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
    }


def main() -> int:
    """Run the load and append one JSON line."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("--base-url", str), ("--random-input-len", int), ("--random-output-len", int),
        ("--num-prompts", int), ("--max-concurrency", int), ("--seed", int), ("--output-file", str),
        ("--warmup-requests", int),
    ):  # fmt: skip
        parser.add_argument(name, type=kind, required=True)
    options, _ = parser.parse_known_args()
    url, pick = urllib.parse.urlsplit(options.base_url), random.Random(options.seed)
    prompts = [
        " ".join(pick.choices(WORDS, k=options.random_input_len // 2)) for _ in range(options.num_prompts)
    ]
    for _ in range(options.warmup_requests):
        request(url, prompts[0][::-1], options.random_output_len)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.max_concurrency) as pool:
        answers = list(pool.map(lambda prompt: request(url, prompt, options.random_output_len), prompts))
    duration = time.perf_counter() - start
    good = [answer for answer in answers if not answer["error"]]
    tokens = sum(answer["tokens"] for answer in good)
    result: dict[str, Any] = {
        "duration": duration, "completed": len(good), "total_output_tokens": tokens,
        "output_throughput": tokens / duration, "errors": [answer["error"] for answer in answers],
    }  # fmt: skip
    if good:
        times = [answer["ttft"] for answer in good], [answer["tpot"] for answer in good]
        result.update({**spread("ttft", times[0]), **spread("tpot", times[1]), **spread("itl", times[1])})
    with open(options.output_file, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
