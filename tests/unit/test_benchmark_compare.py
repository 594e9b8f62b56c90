# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdicts: right on arms that differ and on arms that do not, never significant from single runs."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
from benchmark_samples import ROOT, measurement, noisy
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="SciPy is missing: pip install -r requirements/benchmark.txt")
from benchmark_report import compare, conclude, fingerprints
from benchmark_report.metrics import Metric, metrics


def metric(floor: float = 0.03, higher: bool = True) -> Metric:
    return Metric("x", "inference", "throughput", "x", "tok/s", higher, floor, True, [1.0])


def verdict(before: list[float], after: list[float], **options: Any) -> compare.Comparison:
    found = compare.compare_metric(metric(**options), before, after)
    compare.judge(found)
    return found


QUIET = [100.0, 100.4, 99.7, 100.9, 99.2]


def test_the_four_verdicts() -> None:
    assert verdict(QUIET, [1.1 * one for one in QUIET]).verdict == "improved"
    assert verdict(QUIET, [0.9 * one for one in QUIET]).verdict == "regressed"
    assert verdict(QUIET, [1.001 * one for one in QUIET]).verdict == "no change"
    assert verdict([80.0, 120, 95, 110, 100], [90.0, 125, 99, 118, 101]).verdict == "inconclusive"


def test_lower_is_better_for_latencies() -> None:
    assert verdict(QUIET, [0.8 * one for one in QUIET], higher=False).verdict == "improved"
    assert verdict(QUIET, [1.2 * one for one in QUIET], higher=False).verdict == "regressed"


@pytest.mark.parametrize(
    ("before", "after"), [([38.0], [66.0]), ([38.0], [1000.0]), ([38.0, 39, 38], [66.0])]
)
def test_single_runs_are_never_significant(before: list[float], after: list[float]) -> None:
    found = verdict(before, after)
    assert found.verdict == "inconclusive"
    assert found.interval is None
    assert "never significant" in found.reason


def test_three_runs_cannot_reach_significance_however_large_the_effect() -> None:
    found = verdict([100.0, 100.1, 99.9], [200.0, 200.1, 199.9])
    assert found.verdict == "inconclusive"
    assert "exact test" in found.reason


def test_an_effect_below_twice_the_noise_is_not_called() -> None:
    before = [95.0, 99, 101, 104, 97, 103, 100]
    found = verdict(before, [1.06 * one for one in before])
    assert found.least_effect > 0.06
    assert found.verdict == "inconclusive"


def test_an_inconclusive_result_says_how_many_runs_would_tell() -> None:
    assert (
        "runs per arm would see 3 %" in verdict([80.0, 120, 95, 110, 100], [90.0, 125, 99, 118, 101]).reason
    )


def test_figures_without_noise_are_compared_as_they_are() -> None:
    assert verdict([50.0] * 5, [50.0] * 5).verdict == "no change"
    assert verdict([50.0] * 5, [60.0] * 5).verdict == "improved"


def test_holm_by_hand() -> None:
    assert compare.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert compare.holm([]) == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1, 1e4), min_size=5, max_size=8), st.lists(st.floats(1, 1e4), min_size=5, max_size=8)
)
def test_swapping_the_arms_turns_the_verdict_round(one: list[float], other: list[float]) -> None:
    turned = {"improved": "regressed", "regressed": "improved"}
    there, back = verdict(one, other), verdict(other, one)
    if there.least_effect < 0.5:  # beyond, +x % and -x % are too far apart to be one effect
        assert back.verdict in (turned.get(there.verdict, there.verdict), "inconclusive") or (
            there.verdict == "inconclusive"
        )
    assert there.interval is not None
    assert there.interval[0] <= there.interval[1]


DRAWS = 200


