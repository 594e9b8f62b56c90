# SPDX-License-Identifier: GPL-3.0-or-later
"""The audit as a user runs it: on the recorded host, on this machine, and with what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from support.play import REPO, Run, recorded_host_arguments, run_playbook
from support.tree import make_recorded_host, manifest

SCHEMA = json.loads((REPO / "roles/host_audit/files/audit.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recorded_host(tmp_path_factory.mktemp("audit") / "host")


def audit(host: Path | None, scratch: Path, *arguments: str, **environment: str) -> Run:
    """Run the playbook on a recorded host, or on this machine without one."""
    place = (
        recorded_host_arguments(host, scratch) if host else [f"--extra-vars=reports_root={scratch}/reports"]
    )
    return run_playbook(scratch, "playbooks/audit.yml", *place, *arguments, **environment)


def reports(scratch: Path) -> list[Path]:
    return sorted((scratch / "reports/localhost").iterdir())


def load(folder: Path) -> dict:
    return json.loads((folder / "audit.json").read_text(encoding="utf-8"))


def test_the_recorded_host_is_audited_and_not_touched(recorded: Path, tmp_path: Path) -> None:
    before = manifest(recorded)
    run = audit(recorded, tmp_path)
    assert run.returncode == 0, run.output
    assert run.recap("changed") == 0
    assert manifest(recorded) == before
    (folder,) = reports(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"audit.json", "audit.html", "system-improve.md"}
    written = load(folder)
    jsonschema.validate(written, SCHEMA)
    assert written["counts"]["P0"] == 2
    assert f"localhost: {written['verdict']}" in run.output
    assert str(folder) in run.output
    assert not any(path.name != "localhost" for path in (tmp_path / "reports").iterdir())


def counting_python(scratch: Path) -> tuple[Path, Path]:
    """Return an interpreter that notes each of its starts, and the file of its notes."""
    script, notes = scratch / "python", scratch / "starts"
    script.write_text(f'#!/bin/sh\necho start >> "{notes}"\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script, notes


def test_one_module_call_is_enough(recorded: Path, tmp_path: Path) -> None:
    python, notes = counting_python(tmp_path)
    run = audit(recorded, tmp_path, f"--extra-vars=ansible_python_interpreter={python}")
    assert run.returncode == 0, run.output
    assert notes.read_text(encoding="utf-8").splitlines() == ["start"]


def test_check_mode_writes_nothing_and_says_the_same(recorded: Path, tmp_path: Path) -> None:
    run = audit(recorded, tmp_path, "--check", "--diff")
    assert run.returncode == 0, run.output
    assert not (tmp_path / "reports").exists()
    assert "8 GPUs: 2 P0" in run.output
    assert "no report is written" in run.output


@pytest.mark.parametrize(("limit", "fails"), [("P0", True), ("", False)])
def test_the_exit_code_follows_the_limit(recorded: Path, tmp_path: Path, limit: str, fails: bool) -> None:
    run = audit(recorded, tmp_path, f"--extra-vars=host_audit_fail_on={limit}")
    assert (run.returncode != 0) == fails, run.output
    assert len(reports(tmp_path)) == 1
    assert ("host_audit_fail_on is P0" in run.output) == fails


def test_a_second_audit_shows_what_has_changed(recorded: Path, tmp_path: Path) -> None:
    first = audit(recorded, tmp_path)
    assert first.returncode == 0, first.output
    swappiness = recorded / "proc/sys/vm/swappiness"
    swappiness.write_text("10\n", encoding="utf-8")
    try:
        second = audit(recorded, tmp_path, "--diff")
    finally:
        swappiness.write_text("60\n", encoding="utf-8")
    assert second.returncode == 0, second.output
    removed = [line for line in second.output.splitlines() if line.startswith("-P")]
    assert removed == ["-P2   swappiness: vm.swappiness is 60 with 8 GiB of swap"]
    assert load(reports(tmp_path)[-1])["changes"]["gone"] == ["finding:swappiness"]


def test_this_machine_has_no_gpu_and_is_audited(tmp_path: Path) -> None:
    if list(Path("/sys/bus/pci/drivers").glob("nvidia/0*")):
        pytest.skip("this machine has a GPU")
    run = audit(None, tmp_path)
    assert run.returncode == 0, run.output
    assert "localhost: No GPU on this host" in run.output
    jsonschema.validate(load(reports(tmp_path)[0]), SCHEMA)


def test_rules_of_ones_own_are_asked_and_a_broken_one_is_one_sentence(recorded: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    fields = ("evidence", "remedy", "effect", "will_not", "cost", "source")
    rule = {"id": "mine", "title": "Many GPUs", "severity": "P0", "when": "gpu_count > 4", "fix": "runtime"}
    rule.update(dict.fromkeys(fields, "text"))
    (own / "mine.yml").write_text(json.dumps({"topic": "own", "rules": [rule]}), encoding="utf-8")
    option = f'--extra-vars={{"host_audit_more_rules_dirs": ["{own}"]}}'
    run = audit(recorded, tmp_path, option)
    assert run.returncode == 0, run.output
    assert "P0    runtime   Many GPUs" in run.output
    (own / "mine.yml").write_text(
        json.dumps({"topic": "own", "rules": [{**rule, "when": "gpu_cuont > 4"}]}), encoding="utf-8"
    )
    broken = audit(recorded, tmp_path, option)
    assert broken.returncode != 0
    assert "mine.yml: the rule mine cannot be evaluated: 'gpu_cuont' is undefined" in broken.output


def test_the_modules_documentation_renders() -> None:
    command = [str(Path(sys.executable).with_name("ansible-doc")), "-t", "module", "-M", "library"]
    for name in ("gpu_host_facts", "gpu_host_audit"):
        done = subprocess.run([*command, name], cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "RETURN VALUES" in done.stdout
