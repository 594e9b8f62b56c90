# SPDX-License-Identifier: GPL-3.0-or-later
"""What tools print, whole and broken, becomes figures or one sentence."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any, Callable

import pytest
from gpu_tuning.benchmark import figures, nvbandwidth
from gpu_tuning.benchmark.figures import BadResult
from hypothesis import given, settings
from hypothesis import strategies as st

SGLANG = (pathlib.Path(__file__).parents[1] / "fixtures/benchmark/sglang.jsonl").read_text()


def spread(name: str, scale: float = 1.0) -> dict[str, float]:
    return {
        f"{part}_{name}_ms": scale * number for part, number in (("mean", 11), ("median", 10), ("p99", 30))
    }


def vllm(**changes: Any) -> str:
    data = {
        "duration": 2.0, "completed": 4, "failed": 0, "total_output_tokens": 400, "output_throughput": 200.0,
        **spread("ttft", 10), **spread("tpot"), **spread("itl"), **spread("e2el", 100), **changes,
    }  # fmt: skip
    return json.dumps({name: value for name, value in data.items() if value is not ...})


def guidellm(change: Callable[[dict[str, Any]], None] = lambda data: None) -> str:
    def successful(middle: float) -> dict[str, Any]:
        one = {
            "mean": middle,
            "median": middle,
            "total_sum": 4 * middle,
            "percentiles": {"p90": middle, "p99": middle},
        }
        return {"successful": one}

    data = {
        "benchmarks": [
            {
                "duration": 2.0,
                "metrics": {
                    "request_totals": {"successful": 4, "errored": 0, "incomplete": 0},
                    "output_tokens_per_second": successful(200.0),
                    "output_token_count": successful(100.0),
                    "time_to_first_token_ms": successful(100.0),
                    "time_per_output_token_ms": successful(10.0),
                    "inter_token_latency_ms": successful(9.0),
                    "request_latency": successful(1.5),
                },
            }
        ]
    }
    change(data)
    return json.dumps(data)


def test_sglangs_real_output() -> None:
    run = figures.parse("sglang", SGLANG)
    assert (run["completed"], run["output_tokens"]) == (32, 1024)
    assert run["output_tokens_per_s"] == pytest.approx(1842.93, abs=0.01)
    assert run["ttft_ms"]["p99"] == pytest.approx(39.53, abs=0.01)
    assert run["decode_tokens_per_s"] == pytest.approx(1000 / run["tpot_ms"]["median"])
    assert figures.problems(run, 32, 32) == []


def test_vllm_and_guidellm_give_the_same_figures() -> None:
    for run in (figures.parse("vllm", vllm()), figures.parse("guidellm", guidellm())):
        assert run["output_tokens_per_s"] == 200
        assert (run["ttft_ms"]["median"], run["tpot_ms"]["median"]) == (100, 10)
        assert run["decode_tokens_per_s"] == 100
        assert figures.problems(run, 4, 100) == []
    assert figures.parse("guidellm", guidellm())["e2e_ms"]["median"] == 1500


def test_older_vllm_names_the_median_p50() -> None:
    text = vllm(median_ttft_ms=..., p50_ttft_ms=77.0)
    assert figures.parse("vllm", text)["ttft_ms"]["median"] == 77


RATES = '"duration": 1.0, "total_output_tokens": 9, "output_throughput": 9'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "wrote no result"),
        ("\n  \n", "wrote no result"),
        (SGLANG[: len(SGLANG) - 40], "cut off"),
        (SGLANG + '{"duration": 1.0, "comp', "cut off"),
        ("[1, 2]", "no JSON object"),
        ('{"duration": 0, "completed": 1}', "duration is 0"),
        ('{"duration": NaN, "completed": 1}', "duration is nan"),
        ('{"duration": 1.0, "completed": true}', "completed is True"),
        ('{"duration": 1.0}', "completed is None"),
        (f'{{"completed": 0, {RATES}}}', "no request completed"),
        (
            f'{{"completed": 1, "median_ttft_ms": "x", {RATES}}}',
            "median_ttft_ms is 'x'",
        ),
    ],
)  # fmt: skip
def test_broken_sglang_results_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadResult, match=sentence):
        figures.parse("sglang", text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (vllm()[:-9], "cut off"),
        (vllm(output_throughput=float("nan")), "output_throughput is nan"),
        (vllm(median_tpot_ms=..., p50_tpot_ms=...), "median_tpot_ms is None"),
        (vllm(duration=-1), "duration is -1"),
        (vllm(total_output_tokens="400"), "total_output_tokens is '400'"),
    ],
)
def test_broken_vllm_results_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadResult, match=sentence):
        figures.parse("vllm", text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data["benchmarks"].clear(), "cut off or has no benchmark"),
        (
            lambda data: data["benchmarks"][0]["metrics"].pop("time_to_first_token_ms"),
            "time_to_first_token_ms",
        ),
        (
            lambda data: data["benchmarks"][0]["metrics"]["request_totals"].update(successful=0),
            "no request completed",
        ),
        (lambda data: data["benchmarks"][0].update(duration=None), "duration is None"),
    ],
)
def test_broken_guidellm_results_are_one_sentence(change: Any, sentence: str) -> None:
    with pytest.raises(BadResult, match=sentence):
        figures.parse("guidellm", guidellm(change))


def test_a_plausible_rate_with_failed_requests_does_not_count() -> None:
    run = figures.parse("vllm", vllm(completed=8, failed=40, total_output_tokens=800))
    found = figures.problems(run, 48, 100)
    assert found[0] == "8 of 48 requests completed"
    assert "40 failed requests" in found[1]
    assert found[2] == "800 output tokens where 4800 were planned"


def test_short_answers_do_not_count_either() -> None:
    run = figures.parse("vllm", vllm(total_output_tokens=399))
    assert figures.problems(run, 4, 100) == ["399 output tokens where 400 were planned"]


def test_the_errors_of_the_client_are_told() -> None:
    line = json.loads(SGLANG.splitlines()[-1])
    line.update(completed=31, errors=["", "Connection reset by peer"])
    assert "Connection reset" in figures.problems(figures.parse("sglang", json.dumps(line)), 32, 32)[0]


@settings(max_examples=60)
@given(st.sampled_from(["sglang", "vllm", "guidellm"]), st.text(max_size=60), st.integers(0, 500))
def test_any_text_is_figures_or_one_sentence(tool: str, noise: str, cut: int) -> None:
    for text in (noise, vllm()[:cut], guidellm()[:cut], vllm() + noise):
        completed = 1
        with contextlib.suppress(BadResult):
            completed = figures.parse(tool, text)["completed"]
        assert completed > 0


def bandwidth(*tests: dict[str, Any], **root: Any) -> str:
    base = {"CUDA Runtime Version": 13000, "GPU Device list": ["0: GPU", "1: GPU"], "testcases": list(tests)}
    return json.dumps({"nvbandwidth": {**base, **root}})


def case(name: str, matrix: Any, status: str = "Passed") -> dict[str, Any]:
    return {"name": name, "status": status, "bandwidth_matrix": matrix, "sum": 1.0}


WRITE, READ = "device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"
BOTH = "device_to_device_bidirectional_memcpy_write_ce"
PAIR = [["N/A", "50.10"], ["37.20", "N/A"]]


def test_nvbandwidth_write_moves_row_to_column_and_read_the_other_way() -> None:
    found = nvbandwidth.parse(bandwidth(case(WRITE, PAIR), case(READ, PAIR)))
    ends = {
        (one["direction"], one["source"], one["target"]): one["median_gbps"] for one in found["measurements"]
    }
    assert ends == {
        ("push", 0, 1): 50.1,
        ("push", 1, 0): 37.2,
        ("pull", 1, 0): 50.1,
        ("pull", 0, 1): 37.2,
    }


def test_nvbandwidth_appends_three_matrices_for_both_ways() -> None:
    total = [["N/A", "98.0"], ["98.0", "N/A"]]
    found = nvbandwidth.parse(bandwidth(case(BOTH, PAIR + PAIR + total)))
    assert [(one["kind"], one["median_gbps"]) for one in found["measurements"]] == [("d2d_both", 98.0)]


def test_nvbandwidth_host_copies_and_latency() -> None:
    found = nvbandwidth.parse(
        bandwidth(
            case("host_to_device_memcpy_ce", [["53.1", "52.9"]]),
            case("device_to_host_memcpy_ce", [["53.0", "52.0"]]),
            case("device_to_device_latency_sm", [["N/A", "810.5"], ["820.5", "N/A"]]),
        )
    )
    kinds = [(one["kind"], one["source"], one["target"]) for one in found["measurements"]]
    assert kinds[:4] == [("h2d", None, 0), ("h2d", None, 1), ("d2h", 0, None), ("d2h", 1, None)]
    assert [one["median_us"] for one in found["measurements"][4:]] == [0.8105, 0.8205]


def test_an_errored_test_says_running_first_and_error_second() -> None:
    found = nvbandwidth.parse(
        bandwidth(case(WRITE, PAIR), case(READ, [], "Running"), {"name": READ, "status": "Error"})
    )
    assert found["status"] == "partial"
    assert READ in found["error"]["message"]
    assert {one["direction"] for one in found["measurements"]} == {"push"}


def test_a_waived_test_is_no_failure() -> None:
    found = nvbandwidth.parse(
        bandwidth(case("host_to_device_memcpy_ce", [["53.1"]]), case(WRITE, [], "Waived"))
    )
    assert found["status"] == "complete"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no complete JSON"),
        (bandwidth(case(WRITE, PAIR))[:-20], "no complete JSON"),
        ("[]", "no complete JSON"),
        (bandwidth(error="CUDA_ERROR_NO_DEVICE"), "CUDA_ERROR_NO_DEVICE"),
        (bandwidth(), "measured nothing"),
        (bandwidth(case(WRITE, [["N/A", "nan"], ["1", "N/A"]])), "no measured figure"),
        (bandwidth(case(WRITE, [["N/A", "0.00"], ["1", "N/A"]])), "no measured figure"),
        (bandwidth(case(WRITE, [["N/A", "fast"], ["1", "N/A"]])), "not a number"),
        (bandwidth(case(WRITE, None)), "no bandwidth_matrix"),
        (bandwidth(case(BOTH, PAIR)), "three matrices"),
    ],
)
def test_broken_nvbandwidth_output_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadResult, match=sentence):
        nvbandwidth.parse(text)


def test_a_banner_before_the_json_is_skipped() -> None:
    assert (
        nvbandwidth.parse("nvbandwidth Version: v0.8\n" + bandwidth(case(WRITE, PAIR)))["status"]
        == "complete"
    )
