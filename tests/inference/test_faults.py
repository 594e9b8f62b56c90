# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong on a measured host: a clear sentence, no process left behind, what was measured kept."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

import pytest
from inference_support import HERE, free_port


@pytest.fixture
def spec(serve_python: str, model: pathlib.Path) -> Callable[..., dict[str, Any]]:
    """A sweep of a real server with the small client; keyword arguments change it."""

    def make(**changes: Any) -> dict[str, Any]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        server = {
            "command": [serve_python, f"{HERE}/llama_server.py", f"{model}/model.gguf", str(port), "8"],
            "environment": {}, "health_url": f"{url}/health", "ready_timeout_s": 60.0, "stop_timeout_s": 10.0,
            **changes.pop("server", {}),
        }  # fmt: skip
        client = {
            "tool": "sglang",
            "command": [sys.executable, str(HERE / "small_client.py"), "--base-url", changes.pop("url", url),
                        "--random-input-len", "{input_length}", "--random-output-len", "{output_length}",
                        "--num-prompts", "{requests}", "--max-concurrency", "{concurrency}",
                        "--seed", "{seed}", "--output-file", "{output_file}",
                        "--warmup-requests", "{warmup}"],
            "environment": {}, "timeout_s": 60.0,
        }  # fmt: skip
        return {
            "server": server, "client": client, "info_url": "", "levels": [1, 2], "repeats": 3,
            "restart_server": False, "input_length": 32, "output_length": 16, "requests_per_stream": 2,
            "least_requests": 4, "warmup_requests": 1, "seed": 1, **changes,
        }  # fmt: skip

    return make


