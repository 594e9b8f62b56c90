# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole playbook for real on the machine that runs the tests: its sysctls, its CPUs' idle states."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.play import Run, records, run_playbook

APPLY = "Snapshot, apply"
SYSCTLS = {
    "kernel.numa_balancing": "0",
    "kernel.nmi_watchdog": "0",
    "kernel.sched_autogroup_enabled": "0",
    "kernel.perf_event_paranoid": "1",
    "vm.swappiness": "10",
    "vm.dirty_ratio": "5",
    "vm.dirty_background_ratio": "2",
    "net.core.rmem_max": "16777216",
    "net.core.wmem_max": "16777216",
}
CPUS = Path("/sys/devices/system/cpu")
#: Writable, but the kernel itself changes it with every process.
VOLATILE = {"kernel/ns_last_pid"}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing this machine's settings needs root")


def sysctl(name: str) -> str:
    """Read a key with procps' own command."""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True).stdout.strip()


def settings() -> dict[str, str]:
    """Return everything under /proc/sys that can be set, and every CPU's idle state flags."""
    found = {}
    for directory, _, names in os.walk("/proc/sys"):
        for path in (Path(directory, name) for name in names):
            if path.stat().st_mode & 0o200 and str(path.relative_to("/proc/sys")) not in VOLATILE:
                try:
                    found[str(path)] = path.read_text()
                except OSError:
                    continue  # write-only keys such as vm.compact_memory
    for path in CPUS.glob("cpu*/cpuidle/state*/disable"):
        found[str(path)] = path.read_text()
    return found


def slowest_idle_state() -> str:
    """Return the name of the state with the longest exit latency that is neither POLL nor C1."""
    states = [
        (int((state / "latency").read_text()), (state / "name").read_text().strip())
        for state in CPUS.glob("cpu0/cpuidle/state*")
    ]
    deep = [(latency, name) for latency, name in states if name not in ("POLL", "C1", "C1_ACPI")]
    if not deep:
        pytest.skip(f"this machine has no idle state that may be disabled: {states}")
    return max(deep)[1]


def idle_flags(name: str) -> dict[str, str]:
    """Return, per CPU, the disable flag of the state with a name."""
    return {
        state.parts[-3]: (state / "disable").read_text().strip()
        for state in CPUS.glob("cpu*/cpuidle/state*")
        if (state / "name").read_text().strip() == name
    }


@pytest.fixture
def before() -> Iterator[dict[str, str]]:
    """This machine's settings, given back whatever the test did."""
    found = settings()
    yield found
    for path, value in settings().items():
        if value != found[path]:
            Path(path).write_text(found[path])


def play(scratch: Path, playbook: str, *arguments: str) -> Run:
    name = slowest_idle_state()
    overrides = {"deep_idle_states": {"cpuidle_state": {"names": [name], "max_exit_latency_us": None}}}
    roots = {"state_root": str(scratch / "state"), "reports_root": str(scratch / "reports")}
    variables = json.dumps({"host_tuning_overrides": overrides, **roots})
    return run_playbook(scratch, playbook, "--extra-vars", variables, *arguments)


def test_check_apply_again_and_rollback_on_this_machine(before: dict[str, str], tmp_path: Path) -> None:
    idle = slowest_idle_state()
    check = play(tmp_path, "tune.yml", "--tags", "runtime", "--check", "--diff")
    assert check.returncode == 0, check.output
    assert settings() == before
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "reports").exists()

    real = play(tmp_path, "tune.yml", "--tags", "runtime")
    assert real.returncode == 0, real.output
    assert check.ids(APPLY, "would_change") == real.ids(APPLY, "changed")
    for name, value in SYSCTLS.items():
        read = sysctl(name)
        assert int(read) >= int(value) if name.startswith("net.") else read == value, name
    assert set(idle_flags(idle).values()) == {"1"}
    touched = {path for path, value in settings().items() if value != before[path]}
    allowed = {f"/proc/sys/{name.replace('.', '/')}" for name in SYSCTLS}
    assert not [
        path for path in touched if path not in allowed and not re.search(r"/cpuidle/state\d+/disable$", path)
    ]

    second = play(tmp_path, "tune.yml", "--tags", "runtime")
    assert second.returncode == 0, second.output
    assert second.recap("changed") == 0

    back = play(tmp_path, "playbooks/rollback.yml")
    assert back.returncode == 0, back.output
    assert settings() == before


def test_what_is_right_and_not_writable_is_ok(before: dict[str, str], tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/nmi_watchdog").stat().st_mode & 0o222:
        pytest.skip("kernel.nmi_watchdog is writable on this machine")
    run = play(tmp_path, "tune.yml", "--tags", "runtime", "--check")
    (row,) = [row for row in run.rows(APPLY) if row["id"] == "sysctl:kernel.nmi_watchdog"]
    assert (row["before"], row["status"]) == ("0", "ok")


def test_the_policy_keeps_quick_idle_states(before: dict[str, str], tmp_path: Path) -> None:
    run = run_playbook(tmp_path, "tune.yml", "--tags", "cpuidle", "--check")
    assert run.returncode == 0, run.output
    latencies = {int(path.read_text()) for path in CPUS.glob("cpu*/cpuidle/state*/latency")}
    if max(latencies, default=0) > 2:
        pytest.skip(f"this machine has slow idle states ({latencies} us)")
    assert {row["status"] for row in run.rows(APPLY)} <= {"ok", "not_applicable"}


def test_the_record_names_what_this_machine_lacks(before: dict[str, str], tmp_path: Path) -> None:
    assert play(tmp_path, "tune.yml", "--tags", "runtime").returncode == 0
    (folder,) = records(tmp_path)
    headline = (folder / "system-improve.md").read_text(encoding="utf-8").splitlines()[0]
    if not list(Path("/sys/class/infiniband").glob("*")):
        assert "nvidia_peermem (no RDMA device)" in headline
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["boot_id"] == boot
    journal = tmp_path / "state/journal" / f"{boot}.json"
    assert journal.stat().st_mode & 0o777 == 0o600
    assert journal.parent.stat().st_mode & 0o777 == 0o700
