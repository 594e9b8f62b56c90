# SPDX-License-Identifier: GPL-3.0-or-later
"""From rows to words: outcomes, headline, table and the verdict of the later pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu_tuning import report
from gpu_tuning.rows import FAILURES, STATUSES, Row

FIXES: dict[str, Any] = {
    "swap": {"sysctl_snapshot": {"vm.swappiness": 10}, "why": "weights stay"},
    "idle": {"cpuidle_state": {"max_exit_latency_us": 2}},
    "mrrs": {"pcie_maxreadreq": {"value": 4096}},
    "peermem": {"kernel_module": {"nvidia_peermem": {}}},
}


def key(status: str, before: Any = "60", after: Any = "10", reason: str | None = None) -> Row:
    return Row("sysctl:vm.swappiness", "sysctl", "vm.swappiness", before, "10", after, status, reason)


def idle(cpu: int, status: str = "changed", state: str = "C2") -> Row:
    target = f"cpu{cpu}/{state}"
    return Row(f"cpuidle:{target}", "cpuidle", target, "enabled", "disabled", "disabled", status)


def offline(cpu: int) -> Row:
    reason = f"CPU offline: cpu{cpu} is set when it comes online"
    return Row(f"cpuidle:cpu{cpu}", "cpuidle", f"cpu{cpu}", status="not_applicable", reason=reason)


def gpu(number: int, status: str = "changed", before: Any = 512, after: Any = 4096) -> Row:
    address = f"0000:0{number}:00.0"
    return Row(f"pcie_mrrs:{address}", "pcie_mrrs", address, before, 4096, after, status, "MaxPayload 256")


PEERMEM = Row(
    "module:nvidia_peermem", "module", "nvidia_peermem", desired="loaded", status="not_applicable",
    reason="no RDMA device: /sys/class/infiniband has no entry",
)  # fmt: skip


def document(*rows: Row) -> dict[str, Any]:
    return report.result_document(
        "h", "2026-01-01T00:00:00Z", {"boot_id": "b", "kernel_release": "6"}, FIXES, list(rows)
    )


# Outcomes


def outcome(*rows: Row) -> dict[str, Any]:
    """Return the outcome of the one fix that the rows belong to."""
    return next(each for each in report.outcomes(FIXES, list(rows)) if each["rows"])


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([idle(0), idle(1)], "changed"),
        ([idle(0), idle(1, "ok")], "changed"),
        ([idle(0, "ok"), offline(1)], "ok"),
        ([idle(0), offline(1)], "changed"),
        ([offline(0), offline(1)], "not_applicable"),
        ([idle(0), idle(1, "failed"), idle(2, "rejected")], "failed"),
        ([idle(0, "would_change"), idle(1, "ok")], "would_change"),
        ([idle(0, "would_change"), idle(1, "read_only")], "read_only"),
    ],
)
def test_a_fix_is_as_its_worst_row(rows: list[Row], status: str) -> None:
    assert outcome(*rows)["status"] == status


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_an_outcome_and_a_headline(status: str) -> None:
    made = document(key(status, reason="cause: evidence"), idle(0), gpu(1), PEERMEM)
    assert made["fixes"][0]["status"] == status
    if status in ("ok", "changed"):
        assert made["headline"] == "3 of 4 fixes applied, 1 not applicable: peermem (no RDMA device)"
    elif status != "would_change":
        assert "swap (cause)" in made["headline"]


def test_the_headline_of_a_check() -> None:
    made = document(
        key("would_change", after=None), idle(0, "ok"), gpu(1, "would_change", after=None), PEERMEM
    )
    assert made["headline"] == (
        "2 of 4 fixes would be applied, 1 in place already, 1 not applicable: peermem (no RDMA device)"
    )


@pytest.mark.parametrize(
    ("rows", "summary"),
    [
        ([idle(n) for n in range(128)], "C2 disabled on 128 of 128 CPUs"),
        ([idle(0), idle(1, "failed")], "C2 disabled on 1 of 2 CPUs"),
        ([idle(0), offline(1)], "C2 disabled on 1 of 1 CPUs"),
        ([idle(0), idle(0, state="C3")], "C2 disabled on 1 of 1 CPUs, C3 disabled on 1 of 1 CPUs"),
        ([idle(n, "would_change") for n in (0, 1)], "C2 to be disabled on 2 of 2 CPUs"),
        ([offline(1)], "CPU offline"),
        ([gpu(1), gpu(2)], "MaxReadReq 512 -> 4096 on 2 of 2 functions"),
        ([gpu(1), gpu(2, before=128)], "MaxReadReq 128, 512 -> 4096 on 2 of 2 functions"),
        ([gpu(1), gpu(2, "failed", None, None)], "MaxReadReq 512 -> 4096 on 1 of 2 functions"),
        ([gpu(1, "ok", 4096)], "MaxReadReq is 4096 on 1 of 1 functions"),
        ([key("changed")], "vm.swappiness 60 -> 10"),
        ([key("ok", "10")], "vm.swappiness is 10"),
        ([key("would_change", after=None)], "vm.swappiness 60 -> 10"),
        ([key("rejected", after="60")], "vm.swappiness stays 60"),
        ([key("read_only", after="60")], "vm.swappiness stays 60"),
        ([key("clamped", after="20")], "vm.swappiness 60 -> 20 instead of 10"),
        ([key("clamped", after="60")], "vm.swappiness stays 60"),
        ([key("overridden", "10", "33")], "vm.swappiness 10 -> 33 instead of 10"),
        ([PEERMEM], "no RDMA device"),
    ],
)
def test_summary(rows: list[Row], summary: str) -> None:
    assert report.summary(rows) == summary


# The later pass


def test_a_value_that_still_stands() -> None:
    (row,) = report.verified([key("changed")], [key("ok", "10", None)])
    assert (row.status, row.after) == ("changed", "10")


def test_a_value_that_something_else_has_set() -> None:
    (row,) = report.verified([key("changed")], [key("would_change", "60", None)])
    assert (row.status, row.after) == ("overridden", "60")
    assert "a moment later it reads 60: another program sets it" in str(row.reason)


@pytest.mark.parametrize("status", ["failed", "unsupported", "not_applicable"])
def test_what_cannot_be_read_any_more_is_not_another_program(status: str) -> None:
    """A GPU that has fallen off the bus since has a reason of its own."""
    gone = gpu(1, status, None, None).with_status(status, "the device does not respond")
    (row,) = report.verified([gpu(1)], [gone])
    assert (row.status, row.after, row.reason) == (status, None, "the device does not respond")


@pytest.mark.parametrize("status", [*FAILURES, "read_only", "unsupported"])
def test_what_failed_stays_failed(status: str) -> None:
    row = key(status, reason="why")
    assert report.verified([row], [key("would_change", "60", None)]) == [row]


def test_rows_without_a_later_one() -> None:
    assert report.verified([idle(1)], []) == [idle(1)]


@pytest.mark.parametrize(
    ("fresh", "status"),
    [("ok", "ok"), ("would_change", "overridden"), ("read_only", "read_only"), ("failed", "failed")],
)
def test_a_pass_that_only_looks(fresh: str, status: str) -> None:
    (row,) = report.drifted([key(fresh, "60", None, "why")])
    assert (row.status, row.after) == (status, "60")


# What fails a play


@pytest.mark.parametrize(
    ("strict", "lenient", "failing"),
    [
        ((), (), ["rejected"]),
        (("sysctl",), (), ["rejected", "read_only"]),
        (("cpuidle",), (), ["rejected"]),
        ((), ("sysctl",), []),
        (("sysctl",), ("sysctl",), ["read_only"]),
    ],
)
def test_strict_and_lenient(strict: tuple[str, ...], lenient: tuple[str, ...], failing: list[str]) -> None:
    rows = [key("rejected"), key("read_only"), key("ok"), key("unsupported")]
    assert [row.status for row in report.failing(rows, strict, lenient)] == failing


# Documents


def test_the_document_is_json_and_whole() -> None:
    rows = [key("changed"), idle(0), idle(1), gpu(1), PEERMEM]
    made = document(*rows)
    assert report.rows_from(json.loads(json.dumps(made))["rows"]) == rows
    assert sorted(i for fix in made["fixes"] for i in fix["rows"]) == sorted(row.id for row in rows)


def test_the_table_folds_what_is_alike() -> None:
    rows = [
        *(idle(n) for n in range(3)),
        idle(3, "failed"),
        offline(4),
        gpu(1),
        gpu(2),
        key("changed"),
        PEERMEM,
    ]
    lines = [(line["setting"], line["status"]) for line in report.table(document(*rows))]
    assert lines == [
        ("vm.swappiness", "changed"),
        ("idle state C2 on 3 CPUs", "changed"),
        ("idle state C2 on 1 CPUs", "failed"),
        ("cpu4", "not_applicable"),
        ("MaxReadReq of 2 functions (0000:01:00.0, 0000:02:00.0)", "changed"),
        ("nvidia_peermem", "not_applicable"),
    ]


def test_lines_explain_only_what_would_change() -> None:
    made = document(key("would_change", after=None), idle(0, "ok"))
    assert [line for line in report.lines(made, explain=True) if "why:" in line] == [
        f"{'':<14} why: weights stay"
    ]
    assert not [line for line in report.lines(made, explain=False) if "why:" in line]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([], "nothing to roll back: no values are recorded on this host"),
        ([key("would_change"), idle(0, "ok")], "1 of 2 recorded values would be restored"),
        (
            [key("changed"), idle(0, "ok"), gpu(1, "failed")],
            "2 of 3 recorded values are in place again, 1 of them by this run",
        ),
    ],
)
def test_rollback_lines(rows: list[Row], line: str) -> None:
    assert report.rollback_lines(rows) == [line]


def test_before_is_what_the_first_run_found() -> None:
    first = report.found_first([key("ok", "10"), PEERMEM], {"sysctl:vm.swappiness": "60"})
    assert [(row.before, row.after, row.status) for row in first] == [
        ("60", None, "ok"),
        (None, None, "not_applicable"),
    ]
    assert [row.before for row in report.as_left([key("ok", "10")])] == [None]
