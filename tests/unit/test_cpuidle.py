# SPDX-License-Identifier: GPL-3.0-or-later
"""Idle states: which are chosen, on recorded state lists of many drivers, and what happens to their CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpu_tuning import cpuidle, engine, journal
from gpu_tuning.rows import Row
from support.shared import shared
from support.small_host import IDLE_STATES, SmallHost, small_host


def kind(host: SmallHost, limit: int | None = None, names: list[str] | None = None) -> cpuidle.IdleStates:
    return cpuidle.IdleStates(limit, names, str(host.root / "sys"))


def disabled(host: SmallHost) -> list[str]:
    """Return cpu/state for every state that is disabled."""
    return sorted(
        f"{path.parts[-4]}/{(path.parent / 'name').read_text().strip()}"
        for path in host.root.glob("sys/devices/system/cpu/cpu*/cpuidle/state*/disable")
        if path.read_text() != "0\n"
    )


def apply(host: SmallHost, *kinds: engine.Kind) -> dict[str, Row]:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.applied(kinds, kept)}


def restore(host: SmallHost, *names: str) -> dict[str, Row]:
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        kept.load()
        rows = engine.restored([kind(host, names=list(names) or None)], kept, check=False)
    return {row.target: row for row in rows}


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    return small_host(memory_path / "host", cpus=3, gpus=0)


# Names


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, True) for name in ("POLL", "C0", "snooze", "C1", "C1_ACPI", "NHM-C1", "C1-SNB", "ATM-C1")),
        *((name, False) for name in ("C1E", "C1E-SNB", "C2", "C10", "C6", "NHM-C6", "C11", "haltpoll idle")),
        *((name, False) for name in ("CEDE", "c1x", "XC1", "MC1E")),
    ],
)
def test_poll_and_c1_are_kept_under_all_names(name: str, kept: bool) -> None:
    assert cpuidle.is_kept(name) is kept
    if kept:
        with pytest.raises(ValueError, match=f"{name} is never disabled"):
            cpuidle.checked_names(["C6", name])
    else:
        assert cpuidle.checked_names([name]) == [name]


# Recorded state lists: file, driver, what a limit of 2 us disables


def recorded_states(text: str) -> tuple[str, list[tuple[str, int]]]:
    """Read driver and (name, latency) from the output of ``cpupower idle-info``."""
    driver, names, latencies = "none", "", []
    for line in text.splitlines():
        word, _, value = (part.strip() for part in line.partition(":"))
        if word == "CPUidle driver":
            driver = value
        elif word == "Available idle states":
            names = value
        elif word == "Latency":
            latencies.append(int(value))
    return driver, list(zip(names.split(), latencies))


CHOSEN = {
    "amd-0x814-lat30": ["C2"],
    "amd-bc250-c3": ["C2", "C3"],
    "amd-zen-0x814-lat100": ["C2"],
    "amd-zen-0x814-lat400": ["C2"],
    "epyc7451-naples": ["C2"],
    "intel-e5-2680-acpi": ["C2", "C3"],
    "intel-e7-4870-nhm": ["NHM-C3", "NHM-C6"],
    "intel-i7-1165g7-acpi-suffix": ["C2_ACPI", "C3_ACPI"],
    "intel-icelake-c1e-c6": ["C1E", "C6"],
    "no-cpuidle-vm": [],
    "opteron6328-vm": ["C2"],
    "power-snooze-cede": ["CEDE"],
    "server-c1-only": [],
}


@pytest.mark.parametrize(("recorded", "chosen"), CHOSEN.items(), ids=CHOSEN)
def test_a_limit_chooses_what_is_slower(memory_path: Path, recorded: str, chosen: list[str]) -> None:
    driver, states = recorded_states(shared(f"fixtures/text/cpuidle/{recorded}.txt").read_text())
    assert bool(states) is (driver != "none")
    host = small_host(memory_path / "host", cpus=2, gpus=0, idle_states=states)
    apply(host, kind(host, limit=2))
    assert disabled(host) == sorted(f"cpu{cpu}/{name}" for cpu in (0, 1) for name in chosen)
    restore(host)
    assert disabled(host) == []


def test_the_table_has_every_recorded_list() -> None:
    files = {path.stem for path in shared("fixtures/text/cpuidle").glob("*.txt")}
    assert {name for name in files if not name.startswith("turbostat")} == set(CHOSEN)


@pytest.mark.parametrize(
    ("limit", "chosen"), [(0, ["C1E", "C6"]), (4, ["C6"]), (169, ["C6"]), (170, []), (10**9, [])]
)
def test_the_limit_itself_is_allowed(memory_path: Path, limit: int, chosen: list[str]) -> None:
    states = [("POLL", 0), ("C1", 1), ("C1E", 4), ("C6", 170)]
    host = small_host(memory_path / "host", cpus=1, gpus=0, idle_states=states)
    apply(host, kind(host, limit=limit))
    assert disabled(host) == [f"cpu0/{name}" for name in chosen]


def test_numbers_mean_nothing(memory_path: Path) -> None:
    """The same names under other numbers on another CPU, as on hosts with two sorts of cores."""
    host = small_host(memory_path / "host", cpus=2, gpus=0)
    shutil.move(host.idle_state(1, 2), host.idle_state(1, 10))
    shutil.move(host.idle_state(1, 1), host.idle_state(1, 2))
    apply(host, kind(host, limit=2))
    assert disabled(host) == ["cpu0/C2", "cpu1/C2"]


def test_a_rollback_finds_a_state_that_has_another_number(host: SmallHost) -> None:
    apply(host, kind(host, limit=2))
    shutil.move(host.idle_state(1, 2), host.idle_state(1, 3))
    assert {row.status for row in restore(host).values()} == {"changed"}
    assert disabled(host) == []


def test_by_name(memory_path: Path) -> None:
    host = small_host(memory_path / "host", cpus=1, gpus=0, idle_states=[("POLL", 0), ("haltpoll idle", 1)])
    rows = apply(host, kind(host, names=["haltpoll idle"]))
    assert disabled(host) == ["cpu0/haltpoll idle"]
    assert rows["cpu0/haltpoll idle"].reason == "haltpoll idle is named by the policy (exit latency 1 us)"


@pytest.mark.parametrize(
    ("states", "limit", "names", "status", "reason"),
    [
        ((), 2, None, "not_applicable", "no idle states: cpuidle driver is none"),
        (IDLE_STATES, None, ["C6"], "not_applicable", "no such idle state: C6; driver acpi_idle has C1 1 us"),
        (IDLE_STATES, 100, None, "ok", "no idle state deeper than C1 is slower than 100 us"),
    ],
)
def test_one_row_says_why_nothing_is_selected(
    memory_path: Path,
    states: list[tuple[str, int]],
    limit: int | None,
    names: list[str] | None,
    status: str,
    reason: str,
) -> None:
    host = small_host(memory_path / "host", gpus=0, idle_states=states)
    (row,) = kind(host, limit, names).capture()
    assert (row.id, row.status) == ("cpuidle:all", status)
    assert str(row.reason).startswith(reason)


def test_no_cpus_at_all(memory_path: Path) -> None:
    (row,) = cpuidle.IdleStates(2, None, str(memory_path)).capture()
    assert row.status == "not_applicable"


# CPUs that come and go


def test_an_offline_cpu_has_a_row(host: SmallHost) -> None:
    (host.cpu(2) / "online").write_text("0\n")
    rows = apply(host, kind(host, limit=2))
    assert (rows["cpu2"].status, rows["cpu2"].before) == ("not_applicable", None)
    assert str(rows["cpu2"].reason).startswith("CPU offline: ")
    assert disabled(host) == ["cpu0/C2", "cpu1/C2"]


def go_offline(host: SmallHost, cpu: int) -> None:
    """Do what the kernel does: the CPU's cpuidle folder goes away."""
    (host.cpu(cpu) / "online").write_text("0\n")
    shutil.rmtree(host.cpu(cpu) / "cpuidle")


