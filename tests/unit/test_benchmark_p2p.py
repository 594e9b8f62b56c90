# SPDX-License-Identifier: GPL-3.0-or-later
"""The P2P program end to end, as a process, against a stand-in libcuda.so.1 with known bandwidths."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from benchmark_samples import standin

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "roles/gpu_benchmark/files/p2p_bandwidth.py"
FIXTURES = ROOT / "tests/fixtures/benchmark"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder with the stand-in driver."""
    folder = tmp_path_factory.mktemp("cuda")
    standin("libcuda_standin.c", folder / "libcuda.so.1")
    return folder


class Outcome:
    """What one run of the program left: exit code, sentences, result."""

    def __init__(self, process: subprocess.CompletedProcess[str], output: pathlib.Path) -> None:
        self.code, self.said, self.printed = process.returncode, process.stderr, process.stdout
        self.result: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}

    @property
    def last_line(self) -> str:
        return self.said.strip().splitlines()[-1]

    def figures(self, kind: str, **wanted: Any) -> list[float]:
        return [
            one.get("median_gbps", one.get("median_us"))
            for one in self.result["measurements"]
            if one["kind"] == kind and all(one.get(name) == value for name, value in wanted.items())
        ]


def environment(driver: pathlib.Path | None, settings: dict[str, Any]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STANDIN", "LD_"))}
    library = {"LD_LIBRARY_PATH": str(driver)} if driver else {}
    return {**clean, **library, **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}}


@pytest.fixture
def run(driver: pathlib.Path, tmp_path: pathlib.Path) -> Any:
    def call(*arguments: str, with_driver: bool = True, torch: bool = False, **settings: Any) -> Outcome:
        output = tmp_path / "result.json"
        command = [sys.executable, str(PROGRAM), "--size-mib", "1", "--iterations", "4", "--warmup", "1"]
        names = environment(driver if with_driver else None, settings)
        if torch:
            names["PYTHONPATH"] = str(FIXTURES / "torch_standin")
        process = subprocess.run(
            [*command, "--output", str(output), *arguments],
            env=names, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "Traceback" not in process.stderr
        return Outcome(process, output)

    return call


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_pair_is_measured_with_the_figures_that_the_driver_has(run: Any, count: int) -> None:
    outcome = run(devices=count)
    assert outcome.code == 0
    assert outcome.result["status"] == "complete"
    pairs = count * (count - 1)
    half = (count + 1) // 2
    near = half * (half - 1) + (count - half) * (count - half - 1)
    push = outcome.figures("d2d", direction="push", peer=True)
    assert sorted(push) == [37.0] * (pairs - near) + [50.0] * near
    assert len(outcome.figures("d2d", direction="pull", peer=True)) == pairs
    assert set(outcome.figures("d2d", direction="pull", peer=True)) <= {45.0, 33.0}
    assert set(outcome.figures("d2d_both")) <= {100.0, 74.0}
    assert len(outcome.figures("d2d_both")) == pairs / 2
    assert outcome.figures("d2d", peer=False) == [20.0] * pairs
    nodes = len({one["node"] for one in outcome.result["measurements"] if one["kind"] == "h2d"})
    assert outcome.figures("h2d") == [53.0] * count * nodes
    assert outcome.figures("d2h") == [52.0] * count * nodes
    assert len(outcome.figures("latency")) == 4 * pairs
    assert min(outcome.figures("latency")) == 3.0


def test_all_samples_are_kept_and_every_payload_is_checked(run: Any) -> None:
    copies = [one for one in run("--iterations", "7").result["measurements"] if one["kind"] != "latency"]
    assert [len(one["samples_ms"]) for one in copies] == [7] * len(copies)
    assert all(one["verified"] for one in copies)


def test_one_gpu_measures_host_copies_only_and_says_so(run: Any) -> None:
    outcome = run(devices=1)
    assert outcome.code == 0
    assert {one["kind"] for one in outcome.result["measurements"]} == {"h2d", "d2h"}
    assert "One CUDA device" in outcome.last_line


def test_without_peer_access_only_the_staged_path_is_measured(run: Any) -> None:
    outcome = run(devices=3, no_peer=1)
    assert outcome.code == 0
    assert outcome.figures("d2d", peer=True) == []
    assert outcome.figures("d2d", peer=False) == [20.0] * 6
    assert outcome.result["peer_access"] == [[False] * 3] * 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"init": 100}, "CUDA_ERROR_NO_DEVICE (100)"), ({"devices": 0}, "lists none")],
)
def test_no_device_is_one_sentence_and_exit_code_3(run: Any, settings: dict[str, int], sentence: str) -> None:
    outcome = run(**settings)
    assert outcome.code == 3
    assert sentence in outcome.said
    assert len(outcome.said.strip().splitlines()) == 1
    assert outcome.result["status"] == "failed"


