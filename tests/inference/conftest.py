# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests against real servers share: the servers' Python, a tiny model, a place to run."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
for folder in (str(ROOT), str(ROOT / "module_utils"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import lxc_container  # noqa: E402
from gpu_tuning.benchmark import bundle  # noqa: E402


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


class Place:
    """Where the server runs: paths there, inventory variables, and a look at its processes."""

    def __init__(self, model: pathlib.Path, python: str, wheel: str, container: Any = None) -> None:
        self.container = container
        site = pathlib.Path(python).parents[1] / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        inside = container is not None
        self.python = "python3" if inside else python
        self.model = "/opt/model" if inside else str(model)
        self.scripts = "/opt/inference" if inside else str(HERE)
        self.wheel = "/opt/sglang" if inside else wheel
        self.environment = {"PYTHONPATH": "/opt/site-packages"} if inside else {}
        self.site = site

    def variables(self) -> dict[str, Any]:
        """Connection variables of the inventory."""
        if self.container is None:
            return {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        return {
            "ansible_connection": "lxc_host",
            "ansible_lxc_container": self.container.name,
            "ansible_lxc_enter_command": self.container.enter,
            "ansible_python_interpreter": "/usr/bin/python3",
        }

    def servers_left(self) -> list[str]:
        """Return what of ours still runs there."""
        if self.container is not None:
            lines = self.container.processes().splitlines()
        else:
            lines = subprocess.run(["ps", "axo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
        own = ("llama_server.py", "sglang_client.py", "small_client.py", "bundle.pyz")
        return [line for line in lines if any(name in line for name in own) and not line.startswith("Z")]


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


class Job:
    """One benchmark job on this machine, driven as the controller does it."""

    def __init__(self, folder: pathlib.Path, program: str, spec: dict[str, Any], lease: float, base: str) -> None:
        self.pyz = folder / "benchmark.pyz"
        self.pyz.write_bytes(bundle.build(str(ROOT / "roles/gpu_benchmark/files/p2p_bandwidth.py")))
        order = folder / "order.json"
        order.write_text(
            json.dumps(
                {
                    "procfs_root": "/proc", "sysfs_root": "/sys", "environment": {}, "base": base,
                    "lease": lease, "program": program, "spec": spec,
                }  # fmt: skip
            )
        )
        self.order, self.folder, self.offset, self.text = str(order), "", 0, ""

    def call(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(self.pyz), *arguments], capture_output=True, text=True, check=False, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return dict(json.loads(done.stdout))

    def start(self) -> dict[str, Any]:
        answer = self.call("start", self.order)
        self.folder = answer.get("folder", "")
        return answer

    def poll(self) -> dict[str, Any]:
        answer = self.call("poll", self.folder, str(self.offset))
        self.offset, self.text = answer["offset"], self.text + answer["text"]
        return answer

    def until(self, words: str = "", timeout: float = 120) -> dict[str, Any]:
        """Poll until the progress holds the words, or to the end without any."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            answer = self.poll()
            if answer["state"] != "running" or (words and words in self.text):
                return answer
            time.sleep(0.2)
        raise AssertionError(f"the job does not end; it said:\n{self.text}")

    def result(self) -> dict[str, Any]:
        return dict(json.loads((pathlib.Path(self.folder) / "result.json").read_text()))


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
