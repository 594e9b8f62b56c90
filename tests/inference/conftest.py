# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of the tests against real servers: their Python, a tiny model, a place to run."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import lxc_container
import pytest
from inference_support import HERE, ROOT, Job, Place


@pytest.fixture(scope="session")
def serve_python() -> str:
    """The Python with xllamacpp and what SGLang's client needs."""
    python = os.environ.get("GPU_TUNING_INFERENCE_PYTHON", str(ROOT / ".venv-inference/bin/python"))
    if not os.path.exists(python):
        pytest.skip(f"no {python}: make .venv-inference, or set GPU_TUNING_INFERENCE_PYTHON")
    return python


@pytest.fixture(scope="session")
def sglang_wheel() -> str:
    """The folder of SGLang's unpacked wheel, for its client alone."""
    folder = os.environ.get("SGLANG_WHEEL", str(ROOT / ".cache/sglang-wheel"))
    if not os.path.exists(f"{folder}/sglang/benchmark/serving.py"):
        pytest.skip(f"no SGLang wheel in {folder}: make .venv-inference, or set SGLANG_WHEEL")
    return folder


@pytest.fixture(scope="session")
def model(serve_python: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([serve_python, str(HERE / "tiny_model.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def place(
    serve_python: str, sglang_wheel: str, model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A real LXC container where this machine can run one, else the machine itself; which one is printed."""
    why = lxc_container.missing()
    if why is None and "bookworm" not in pathlib.Path("/etc/os-release").read_text():
        why = "the servers' packages are of this machine's Python, and the container is Debian 12"
    if why is not None:
        print(f"\nno LXC container ({why}): the servers run on this machine itself")
        yield Place(model, serve_python, sglang_wheel)
        return
    outside = Place(model, serve_python, sglang_wheel)
    binds = {outside.site: "/opt/site-packages", HERE: "/opt/inference", model: "/opt/model"}
    binds[pathlib.Path(sglang_wheel)] = "/opt/sglang"
    tar = lxc_container.root_file_system(ROOT / ".cache")
    container = lxc_container.Container(tmp_path_factory.mktemp("lxc"), tar, binds)
    container.start()
    yield Place(model, serve_python, sglang_wheel, container)
    container.stop()


@pytest.fixture
def make_job(tmp_path: pathlib.Path) -> Iterator[Any]:
    """Make jobs that are stopped at the end, whatever the test did."""
    jobs: list[Job] = []

    def make(program: str, spec: dict[str, Any], lease: float = 60, base: str = "") -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, program, spec, lease, base or str(tmp_path / "work")))
        return jobs[-1]

    yield make
    for job in jobs:
        if job.folder and os.path.isdir(job.folder):
            job.call("stop", job.folder)
