# SPDX-License-Identifier: GPL-3.0-or-later
"""The repair at boot: installed with --tags persist and only then, checked, runnable, removable."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tree import manifest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "module_utils" / "gpu_tuning"
UNIT = "gpu-tuning-lxc-devices.service"
ALLOW = "lxc.cgroup2.devices.allow"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("installing a unit needs root")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze to check the unit with")
    for name in ("proc", "dev", "pve/lxc", "units"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc" / "devices").write_text("Character devices:\n195 nvidia\n509 nvidia-uvm\n")
    (tmp_path / "pve" / "lxc" / "101.conf").write_text(f"{ALLOW}: c 509:* rwm\n")
    return tmp_path


def _play(host: Path, *arguments: str, playbook: str = "playbooks/lxc.yml", **variables: Any) -> str:
    roots = {f"lxc_gpu_devices_{name}_root": str(host / name) for name in ("pve", "lxc", "lock")}
    extra = {
        **{
            f"{name}_root": str(host / {"procfs": "proc"}.get(name, name))
            for name in ("procfs", "dev", "state")
        },
        **roots,
        "lxc_gpu_devices_library": str(host / "library"),
        "lxc_gpu_devices_unit_directory": str(host / "units"),
        **variables,
    }
    command = [
        os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK", "ansible-playbook"),
        *("-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"),
        *("-e", json.dumps(extra), *arguments, playbook),
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_the_tag_nothing_is_installed(host: Path) -> None:
    _play(host)
    assert list((host / "units").iterdir()) == []
    assert not (host / "library").exists()


def test_after_a_kernel_upgrade_the_repair_runs_by_its_tag_and_installs_nothing(host: Path) -> None:
    _play(host)  # records that the rule means nvidia-uvm
    (host / "proc" / "devices").write_text("Character devices:\n195 nvidia\n504 nvidia-uvm\n")
    _play(host, "--tags", "containers", playbook="playbooks/kernel.yml")
    assert (host / "pve/lxc/101.conf").read_text() == f"{ALLOW}: c 504:* rwm\n"
    assert list((host / "units").iterdir()) == []


def test_check_mode_of_the_whole_role_writes_nothing(host: Path) -> None:
    before = manifest(host)
    _play(host, "--check")
    assert manifest(host) == before


def test_installed_checked_runnable_idempotent_and_removable(host: Path) -> None:
    _play(host, "--tags", "persist")
    assert "changed=0" in _play(host, "--tags", "persist")
    unit = host / "units" / UNIT
    text = unit.read_text()
    assert "Before=pve-guests.service pve-ha-lrm.service lxc.service" in text
    subprocess.run(["systemd-analyze", "verify", str(unit)], check=True)
    config = host / "pve" / "lxc" / "101.conf"
    _play(host)  # records that the rule means nvidia-uvm
    (host / "proc" / "devices").write_text("Character devices:\n195 nvidia\n504 nvidia-uvm\n")
    _run_unit(text, host)
    assert config.read_text() == f"{ALLOW}: c 504:* rwm\n"
    _play(host, "--tags", "persist", lxc_gpu_devices_persist=False)
    assert not unit.exists()
    assert not (host / "library" / "gpu_tuning").exists()


def _run_unit(text: str, host: Path) -> None:
    """Run the unit's command with its environment, on the recorded machine."""
    command = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    environment = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE))
    assert command
    arguments = [part.strip('"') for part in command.group(1).split()]
    roots = ["--procfs-root", str(host / "proc"), "--dev-root", str(host / "dev"), "--no-load"]
    subprocess.run([*arguments, *roots], check=True, env={"PATH": os.environ["PATH"], **environment}, cwd="/")


def test_the_list_of_files_is_what_the_boot_repair_imports() -> None:
    names, waiting = {"__init__.py"}, ["lxc_boot.py"]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        text = (PACKAGE / name).read_text()
        found = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
        for imported in re.findall(r"^from \. import (.+)$", text, re.MULTILINE):
            found += [part.split(" as ")[0].strip() for part in imported.split(",")]
        waiting += [f"{module}.py" for module in found]
    listed = yaml.safe_load((REPO / "roles" / "lxc_gpu_devices" / "vars" / "main.yml").read_text())
    assert set(listed["__lxc_gpu_devices_files"]) == names