class Going(cpuidle.IdleStates):
    """Idle states of a host whose cpu2 goes offline at a step of the run."""

    host: SmallHost
    step: str

    def _states(self, cpu: int) -> list[cpuidle.IdleState]:
        if (self.step, cpu) == ("listing", 2):
            go_offline(self.host, 2)
        states = super()._states(cpu)
        if (self.step, cpu) == ("capturing", 2):
            go_offline(self.host, 2)
        return states

    def write(self, row: Row) -> None:
        if (self.step, row.target) == ("writing", "cpu2/C2"):
            go_offline(self.host, 2)
        super().write(row)
        if (self.step, row.target) == ("reading back", "cpu2/C2"):
            go_offline(self.host, 2)


@pytest.mark.parametrize("step", ["listing", "capturing", "writing", "reading back"])
def test_a_cpu_that_goes_offline_midway(host: SmallHost, step: str) -> None:
    going = Going(2, None, str(host.root / "sys"))
    going.host, going.step = host, step
    rows = apply(host, going)
    assert {rows["cpu0/C2"].status, rows["cpu1/C2"].status} == {"changed"}
    gone = [row for row in rows.values() if row.target.startswith("cpu2")]
    assert [row.status for row in gone] == ["not_applicable"]
    assert str(gone[0].reason).startswith("CPU offline: cpu2")


