# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests against real servers share: paths, a place to run, jobs driven as the controller does it."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (str(ROOT), str(ROOT / "module_utils")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from gpu_tuning.benchmark import bundle  # noqa: E402


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Place:
    """Where the server runs: paths there, inventory variables, and a look at its processes."""

    def __init__(self, model: pathlib.Path, python: str, wheel: str, container: Any = None) -> None:
        self.container = container
        site = (
            pathlib.Path(python).parents[1]
            / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        )
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
            command = ["ps", "axo", "stat,args"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            lines = done.stdout.splitlines()
        own = ("llama_server.py", "sglang_client.py", "small_client.py", "bundle.pyz")
        return [line for line in lines if any(name in line for name in own) and not line.startswith("Z")]


class Job:
    """One benchmark job on this machine, driven as the controller does it."""

    def __init__(
        self, folder: pathlib.Path, program: str, spec: dict[str, Any], lease: float, base: str
    ) -> None:
        self.pyz = folder / "benchmark.pyz"
        self.pyz.write_bytes(bundle.build(str(ROOT / "roles/gpu_benchmark/files/p2p_bandwidth.py")))
        order = folder / "order.json"
        order.write_text(
            json.dumps(
                {
                    "procfs_root": "/proc",
                    "sysfs_root": "/sys",
                    "environment": {},
                    "base": base,
                    "lease": lease,
                    "program": program,
                    "spec": spec,
                }
            )
        )
        self.order, self.folder, self.offset, self.text = str(order), "", 0, ""

    def call(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(self.pyz), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
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
