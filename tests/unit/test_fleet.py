# SPDX-License-Identifier: GPL-3.0-or-later
"""Many hosts' records as one report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import fleet


def document(
    host: str, swappiness: str = "10", status: str = "changed", kernel: str = "6.8"
) -> dict[str, Any]:
    row = {"id": "sysctl:vm.swappiness", "kind": "sysctl", "target": "vm.swappiness", "after": swappiness}
    cpus = [
        {"id": f"cpuidle:cpu{n}/C2", "kind": "cpuidle", "target": f"cpu{n}/C2", "after": "disabled"}
        for n in (0, 1)
    ]
    fixes = [
        {"name": "swap", "status": status, "summary": "s", "reason": "why: x", "rows": [row["id"]]},
        {
            "name": "idle",
            "status": "ok",
            "summary": "s",
            "reason": None,
            "rows": [each["id"] for each in cpus],
        },
    ]
    return {
        "host": host,
        "recorded": "2026-01-01T00:00:00Z",
        "kernel_release": kernel,
        "fixes": fixes,
        "rows": [row, *cpus],
    }


def test_equal_hosts_are_one_group_and_the_odd_ones_say_how_they_differ() -> None:
    hosts = [document(f"gpu{n:03}") for n in range(1, 99)]
    # How a host got there makes no difference.
    hosts[3] = document("gpu004", status="ok")
    hosts += [document("gpu099", swappiness="60", status="overridden"), document("spare", kernel="6.5")]
    words = fleet.lines(hosts)
    assert words == [
        "100 hosts in 3 groups",
        "98 alike: gpu[001-098]",
        "    kernel: 6.8",
        "    swap: in place: vm.swappiness 10",
        "    idle: in place: C2 disabled on 2",
        "1 differing: gpu099",
        "    swap: overridden: why, not in place: vm.swappiness 10",
        "1 differing: spare",
        "    kernel: 6.5, not 6.8",
    ]


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        (["a", "b"], "a, b"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n1", "n3"], "n1, n3"),
        (["n009", "n010"], "n[009-010]"),
        (["n9", "n010"], "n9, n010"),
        (["gpu1.site", "gpu2.site", "gpu2.other"], "gpu2.other, gpu[1-2].site"),
        (["127.0.1.1", "127.0.1.2"], "127.0.1.[1-2]"),
        ([], ""),
    ],
)
def test_names_fold_runs_of_numbers(hosts: list[str], folded: str) -> None:
    assert sorted(fleet.names(hosts).split(", ")) == sorted(folded.split(", "))


def test_the_newest_record_of_each_host_counts_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    for host, stamp, text in (
        ("a", "2026-01-01T000000Z", json.dumps(document("a", "60"))),
        ("a", "2026-01-02T000000Z", json.dumps(document("a", "10"))),
        ("b", "2026-01-01T000000Z", "{"),
        ("c", ".partial", "{}"),
    ):
        folder = tmp_path / host / stamp
        folder.mkdir(parents=True)
        if stamp != ".partial":
            (folder / "result.json").write_text(text)
    documents, lost = fleet.newest(tmp_path)
    assert [each["rows"][0]["after"] for each in documents] == ["10"]
    assert len(lost) == 1
    assert "b/2026-01-01T000000Z/result.json cannot be read" in lost[0]


def test_no_record_is_said() -> None:
    assert fleet.lines([]) == ["no host has a record yet"]