def test_no_driver_is_one_sentence_and_exit_code_3(run: Any) -> None:
    outcome = run(with_driver=False)
    assert outcome.code == 3
    assert "libcuda.so.1 cannot be loaded" in outcome.said
    assert len(outcome.said.strip().splitlines()) == 1


def test_a_driver_that_fails_otherwise_is_no_missing_device(run: Any) -> None:
    outcome = run(init=999)
    assert outcome.code == 1
    assert "CUDA_ERROR_UNKNOWN (999)" in outcome.said
    assert "/dev/nvidia-uvm" in outcome.said


@pytest.mark.parametrize("path", ["1>0", "host>1", "0>host"])
def test_one_corrupt_byte_is_found(run: Any, path: str) -> None:
    outcome = run(devices=3, corrupt=path)
    assert outcome.code == 5
    assert outcome.result["status"] == "complete"
    assert "byte 12345" in outcome.last_line
    wrong = [one for one in outcome.result["measurements"] if one.get("verified") is False]
    if path == "1>0":
        assert {(one["source"], one["target"]) for one in wrong} == {(1, 0), (0, 1)}
        assert "GPU 1 -> GPU 0, push, peer access on" in str(wrong)
        assert all(one["kind"] == "d2d_both" for one in wrong if one["source"] == 0)


def test_the_watchdog_names_the_pair_that_hangs_and_keeps_the_rest(run: Any) -> None:
    outcome = run("--timeout", "2", devices=3, hang="1>2")
    assert outcome.code == 4
    assert outcome.last_line.startswith("GPU 1 -> GPU 2, push, peer access on: no answer within 2 s")
    assert outcome.result["status"] == "partial"
    assert outcome.figures("d2d", source=0, target=1, direction="push", peer=True) == [50.0]


def test_a_crash_names_the_pair_too(run: Any) -> None:
    outcome = run(devices=2, crash="0>1")
    assert outcome.code == 1
    assert outcome.last_line.startswith("GPU 0 -> GPU 1, push, peer access on: ")
    assert "was ended by SIGSEGV" in outcome.last_line


def test_a_gpu_without_room_is_named(run: Any) -> None:
    outcome = run(free_mib=1)
    assert outcome.code == 1
    assert outcome.last_line.startswith("GPU 0 (0000:a1:00.0) has no 2 MiB free")


def test_a_result_that_cannot_be_written_goes_to_standard_output(run: Any, tmp_path: pathlib.Path) -> None:
    outcome = run("--output", str(tmp_path / "missing/result.json"))
    assert outcome.code == 1
    assert "cannot be written" in outcome.last_line
    assert json.loads(outcome.printed)["status"] == "complete"


def test_a_full_disk_is_named(driver: pathlib.Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(PROGRAM.parent)],
        env=environment(driver, {}), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "the disk is full" in process.stderr
    assert process.stdout.strip() == "{}"


FULL_DISK = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
import p2p_bandwidth as program
def fsync(number):
    raise OSError(errno.ENOSPC, "No space left on device")
os.fsync = fsync
before = set(os.listdir("."))
try:
    program.write_result("x.json", {})
except program.Fatal as error:
    print(error, file=sys.stderr)
