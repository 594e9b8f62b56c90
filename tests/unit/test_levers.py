# SPDX-License-Identifier: GPL-3.0-or-later
"""The opt-in levers on the recorded host: what they change, to the bit, and that a rollback gives it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import acs, policy, tuner
from support.persisted import section
from support.tree import changed_bits, changed_paths, make_recorded_host, manifest

PORTS = [f"0000:{bus}:01.1" for bus in ("00", "10", "60", "70", "80", "90", "e0", "f0")]
DEVICES = "sys/bus/pci/devices"


def common(root: Path, state: str) -> dict[str, Any]:
    roots = {name: str(root / name.partition("fs")[0]) for name in ("procfs", "sysfs")}
    return {
        "procfs_root": roots["procfs"],
        "sysfs_root": roots["sysfs"],
        "state_root": f"{root}-state",
        "state": state,
        "across_boot": False,
    }


def run(root: Path, state: str, name: str, check: bool = False, **given: Any) -> dict[str, Any]:
    return tuner.run({name: section(name, **given)}, common(root, state), check)


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["target"]: row for row in result["rows"]}


@pytest.fixture
def host(memory_path: Path) -> Path:
    root = make_recorded_host(memory_path / "host", "--governor", "powersave")
    for address in ("0000:01:00.0", "0000:11:00.0"):
        for state, value in (("l1_aspm", "1"), ("l0s_aspm", "0"), ("clkpm", "1")):
            path = root / DEVICES / address / "link" / state
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{value}\n")
    return root


LEVERS: list[tuple[str, dict[str, Any], int]] = [
    ("pcie_acs", {"clear_redirects": True}, 8),
    ("cpu_frequency", {"governor": "performance", "boost": "off"}, 129),
    ("pcie_aspm", {"policy": "performance", "gpu_links": "off"}, 5),
    ("transparent_hugepages", {"enabled": "never", "defrag": "never"}, 2),
]


@pytest.mark.parametrize(("name", "wanted", "changes"), LEVERS, ids=[lever[0] for lever in LEVERS])
def test_a_lever_changes_what_it_says_and_gives_it_back(
    host: Path, name: str, wanted: dict[str, Any], changes: int
) -> None:
    found = manifest(host)
    predicted = run(host, "applied", name, check=True, **wanted)
    assert changed_paths(found, manifest(host)) == []
    applied = run(host, "applied", name, **wanted)
    assert not applied["failed"], applied
    would = {row["id"] for row in predicted["rows"] if row["status"] == "would_change"}
    changed = {row["id"] for row in applied["rows"] if row["status"] == "changed"}
    assert would == changed
    assert len(changed) == changes
    assert len(changed_paths(found, manifest(host))) == changes
    assert not run(host, "applied", name, **wanted)["changed"]
    restored = run(host, "restored", name)
    assert not restored["failed"]
    assert changed_paths(found, manifest(host)) == []


def test_acs_changes_two_bits_of_one_register_of_every_port_above_a_gpu(host: Path) -> None:
    before = {port: (host / DEVICES / port / "config").read_bytes() for port in PORTS}
    applied = run(host, "applied", "pcie_acs", clear_redirects=True)
    assert sorted(rows(applied)) == PORTS
    for port in PORTS:
        after = (host / DEVICES / port / "config").read_bytes()
        # ACS at 0x2a0, its Control at 0x2a6: 0x1d becomes 0x11.
        assert changed_bits(before[port], after) == [(0x2A6, 0x0C)]
    row = rows(applied)[PORTS[0]]
    assert (row["before"], row["after"]) == ("request_redirect completion_redirect", "none")


def test_acs_of_a_bridge_with_a_passed_through_device_is_refused(host: Path) -> None:
    driver = host / DEVICES / "0000:01:00.1/driver"
    driver.unlink()
    driver.symlink_to(host / "sys/bus/pci/drivers/vfio-pci")
    before = manifest(host)
    applied = rows(run(host, "applied", "pcie_acs", clear_redirects=True))
    assert applied["0000:00:01.1"]["status"] == "rejected"
    assert "0000:01:00.1 below this bridge belongs to vfio-pci" in applied["0000:00:01.1"]["reason"]
    assert applied["0000:10:01.1"]["status"] == "changed"
    assert not any(
        "00:01.1/config" in path and "0000:00" in path for path in changed_paths(before, manifest(host))
    )


def test_acs_gives_back_only_the_redirect_that_was_on(host: Path) -> None:
    path = host / DEVICES / PORTS[0] / "config"
    found = bytearray(path.read_bytes())
    found[0x2A6] = 0x75  # request redirect on, completion redirect off, others on
    path.write_bytes(found)
    run(host, "applied", "pcie_acs", clear_redirects=True)
    assert path.read_bytes()[0x2A6] == 0x71
    run(host, "restored", "pcie_acs")
    assert path.read_bytes() == bytes(found)


@pytest.mark.parametrize("control", [0x0000, 0x0004, 0x0008, 0x000C, 0x001D, 0x007F, 0xFFFF])
def test_acs_keeps_every_other_bit(control: int) -> None:
    cleared = acs.with_redirects(control, acs.NONE)
    assert cleared & acs.MASK == 0
    assert (cleared ^ control) & ~acs.MASK == 0
    assert acs.with_redirects(cleared, acs.redirects(control)) == control


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        (b"", None),
        (bytes(256), None),
        (bytes(4096), None),
        (b"\xff" * 4096, None),
        (bytes(0x100) + b"\x0d\x00\x01\x00" + bytes(64), 0x106),
        (bytes(0x100) + b"\x01\x00\x01\x10" + bytes(64), None),  # points at itself
        (bytes(0x100) + b"\x01\x00\xf1\xff" + bytes(64), None),  # points past the end
    ],
)
def test_the_walk_to_acs_ends_whatever_a_device_answers(config: bytes, offset: int | None) -> None:
    assert acs.find_acs(config) == offset


def test_a_host_with_one_gpu_has_no_peer_traffic(memory_path: Path) -> None:
    (memory_path / "sys").mkdir()
    row = rows(run(memory_path, "applied", "pcie_acs", clear_redirects=True))["none"]
    assert row["status"] == "not_applicable"


def test_a_governor_that_is_not_offered_is_unsupported_and_named(host: Path) -> None:
    row = rows(run(host, "applied", "cpu_frequency", governor="turbo"))["policy0/governor"]
    assert row["status"] == "unsupported"
    assert "schedutil" in row["reason"]


@pytest.mark.parametrize("name", ["cpu_frequency", "pcie_aspm", "transparent_hugepages"])
def test_a_machine_without_the_feature_says_what_is_missing(memory_path: Path, name: str) -> None:
    (memory_path / "sys").mkdir()
    wanted = dict(next(lever[1] for lever in LEVERS if lever[0] == name))
    result = run(memory_path, "applied", name, **wanted)
    assert not result["failed"]
    assert {row["status"] for row in result["rows"]} == {"not_applicable"}
    assert all(row["reason"] for row in result["rows"])


def test_boost_through_intels_inverted_switch(memory_path: Path) -> None:
    folder = memory_path / "sys/devices/system/cpu"
    for path, text in (("intel_pstate/no_turbo", "1\n"), ("cpufreq/policy0/scaling_governor", "powersave\n")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    row = rows(run(memory_path, "applied", "cpu_frequency", boost="on"))["all/boost"]
    assert (row["before"], row["after"]) == ("off", "on")
    assert (folder / "intel_pstate/no_turbo").read_text() == "0\n"


SMI = """#!/bin/sh
state=$(dirname "$0")
case $1 in
--query-gpu*) cat "$state/modes" ;;
-i) echo "$2" >>"$state/calls"
    case $4 in 1) mode=Enabled ;; 0) mode=Disabled ;; esac
    sed -i "s/^0000$2, .*/0000$2, $mode/" "$state/modes" ;;
