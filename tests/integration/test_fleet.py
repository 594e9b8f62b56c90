# SPDX-License-Identifier: GPL-3.0-or-later
"""Many hosts in one run: readable output, failures that stop nobody else, and a second run for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.small_host import small_host

REPO = Path(__file__).resolve().parents[2]
BESIDE_PYTHON = str(Path(sys.executable).parent / "ansible-playbook")
PLAYBOOK = os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK") or BESIDE_PYTHON
GOOD = [f"gpu{number:02}" for number in range(1, 6)]


@pytest.fixture
def place(memory_path: Path) -> Path:
    """Five hosts, one that cannot be reached, and one whose journal cannot be written."""
    for name in (*GOOD, "dark", "broken"):
        small_host(memory_path / name, cpus=2, gpus=1)
    (memory_path / "broken-state").write_text("in the way\n")
    hosts: dict[str, dict[str, Any]] = {name: {"ansible_connection": "local"} for name in (*GOOD, "broken")}
    hosts["dark"] = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    for name, variables in hosts.items():
        variables.update(
            procfs_root=f"{memory_path / name}/proc",
            sysfs_root=f"{memory_path / name}/sys",
            state_root=f"{memory_path / name}-state",
        )
    common = {"ansible_python_interpreter": sys.executable, "reports_root": str(memory_path / "reports")}
    inventory = {"all": {"vars": common, "children": {"gpu_hosts": {"hosts": hosts}}}}
    (memory_path / "hosts.json").write_text(json.dumps(inventory))
    return memory_path


def play(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ANSIBLE_RETRY_FILES_SAVE_PATH": str(place / "retry"),
        "ANSIBLE_NOCOLOR": "1",
    }
    # As ansible.cfg has it.
    environment.pop("ANSIBLE_RETRY_FILES_ENABLED", None)
    command = [PLAYBOOK, *arguments, "-i", str(place / "hosts.json")]
    return subprocess.run(
        command,
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def lines_of(output: str, host: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"{host}: ")]


def test_failing_hosts_stop_nobody_and_a_run_for_the_rest_finishes(place: Path) -> None:
    first = play(place, "tune.yml", "--tags", "runtime")
    assert first.returncode != 0
    for host in GOOD:
        (line,) = lines_of(first.stdout, host)
        assert "fixes applied" in line
        assert (place / host / "proc/sys/vm/swappiness").read_text() == "10\n"
    assert "unreachable" in lines_of(first.stdout, "dark")[0]
    assert "broken-state" in lines_of(first.stdout, "broken")[0]
    assert "5 of 7 hosts ok; 1 failed: broken; 1 unreachable: dark" in first.stdout
    # A banner and a line per host and one at the end, and warnings nowhere.
    assert len([line for line in first.stdout.splitlines() if line.strip()]) <= 12, first.stdout

    (place / "broken-state").unlink()
    inventory = json.loads((place / "hosts.json").read_text())
    inventory["all"]["children"]["gpu_hosts"]["hosts"]["dark"]["ansible_connection"] = "local"
    (place / "hosts.json").write_text(json.dumps(inventory))
    (retry,) = (place / "retry").glob("*.retry")
    assert sorted(retry.read_text().split()) == ["broken", "dark"]
    second = play(place, "tune.yml", "--tags", "runtime", "--limit", f"@{retry}")
    assert second.returncode == 0, second.stdout
    assert not any(host in second.stdout for host in GOOD)
    for host in ("broken", "dark"):
        assert (place / host / "proc/sys/vm/swappiness").read_text() == "10\n"

    report = play(place, "playbooks/fleet-report.yml", "-e", f"reports_root={place}/reports")
    assert "7 hosts in 1 groups" in report.stdout
    assert "broken, dark, gpu[01-05]" in report.stdout
