# SPDX-License-Identifier: GPL-3.0-or-later
"""kernel.yml over several hosts: one at a time, and the first that fails stops the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.play import recorded_host_arguments, records, run_playbook
from support.small_host import small_host


def test_a_host_that_fails_stops_the_rest(tmp_path: Path) -> None:
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    hosts = {"gpu_hosts": {"hosts": dict.fromkeys(("first", "second"), local)}}
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps(hosts))
    run = run_playbook(
        tmp_path, "playbooks/kernel.yml", "-i", str(inventory), "-e", "kernel_upgrade_loader=none-such"
    )
    assert run.returncode != 0
    assert "none-such" in run.output
    assert "first" in run.output.partition("PLAY RECAP")[2]
    assert "second" not in run.output.partition("PLAY RECAP")[2]


def test_run_time_settings_are_set_and_recorded_after_the_boot(memory_path: Path) -> None:
    small_host(memory_path / "host", cpus=2, gpus=1)
    roots = recorded_host_arguments(memory_path / "host", memory_path)
    run = run_playbook(memory_path, "playbooks/kernel.yml", "--tags", "runtime", *roots)
    assert run.returncode == 0, run.output
    assert (memory_path / "host/proc/sys/vm/swappiness").read_text() == "10\n"
    (record,) = records(memory_path)
    assert "vm.swappiness" in (record / "system-improve.md").read_text()