def test_a_cpu_without_idle_states_is_not_left_out(host: SmallHost) -> None:
    shutil.rmtree(host.cpu(1) / "cpuidle")
    rows = apply(host, kind(host, limit=2))
    assert (rows["cpu1"].status, rows["cpu1"].before) == ("not_applicable", None)
    assert disabled(host) == ["cpu0/C2", "cpu2/C2"]


def test_a_cpu_that_is_offline_at_the_rollback_stays_recorded(host: SmallHost) -> None:
    apply(host, kind(host, limit=2))
    shutil.move(host.cpu(2) / "cpuidle", host.root / "parked")
    (host.cpu(2) / "online").write_text("0\n")
    rows = restore(host)
    assert (rows["cpu0/C2"].status, rows["cpu2/C2"].status) == ("changed", "failed")
    assert "cpu2/C2" in str(rows["cpu2/C2"].reason)
    shutil.move(host.root / "parked", host.cpu(2) / "cpuidle")
    (host.cpu(2) / "online").write_text("1\n")
    assert list(restore(host)) == ["cpu2/C2"]
    assert disabled(host) == []


def test_an_attribute_that_makes_no_sense(host: SmallHost) -> None:
    (host.idle_state(1, 2) / "disable").write_text("maybe\n")
    rows = apply(host, kind(host, limit=2))
    assert (rows["cpu1/C2"].status, rows["cpu0/C2"].status) == ("failed", "changed")
    assert "reads 'maybe', expected 0 or 1" in str(rows["cpu1/C2"].reason)


# Whose states they are


def test_only_what_this_tool_disabled_is_enabled_again(host: SmallHost) -> None:
    (host.idle_state(0, 2) / "disable").write_text("1\n")
    rows = apply(host, kind(host, limit=2))
    assert (rows["cpu0/C2"].status, rows["cpu1/C2"].status) == ("ok", "changed")
    restore(host)
    assert disabled(host) == ["cpu0/C2"]


def test_what_someone_else_disables_later_is_left(memory_path: Path) -> None:
    states = [("POLL", 0), ("C1", 1), ("C2", 100), ("C3", 400)]
    host = small_host(memory_path / "host", cpus=1, gpus=0, idle_states=states)
    kept = journal.Journal(str(host.state_root), "boot")
    with kept.locked():
        engine.captured([kind(host)], kept)
    apply(host, kind(host, names=["C2"]))
    (host.idle_state(0, 3) / "disable").write_text("1\n")
    restore(host)
    assert disabled(host) == ["cpu0/C3"]


def test_restoring_one_name_leaves_the_others(memory_path: Path) -> None:
    states = [("POLL", 0), ("C1", 1), ("C2", 100), ("C3", 400)]
    host = small_host(memory_path / "host", cpus=1, gpus=0, idle_states=states)
    apply(host, kind(host, limit=2))
    assert list(restore(host, "C3")) == ["cpu0/C3"]
    assert disabled(host) == ["cpu0/C2"]