assert set(os.listdir(".")) == before
"""


def test_an_interrupted_run_leaves_no_process(driver: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "result.json"
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--size-mib", "1", "--output", str(output)],
        env=environment(driver, {"hang": "0>1"}), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:  # the last host copy is measured: the worker now sits in the hanging copy
        if "GPU 1 -> host" in line:
            break
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    reader = threading.Thread(target=process.stderr.read)
    reader.start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    reader.join()
    assert children
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in children)
    result = json.loads(output.read_text())
    assert result["status"] == "partial"
    assert "Interrupted by SIGTERM" in result["error"]["message"]


def test_torch_measures_the_same_and_has_no_pull(run: Any) -> None:
    outcome = run("--engine", "torch", torch=True, devices=4)
    assert outcome.code == 0
    assert set(outcome.figures("d2d", direction="push", peer=True)) == {50.0, 37.0}
    assert outcome.figures("d2d", direction="pull") == []
    assert set(outcome.figures("d2d_both")) == {100.0, 74.0}
    assert set(outcome.figures("h2d")) == {53.0}


def test_the_cross_check_sets_both_engines_side_by_side(run: Any) -> None:
    outcome = run("--cross-check", torch=True, devices=2, torch_scale="0.9")
    pairs = outcome.result["cross_check"]["pairs"]
    assert {one["ratio"] for one in pairs} == {0.9}
    assert {(one["kind"], one["source"], one["target"]) for one in pairs} >= {("d2d", 0, 1), ("d2d", 1, 0)}


def test_the_cross_check_without_torch_says_so_and_keeps_the_figures(run: Any) -> None:
    outcome = run("--cross-check")
    assert outcome.code == 0
    assert "No torch" in outcome.result["cross_check"]["error"]["message"]
    assert outcome.result["cross_check"]["pairs"] == []
    assert len(outcome.figures("d2d", direction="push", peer=True)) == 2


@pytest.mark.parametrize(("torch", "sentence"), [(False, "No torch for"), (True, "lists none")])
def test_torch_without_device_or_torch_is_exit_code_3(run: Any, torch: bool, sentence: str) -> None:
    outcome = run("--engine", "torch", torch=torch, devices=0)
    assert outcome.code == 3
    assert sentence in outcome.said
    assert len(outcome.said.strip().splitlines()) == 1


def make_sysfs(root: pathlib.Path, gpus: dict[str, tuple[str, int]]) -> None:
    """A sysfs tree with GPUs at given addresses: path below devices/, NUMA node."""
    for bdf, (parent, node) in gpus.items():
        device = root / "devices" / parent / bdf
        device.mkdir(parents=True)
        config = bytearray(256)
        config[0x34], config[0x60], config[0x61] = 0x60, 0x10, 0
        config[0x68:0x6A] = (0x2000 | 0x20).to_bytes(2, "little")  # MaxReadReq 512, MaxPayload 256
        (device / "config").write_bytes(config)
        texts = {"numa_node": node, "current_link_speed": "32.0 GT/s PCIe", "current_link_width": 16}
        for name, text in texts.items():
            (device / name).write_text(f"{text}\n")
        (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (root / "bus/pci/devices" / bdf).symlink_to(device)
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpulist").write_text(f"{node}\n")


def test_topology_is_recorded(run: Any, tmp_path: pathlib.Path) -> None:
    sysfs = tmp_path / "sys"
    switch = "pci0000:20/0000:20:01.1/0000:21:00.0"
    make_sysfs(
        sysfs,
        {
            "0000:a1:00.0": (f"{switch}/0000:22:00.0", 0),
            "0000:a2:00.0": (f"{switch}/0000:22:01.0", 0),
            "0000:a3:00.0": ("pci0000:40/0000:40:01.1", 0),
            "0000:a4:00.0": ("pci0000:80/0000:80:01.1", 1),
        },
    )
    result = run("--sysfs-root", str(sysfs), devices=4).result
    assert result["relations"][0] == [None, "PXB", "NODE", "SYS"]
    first = result["devices"][0]
    assert (first["numa_node"], first["max_payload_size"], first["max_read_request_size"]) == (0, 256, 512)
    assert first["link"] == {"speed": "32.0 GT/s PCIe", "width": 16}
    host_copies = [one for one in result["measurements"] if one["kind"] == "h2d"]
    assert {one["node"] for one in host_copies} == {0, 1}
    assert all(one["link_under_load"] == first["link"] for one in host_copies)
    pushes = [one for one in result["measurements"] if one["kind"] == "d2d" and one["source"] == 3]
    assert {one["pinned_to"] for one in pushes} == {1}


@pytest.mark.parametrize("arguments", [["--size-mib", "0"], ["--iterations", "-1"], ["--engine", "cupy"]])
def test_bad_arguments_are_refused(run: Any, arguments: list[str]) -> None:
    assert run(*arguments).code == 2