def processes_with(text: str) -> list[int]:
    """The living processes whose command line holds a text."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in words and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone(text: str, timeout: float = 20) -> bool:
    deadline = time.monotonic() + timeout
    while processes_with(text) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_with(text)


def test_a_whole_sweep_counts_and_stops_its_server(make_job: Any, spec: Any) -> None:
    job = make_job("sweep", spec(restart_server=True, repeats=2))
    job.start()
    assert job.until()["outcome"] == {"exit_code": 0, "reason": None}
    result = job.result()
    assert result["status"] == "complete"
    assert [(run["level"], run["repeat"], run["problems"]) for run in result["runs"]] == [
        (1, 1, []), (2, 1, []), (1, 2, []), (2, 2, []),
    ]  # fmt: skip
    assert len({run["seed"] for run in result["runs"]}) == 4
    assert all(run["figures"]["output_tokens"] == run["requests"] * 16 for run in result["runs"])
    assert job.text.count("server ready") == 2
    assert gone(job.folder)


def test_a_killed_server_is_named_and_the_runs_before_are_kept(make_job: Any, spec: Any) -> None:
    order = spec()
    job = make_job("sweep", order)
    job.start()
    job.until("[2/6]")
    for pid in processes_with(" ".join(order["server"]["command"][1:4])):
        os.kill(pid, signal.SIGKILL)
    assert job.until()["outcome"]["exit_code"] == 1
    result = job.result()
    assert result["status"] == "partial"
    assert result["error"].startswith("The server was ended by SIGKILL. The end of its log:")
    assert len([run for run in result["runs"] if not run["problems"]]) >= 2
    assert gone(job.folder)


def test_a_server_that_never_gets_ready_is_given_up_with_its_log(make_job: Any, spec: Any) -> None:
    silent = [
        sys.executable,
        "-c",
        "import time; print('loading shard 1 of 99', flush=True); time.sleep(600)",
    ]
    job = make_job("sweep", spec(server={"command": silent, "ready_timeout_s": 2.0}))
    job.start()
    job.until()
    error = job.result()["error"]
    assert "was not ready after 2 s" in error
    assert "loading shard 1 of 99" in error
    assert job.result()["status"] == "failed"
    assert gone("loading shard 1 of 99")


def test_a_server_that_ends_at_once_is_not_waited_for(make_job: Any, spec: Any) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('out of memory on GPU 3')"]
    job = make_job("sweep", spec(server={"command": broken}))
    job.start()
    job.until(timeout=30)
    assert job.result()["error"].startswith("The server ended with exit code 1.")
    assert "out of memory on GPU 3" in job.result()["error"]


def test_a_server_that_does_not_exist_is_named(make_job: Any, spec: Any) -> None:
    job = make_job("sweep", spec(server={"command": ["/no/such/server"]}))
    job.start()
    job.until(timeout=30)
    assert "/no/such/server: No such file" in job.result()["error"]


def test_somebody_elses_server_is_neither_used_by_accident_nor_stopped(
    make_job: Any, spec: Any, serve_python: str, model: pathlib.Path
) -> None:
    order = spec()
    own = subprocess.Popen(order["server"]["command"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        attach = spec(url=order["client"]["command"][3], server={"command": [], **{
            "health_url": order["server"]["health_url"]}}, repeats=1)  # fmt: skip
        job = make_job("sweep", attach)
        job.start()
        assert job.until()["outcome"]["exit_code"] == 0
        second = make_job("sweep", order)
        second.start()
        second.until()
        assert "answers at" in second.result()["error"]
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


class Proxy:
    """A proxy that cuts every connection after a number of bytes from the server, from the n-th one on."""

    def __init__(self, port: int, good: int, cut: int) -> None:
        self.target, self.good, self.cut, self.seen = port, good, cut, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            self.seen += 1
            threading.Thread(target=self._serve, args=(client, self.seen > self.good), daemon=True).start()

    def _serve(self, client: socket.socket, cut: bool) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            sent = 0
            with contextlib.suppress(OSError):
                while data := server.recv(1024):
                    if cut and sent + len(data) > self.cut:
                        break
                    client.sendall(data)
                    sent += len(data)
            for end in (client, server):  # closing alone would leave them to the other thread
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass everything on until either end is gone: a request may come in several pieces."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def make(*arguments: int) -> Proxy:
        made.append(Proxy(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_client_that_loses_its_connection_midway_does_not_count(
    make_job: Any, spec: Any, proxy: Any
) -> None:
    order = spec(levels=[1], repeats=2)
    port = int(order["server"]["command"][3])
    cutting = proxy(port, 5, 1500)
    order["client"]["command"][3] = f"http://127.0.0.1:{cutting.port}"
    job = make_job("sweep", order)
    job.start()
    assert job.until()["outcome"]["exit_code"] == 1
    first, second = job.result()["runs"]
    assert first["problems"] == []
    assert "no request completed" in second["problems"][0] or "requests completed" in second["problems"][0]
    assert job.result()["status"] == "partial"
    assert "1 of 2 runs do not count" in job.result()["error"]
    assert gone(job.folder)


def test_a_hanging_client_is_ended(make_job: Any, spec: Any) -> None:
    order = spec(levels=[1], repeats=1)
    order["client"].update(command=[sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=1.0)
    job = make_job("sweep", order)
    job.start()
    job.until(timeout=60)
    assert "did not end in time" in job.result()["runs"][0]["problems"][0]
    assert gone("time.sleep(600)")


def test_nobody_asking_any_more_ends_the_job_and_its_server(make_job: Any, spec: Any) -> None:
    job = make_job("sweep", spec(repeats=500), lease=2)
    job.start()
    job.until("[1/1000]")
    assert gone(job.folder, 60)
    answer = job.poll()
    assert answer["state"] == "ended"
    assert "nobody asked after it for 2 s" in answer["outcome"]["reason"]
    assert job.result()["status"] == "partial"
    assert job.result()["error"] == "stopped by SIGTERM"


def test_a_supervisor_that_is_killed_takes_everything_along(make_job: Any, spec: Any) -> None:
    order = spec(repeats=500)
    job = make_job("sweep", order)
    job.start()
    job.until("[1/1000]")
    os.kill(int((pathlib.Path(job.folder) / "pid").read_text().split()[0]), signal.SIGKILL)
    assert gone(job.folder, 60)
    assert gone(" ".join(order["server"]["command"][1:4]), 60)
    assert job.poll()["state"] == "lost"
    assert job.result()["status"] == "partial"


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: pathlib.Path) -> None:
    """Leave no free byte."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_a_disk_that_fills_up_is_named_and_the_results_survive(
    make_job: Any, spec: Any, small_disk: pathlib.Path
) -> None:
    job = make_job("sweep", spec(repeats=500), base=str(small_disk))
    job.start()
    job.until("[2/1000]")
    fill(small_disk)
    job.until()
    result = job.result()
    assert result["status"] == "partial"
    assert result["error"].startswith("The disk of the work folder is full")
    assert [run["problems"] for run in result["runs"][:2]] == [[], []]
    assert gone(job.folder)


def test_a_disk_that_is_full_from_the_start_is_named(
    make_job: Any, spec: Any, small_disk: pathlib.Path
) -> None:
    fill(small_disk)
    answer = make_job("sweep", spec(), base=str(small_disk)).start()
    assert "No space left on device" in answer["error"]
    assert [entry.name for entry in small_disk.iterdir()] == ["filler"]