esac
"""


def test_persistence_mode_is_asked_set_where_it_differs_and_given_back(memory_path: Path) -> None:
    (memory_path / "sys/module/nvidia").mkdir(parents=True)
    tool = memory_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    modes = memory_path / "modes"
    modes.write_text("00000000:01:00.0, Disabled\n00000000:11:00.0, Enabled\n")
    found = modes.read_text()
    given = {"mode": "on", "nvidia_smi": str(tool)}
    applied = rows(run(memory_path, "applied", "gpu_persistence_mode", **given))
    assert {target: row["status"] for target, row in applied.items()} == {
        "0000:01:00.0": "changed",
        "0000:11:00.0": "ok",
    }
    assert (memory_path / "calls").read_text() == "0000:01:00.0\n"
    assert not run(memory_path, "applied", "gpu_persistence_mode", **given)["changed"]
    run(memory_path, "restored", "gpu_persistence_mode", nvidia_smi=str(tool))
    assert modes.read_text() == found


def test_persistence_mode_of_a_recorded_machine_asks_nobody(host: Path) -> None:
    row = rows(run(host, "applied", "gpu_persistence_mode", mode="on"))["none"]
    assert row["status"] == "not_applicable"
    assert "recorded machine" in row["reason"]


# The policy


def test_a_lever_waits_for_an_override() -> None:
    levers = {"thp": {"enabled": False, "transparent_hugepages": {"enabled": "never"}, "why": "w"}}
    assert policy.plan(levers)["sections"] == {}
    turned_on = policy.plan(levers, {"thp": {"enabled": True}})
    assert turned_on["sections"] == {"transparent_hugepages": {"enabled": "never"}}
    assert "enabled" not in turned_on["fixes"]["thp"]
    with pytest.raises(policy.PolicyError, match="enabled must be true or false, not 'yes'"):
        policy.plan(levers, {"thp": {"enabled": "yes"}})
