# SPDX-License-Identifier: GPL-3.0-or-later
"""What large sites run: the execution environment, ansible-runner, ansible-pull, the survey."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.play import recorded_host_arguments
from support.small_host import small_host
from support.tools import PATH, REPO, run

DEPLOY = REPO / "deploy"


def tool(name: str) -> str:
    """Return a tool's path, or skip."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"no {name} beside this Python")
    return found


def machine_of(folder: Path) -> list[str]:
    """Make a recorded machine and return the variables that point a play at it."""
    small_host(folder / "host", cpus=2, gpus=1)
    return recorded_host_arguments(folder / "host", folder)


def test_the_execution_environment_can_be_laid_out(tmp_path: Path) -> None:
    file = DEPLOY / "execution-environment/execution-environment.yml"
    command = [tool("ansible-builder"), "create", "--file", str(file), "--context", str(tmp_path / "context")]
    # Else its name depends on which of podman and docker is there.
    run([*command, "--output-filename", "Containerfile"])
    containerfile = (tmp_path / "context/Containerfile").read_text()
    assert "ansible-core~=2.19.0" in containerfile
    assert (tmp_path / "context/_build/requirements.txt").read_text().split()[-1] == "paramiko"
    assert "openssh-clients" in (tmp_path / "context/_build/bindep.txt").read_text()


def test_the_execution_environment_has_what_the_controller_is_tested_with() -> None:
    wanted = {
        line for line in (REPO / "requirements/run.in").read_text().splitlines() if line[:1] not in "# "
    }
    definition = yaml.safe_load((DEPLOY / "execution-environment/execution-environment.yml").read_text())
    lines = (DEPLOY / "execution-environment/requirements.txt").read_text().splitlines()
    held = {line for line in lines if line[:1] not in "# "} | {
        definition["dependencies"]["ansible_core"]["package_pip"]
    }
    assert held == {line for line in wanted if line}


def test_ansible_runner_drives_it(memory_path: Path) -> None:
    roots = machine_of(memory_path)
    command = [tool("ansible-runner"), "run", str(memory_path / "runner"), "--project-dir", str(REPO)]
    command += ["--playbook", "tune.yml", "--inventory", str(REPO / "inventory"), "--ident", "one"]
    said = run(
        [*command, "--cmdline", " ".join(["--tags", "runtime", *roots])],
        ANSIBLE_CONFIG=str(REPO / "ansible.cfg"),
        ANSIBLE_STDOUT_CALLBACK="fleet",
    )
    assert "changed        swappiness: vm.swappiness 60 -> 10" in said
    assert (memory_path / "runner/artifacts/one/rc").read_text() == "0"
    assert (memory_path / "host/proc/sys/vm/swappiness").read_text() == "10\n"


def test_ansible_pull_tunes_the_host_itself(memory_path: Path) -> None:
    tool("ansible-pull")
    roots = machine_of(memory_path)
    clone = memory_path / "origin"
    run(["git", "clone", "--quiet", "--no-hardlinks", str(REPO), str(clone)])
    checkout = str(memory_path / "checkout")
    command = [str(DEPLOY / "pull.sh"), f"file://{clone}", "tune.yml", "--tags", "runtime", *roots]
    run(command, cwd=memory_path, GPU_TUNING_CHECKOUT=checkout)
    assert (memory_path / "host/proc/sys/vm/swappiness").read_text() == "10\n"


def test_the_survey_asks_for_variables_that_the_role_has() -> None:
    specs = yaml.safe_load((REPO / "roles/host_tuning/meta/argument_specs.yml").read_text())
    options = specs["argument_specs"]["main"]["options"]
    types = {"int": "integer", "list": "multiselect", "bool": "multiplechoice", "path": "text", "str": "text"}
    for question in json.loads((DEPLOY / "awx/survey.json").read_text())["spec"]:
        option = options[question["variable"]]
        assert question["type"] == types[option["type"]]
        assert question.get("choices") == option.get("choices")