@pytest.mark.parametrize("runs", [5, 7])
@pytest.mark.parametrize("cv", [0.01, 0.05])
def test_false_positives_and_power_are_counted(
    runs: int, cv: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fixed seed: the share of verdicts on equal arms, and on arms 10 % apart."""
    pick = random.Random(1000 * runs + round(100 * cv))

    def share(effect: float) -> float:
        called = 0
        for _ in range(DRAWS):
            before = [noisy(pick, 100, cv) for _ in range(runs)]
            after = [noisy(pick, 100 * (1 + effect), cv) for _ in range(runs)]
            called += verdict(before, after).verdict in ("improved", "regressed")
        return called / DRAWS

    false, power = share(0.0), share(0.10)
    with capsys.disabled():
        print(
            f"\n  n={runs} CV={100 * cv:g} %: false positives {100 * false:.2f} %,"
            f" sees 10 % in {100 * power:.0f} %"
        )
    assert false <= 0.02
    assert power >= (0.99 if cv == 0.01 else 0.25)


def test_a_family_of_headline_metrics_rarely_cries_wolf(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = 0
    for seed in range(40):
        found = compare.compare(measurement("a", 2 * seed, cv=0.03), measurement("b", 2 * seed + 1, cv=0.03))
        headline = [one for one in found if one.metric.headline]
        assert len(headline) == 10
        wrong += any(one.verdict in ("improved", "regressed") for one in headline)
    with capsys.disabled():
        print(f"\n  any of 10 headline verdicts wrong in {wrong} of 40 equal comparisons")
    assert wrong <= 2


MRRS = {f"pcie_mrrs:0000:{gpu:02x}:00.0": 512 for gpu in range(8)}


def report(
    before: dict[str, Any], after: dict[str, Any], *expected: str, show: bool = False
) -> dict[str, Any]:
    return conclude.conclude(before, after, list(expected or ["settings"]), "show" if show else "refuse")


def by_id(found: dict[str, Any]) -> dict[str, Any]:
    return {one["id"]: one for one in found["comparison"]}


def test_a_null_result_is_explained_from_what_changed() -> None:
    before = measurement("before", 1, settings=MRRS)
    after = measurement("after", 2, settings=dict.fromkeys(MRRS, 4096))
    push = by_id(report(before, after))["fabric.push.same"]
    assert push["verdict"] == "no change"
    assert "MaxReadReq changed 512 -> 4096 on 8 targets" in push["explanation"]
    assert (
        "P2P copies are posted writes, bounded by MaxPayload 256: no effect expected" in push["explanation"]
    )
    assert push["explanation"].endswith("None seen.")
    assert "an effect is possible" in by_id(report(before, after))["fabric.h2d.own"]["explanation"]


def test_an_improvement_that_nothing_explains_is_doubted() -> None:
    before = measurement("before", 1, settings=MRRS)
    after = measurement("after", 2, settings=dict.fromkeys(MRRS, 4096), push=1.1)
    push = by_id(report(before, after))["fabric.push.same"]
    assert push["verdict"] == "improved"
    assert "look for another cause" in push["explanation"]
    same = by_id(report(before, measurement("after", 2, settings=MRRS, push=1.1)))["fabric.push.same"]
    assert "No recorded setting changed, so the cause is elsewhere" in same["explanation"]


def changed(path: list[str], value: Any) -> dict[str, Any]:
    after = copy.deepcopy(measurement("after", 2))
    place: Any = after
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return after


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["fingerprint", "kernel"], "6.17.1", "kernel: 6.8.12-4-pve -> 6.17.1"),
        (["fingerprint", "cmdline"], ["quiet", "iommu=off"], "cmdline iommu: pt -> off"),
        (["fingerprint", "driver"], "600.1", "driver: 595.45 -> 600.1"),
        (["fingerprint", "environment"], {}, "environment NCCL_P2P_LEVEL: SYS -> (absent)"),
        (["fingerprint", "iommu"], ["DMA-FQ"], "iommu DMA-FQ: (absent) -> set"),
        (["workload", "inference", "output_length"], 128, "workload output_length: 256 -> 128"),
    ],
)
def test_another_fingerprint_is_refused(path: list[str], value: Any, said: str) -> None:
    found = report(measurement("before", 1), changed(path, value))
    assert any(said in line for line in found["refused"]), found["refused"]
    assert found["comparison"] == []


def test_what_was_meant_to_differ_is_compared() -> None:
    found = report(
        measurement("before", 1), changed(["fingerprint", "kernel"], "6.17.1"), "settings", "kernel"
    )
    assert found["refused"] == []
    assert found["differences"] == [
        {"part": "kernel", "name": "", "before": "6.8.12-4-pve", "after": "6.17.1", "expected": True}
    ]


def test_showing_compares_and_says_what_differs_but_never_another_workload() -> None:
    shown = report(measurement("before", 1), changed(["fingerprint", "driver"], "600.1"), show=True)
    assert shown["comparison"]
    assert any("More differs than was meant to: driver: 595.45 -> 600.1" in note for note in shown["notes"])
    refused = report(measurement("before", 1), changed(["workload", "inference", "tool"], "vllm"), show=True)
    assert refused["comparison"] == []


def test_a_part_that_was_not_recorded_is_no_difference() -> None:
    before = measurement("before", 1)
    before["fingerprint"] = {}
    found = report(before, measurement("after", 2))
    assert found["refused"] == []
    assert "kernel" in found["baseline"]["unrecorded"]
    assert fingerprints.differences({}, {}) == []


def test_the_known_figures_conclude_what_can_be_concluded() -> None:
    folder = ROOT / "roles/gpu_benchmark/files/baselines"
    known = conclude.load(str(folder / "known-figures.json"))
    figures = metrics(known)
    assert {figures[f"fabric.{name}"].median for name in ("push.same", "push.cross", "h2d.own")} == {
        50,
        37,
        53,
    }
    assert round(100 * (figures["fabric.push.same"].share_of_ceiling or 0), 1) == 87.0
    assert figures["inference.decode.c1"].median == 10.36
    later = conclude.load(str(folder / "known-figures-later.json"))
    found = by_id(conclude.conclude(known, later, ["settings"]))
    throughput = found["inference.throughput.c10"]
    assert (throughput["before"], throughput["after"]) == ([38.0], [66.0])
    assert {one["verdict"] for one in found.values()} == {"inconclusive"}


def test_failed_runs_are_left_out_and_said() -> None:
    after = measurement("after", 2)
    after["inference"]["runs"][0]["problems"] = ["8 of 48 requests completed"]
    found = report(measurement("before", 1), after)
    assert len(by_id(found)["inference.throughput.c1"]["after"]) == 4
    assert any("1 of 15 inference runs do not count" in note for note in found["notes"])


def test_unknown_links_have_no_ceiling_and_unread_payload_is_assumed_and_said() -> None:
    bare = measurement("x", 1)
    for run in bare["fabric"]["runs"]:
        for device in run["devices"]:
            device["max_payload_size"] = None
    push = metrics(bare)["fabric.push.same"]
    assert push.ceiling == pytest.approx(57.46, abs=0.01)
    assert "assumed" in push.ceiling_note
    for run in bare["fabric"]["runs"]:
        for cell in run["measurements"]:
            cell["link_under_load"] = {"speed": "Unknown", "width": 16}
    assert metrics(bare)["fabric.push.same"].ceiling is None


def test_next_steps_follow_severity_and_the_roofline() -> None:
    findings = [
        {"severity": "P2", "title": "later", "remedy": "b"},
        {"severity": "P0", "title": "first", "remedy": "a", "effect": "16 -> 50 GB/s", "target": "GPU 0"},
        {"severity": "P0", "title": "first", "remedy": "a", "effect": "16 -> 50 GB/s", "target": "GPU 1"},
        {"severity": "info", "title": "a note", "remedy": "none"},
    ]
    steps = conclude.conclude(None, measurement("x", 1), [], findings=findings)["next_steps"]
    assert [step.split(":")[0] for step in steps[:2]] == ["[P0] first", "[P2] later"]
    assert "CUDA graphs" in steps[2]


def test_no_roofline_without_a_bandwidth_is_said() -> None:
    bare = measurement("x", 1)
    bare["fingerprint"]["gpus"] = []
    found = conclude.conclude(None, bare, [])
    assert found["roofline"] == []
    assert any("No roofline" in note for note in found["notes"])


def test_both_rooflines_are_reported_with_their_shares() -> None:
    found = conclude.conclude(None, measurement("x", 1, cv=0.0001), [])["roofline"]
    shares = {one["name"]: round(100 * one["share"], 1) for one in found}
    assert shares == {"recorded assumption": 3.3, "checkpoint's own formats": 7.1}
    assert all(math.isfinite(one["tokens_per_s"]) for one in found)
