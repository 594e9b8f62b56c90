# SPDX-License-Identifier: GPL-3.0-or-later
"""The execution environment, built from its definition and run: only the base image under it is our own."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from support.play import recorded_host_arguments
from support.small_host import small_host
from support.tools import REPO, run

DEFINITION = REPO / "deploy/execution-environment/execution-environment.yml"
BASE = Path(__file__).parent / "debian-base"
IMAGE = "localhost/gpu-tuning-ee"
#: Whatever of it is there takes the build to the package index as it takes this machine's pip.
PIPS_OWN = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/xdg/pip")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image with ansible-builder; return its name."""
    base = run([str(BASE)]).strip()
    options = ["--network=host", *(f"--volume={path}:{path}:ro" for path in PIPS_OWN if os.path.exists(path))]
    options += [f"--env={name}={os.environ[name]}" for name in ("PIP_INDEX_URL",) if name in os.environ]
    command = ["ansible-builder", "build", "--file", str(DEFINITION), "--tag", IMAGE]
    command += ["--context", str(tmp_path_factory.mktemp("ee") / "context"), "--container-runtime", "podman"]
    command += ["--build-arg", f"EE_BASE_IMAGE={base}", "--build-arg", "PYCMD=/opt/python/bin/python3.11"]
    run([*command, "--extra-build-cli-args", shlex.join(options), "--verbosity", "3"])
    return IMAGE


def in_image(image: str, *command: str) -> str:
    return run(["podman", "run", "--rm", "--network=none", image, *command])


def test_it_has_what_the_controller_is_tested_with(image: str) -> None:
    assert "core 2.19." in in_image(image, "ansible-playbook", "--version")
    assert in_image(image, "ansible-runner", "--version").startswith("2.4.")
    in_image(image, "python3", "-c", "import paramiko, jinja2")


def test_ansible_runner_tunes_a_host_from_within_it(image: str, memory_path: Path) -> None:
    small_host(memory_path / "host", cpus=2, gpus=1)
    folder = memory_path / "runner"
    run(["git", "clone", "--quiet", "--no-hardlinks", str(REPO), str(folder / "project")])
    run(["cp", "-r", str(REPO / "inventory"), str(folder / "inventory")])
    (folder / "env").mkdir()
    (folder / "env/envvars").write_text("ANSIBLE_STDOUT_CALLBACK: fleet\n")
    roots = recorded_host_arguments(Path("/machine/host"), Path("/machine"))
    command = ["ansible-runner", "run", str(folder), "--playbook", "tune.yml", "--ident", "one"]
    command += ["--process-isolation", "--process-isolation-executable", "podman", "--container-image", image]
    command += ["--container-volume-mount", f"{memory_path}:/machine", "--container-option=--network=none"]
    # The folder above is root's, as this test is.
    command += ["--container-option=--user=root", "--cmdline", " ".join(["--tags", "runtime", *roots])]
    said = run(command)
    assert (folder / "artifacts/one/rc").read_text() == "0"
    assert (memory_path / "host/proc/sys/vm/swappiness").read_text() == "10\n"
    assert len(list((memory_path / "reports/localhost").glob("*/system-improve.md"))) == 1
    assert "changed        swappiness: vm.swappiness 60 -> 10" in said
