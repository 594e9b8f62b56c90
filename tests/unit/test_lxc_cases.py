# SPDX-License-Identifier: GPL-3.0-or-later
"""Every recorded container config: the file result, the messages, and a second run without change."""

from __future__ import annotations

import pytest
from gpu_tuning import lxc_config, lxc_devices, proc_devices
from gpu_tuning.lxc_state import Record
from support.lxc_cases import CASES, Case, cases, faults
from support.shared import shared

PATH = "/etc/pve/lxc/101.conf"


def _host(case: Case, record: Record | None = None) -> lxc_devices.Host:
    return lxc_devices.Host(
        proc_devices.parse_proc_devices(case.devices),
        record or Record(),
        proc_devices.parse_recorded(case.old_devices, "proc_devices.old"),
        dev_root="/nonexistent",
    )


def _plan(case: Case, config: bytes, host: lxc_devices.Host) -> lxc_devices.Plan:
    parsed = lxc_config.parse(config.decode("latin-1"), case.format)
    return lxc_devices.diagnose(lxc_devices.Container("101", PATH, parsed), host)


def _repair_twice(case: Case) -> tuple[lxc_devices.Plan, lxc_devices.Plan, bytes]:
    host = _host(case)
    first = _plan(case, case.config, host)
    result = first.new_text.encode("latin-1")
    host.record.remember(
        PATH, first.remembered(repaired=True), host.explicit.digest() if host.explicit else None
    )
    return first, _plan(case, result, host), result


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.path.name)
def test_the_file_is_as_expected(case: Case) -> None:
    _first, _second, result = _repair_twice(case)
    assert faults(case, result) == []


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.path.name)
def test_a_second_run_changes_nothing(case: Case) -> None:
    _first, second, _result = _repair_twice(case)
    assert second.edits == []


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.meta["must_report"]], ids=lambda case: case.path.name
)
def test_the_messages_stand_in_a_reason(case: Case) -> None:
    first, second, _result = _repair_twice(case)
    for message in case.meta["must_report"]:
        assert any(message in (row.reason or "") for row in first.rows), message
        if message != "504 now belongs to mei":  # the repair has ended that
            assert any(message in (row.reason or "") for row in second.rows), message


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.second_config], ids=lambda case: case.path.name
)
def test_the_other_container_is_left_alone(case: Case) -> None:
    assert _plan(case, case.second_config or b"", _host(case)).edits == []


def test_a_case_that_must_stay_unchanged_would_be_caught() -> None:
    case = next(case for case in cases() if case.meta["unchanged"])
    assert "the file must be unchanged" in faults(case, case.config + b"lxc.cgroup2.devices.allow: c 1:3 r\n")


def test_the_copied_cases_are_the_shared_ones() -> None:
    theirs = shared("fixtures/lxc_cases")
    for path in sorted(theirs.rglob("*")):
        if path.is_file():
            assert (CASES / path.relative_to(theirs)).read_bytes() == path.read_bytes(), path


def test_a_swap_is_not_swapped_back_by_the_same_recorded_map() -> None:
    case = next(case for case in cases() if case.path.name == "34-majors-swapped")
    first, second, _result = _repair_twice(case)
    assert len(first.edits) == 2
    assert second.edits == []
    assert {row.finding for row in second.rows if row.target in ("101/nvidia-uvm", "101/nvidia-caps")} == {
        "ok"
    }
