# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks give the same result with the ansible-core under test as with the one in .venv."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.play import recorded_host_arguments, records, run_playbook
from support.small_host import SmallHost, small_host
from support.tree import changed_paths, manifest

OVERRIDES = {
    "host_tuning_overrides": {
        "swappiness": {"sysctl_snapshot": {"vm.swappiness": 1}},
        "nmi_watchdog": None,
        "receive_buffers": {"sysctl_snapshot": {"net.ipv4.tcp_rmem": "4096 131072 33554432"}},
    }
}


def whole_story(host: SmallHost, scratch: Path) -> dict[str, Any]:
    """Check, tune, verify, tune again, roll back; return all that must not depend on the version."""
    common = [*recorded_host_arguments(host.root, scratch), "--extra-vars", json.dumps(OVERRIDES)]
    start = manifest(host.root)
    check = run_playbook(scratch, "tune.yml", "--tags", "runtime", "--check", "--diff", *common)
    assert check.returncode == 0, check.output
    assert manifest(host.root) == start
    first = run_playbook(scratch, "tune.yml", "--tags", "runtime", *common)
    assert first.returncode == 0, first.output
    changed = changed_paths(start, manifest(host.root))
    second = run_playbook(scratch, "tune.yml", "--tags", "runtime", *common)
    verify = run_playbook(scratch, "tune.yml", "--tags", "verify", *common)
    skipped = run_playbook(scratch, "tune.yml", "--skip-tags", "sysctl,pcie", "--check", *common)
    back = run_playbook(scratch, "playbooks/rollback.yml", *common)
    assert manifest(host.root) == start
    result = json.loads((records(scratch)[0] / "result.json").read_text(encoding="utf-8"))
    runs = (check, first, second, verify, skipped, back)
    return {
        "changed": changed,
        "exits": [run.returncode for run in runs],
        "recaps": [run.recap("changed") for run in runs],
        "summaries": [[line for line in run.summary if not line.startswith("record:")] for run in runs],
        "result": {key: value for key, value in result.items() if key != "recorded"},
    }


def test_the_result_is_that_of_our_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = small_host(tmp_path / "host")
    other = whole_story(host, tmp_path / "other")
    monkeypatch.setenv("GPU_TUNING_ANSIBLE_PLAYBOOK", str(Path(sys.executable).with_name("ansible-playbook")))
    assert other == whole_story(host, tmp_path / "own")
    assert other["exits"] == [0] * 6
    assert other["recaps"] == [1, 1, 0, 0, 0, 1]


def test_bad_input_is_refused_with_the_same_words(tmp_path: Path) -> None:
    host = small_host(tmp_path / "host")
    wrong = json.dumps({"host_tuning_overrides": {"swappiness": {"sysctl": {"vm.swappiness": 1}}}})
    run = run_playbook(
        tmp_path, "tune.yml", *recorded_host_arguments(host.root, tmp_path), "--extra-vars", wrong
    )
    assert run.returncode != 0
    assert "fix swappiness has sysctl, which is none of" in " ".join(run.output.split())
