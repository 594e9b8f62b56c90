# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks that persist, verify and take back, on the recorded host."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.persisted import PersistedHost
from support.tree import changed_paths, make_recorded_host, manifest

REPO = Path(__file__).resolve().parents[2]
BESIDE_PYTHON = str(Path(sys.executable).parent / "ansible-playbook")
PLAYBOOK = os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK") or BESIDE_PYTHON


@pytest.fixture
def host(memory_path: Path) -> PersistedHost:
    return PersistedHost(make_recorded_host(memory_path / "host"))


def play(host: PersistedHost, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook against the recorded host; its reports lie beside it."""
    root = host.root
    command = [PLAYBOOK, *arguments, "-e", f"sysfs_root={root}/sys", "-e", f"procfs_root={root}/proc"]
    command += ["-e", f"state_root={root}/state", "-e", f"reports_root={root.parent}/reports"]
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def junit(host: PersistedHost) -> ET.Element:
    found = ET.parse(host.root.parent / "reports/junit/TEST-localhost.xml").getroot().find("testsuite")
    assert found is not None
    return found


def test_persist_verify_drift_and_unpersist(host: PersistedHost) -> None:
    untouched = manifest(host.root)
    persisted = play(host, "tune.yml", "--tags", "persist")
    assert persisted.returncode == 0, persisted.stdout
    assert "no drift" in persisted.stdout
    again = play(host, "tune.yml", "--tags", "persist")
    assert "changed=0" in again.stdout, again.stdout

    before = manifest(host.root)
    verified = play(host, "playbooks/verify.yml")
    assert verified.returncode == 0, verified.stdout
    assert changed_paths(before, manifest(host.root)) == []
    assert junit(host).get("failures") == "0"
    assert int(str(junit(host).get("tests"))) > 140

    host.write("proc/sys/vm/swappiness", "60\n")
    host.write("etc/sysctl.d/99-local.conf", "kernel.numa_balancing = 1\n")
    drifted = play(host, "playbooks/verify.yml")
    assert drifted.returncode != 0
    assert "sysctl:vm.swappiness: overridden: 50 above 10: reads 60" in drifted.stdout
    assert "99-local.conf:1 sets 1" in drifted.stdout
    failures = {case.get("name") for case in junit(host) if case.find("failure") is not None}
    assert failures == {"sysctl:vm.swappiness", "at_boot:sysctl:kernel.numa_balancing"}

    removed = play(host, "playbooks/unpersist.yml")
    assert removed.returncode == 0, removed.stdout
    (host.root / "etc/sysctl.d/99-local.conf").unlink()
    (host.root / "etc/sysctl.d").rmdir()
    left = changed_paths(untouched, manifest(host.root))
    assert [path for path in left if path.startswith(("etc", "usr", "var"))] == []


def test_a_gpu_that_cannot_be_set_keeps_nothing_else_from_outliving_a_reboot(memory_path: Path) -> None:
    host = PersistedHost(make_recorded_host(memory_path / "host", "--fault", "ff=0000:61:00.0"))
    run = play(host, "tune.yml", "--tags", "runtime,persist")
    assert run.returncode != 0
    assert "pcie_mrrs:0000:61:00.0: failed" in run.stdout
    assert (host.root / "etc/gpu-tuning/policy.json").exists(), run.stdout


def test_a_run_that_is_refused_persists_nothing(host: PersistedHost) -> None:
    (host.root / "state").write_text("in the way\n")
    run = play(host, "tune.yml", "--tags", "runtime,persist")
    assert run.returncode != 0
    assert not (host.root / "etc/gpu-tuning").exists(), run.stdout


def test_a_runtime_run_leaves_nothing_that_survives_a_reboot(host: PersistedHost) -> None:
    before = manifest(host.root)
    run = play(host, "tune.yml", "--tags", "runtime")
    assert run.returncode == 0, run.stdout
    changed = changed_paths(before, manifest(host.root))
    assert {path.split("/")[0] for path in changed} == {"sys", "proc", "state"}
