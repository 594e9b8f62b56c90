# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook end to end: a real server and SGLang's client, in a real LXC container if there can be one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import yaml
from inference_support import ROOT, Place, free_port

pytest.importorskip("scipy", reason="SciPy is missing: pip install -r requirements/benchmark.txt")
import jsonschema

LEVELS = [1, 4]
REPEATS = 5


class Playbook:
    """One inventory with one host; every call of the playbook leaves its report."""

    def __init__(self, folder: pathlib.Path, place: Place) -> None:
        self.folder, self.place = folder, place
        self.port = free_port()
        self.reports = folder / "reports"

    def inventory(self, **changes: Any) -> pathlib.Path:
        place = self.place
        hub = {"HF_HUB_OFFLINE": "1", "SGLANG_WHEEL": place.wheel, **place.environment}
        work = "/var/lib/gpu-benchmark" if place.container else str(self.folder / "work")
        variables = {
            "reports_root": str(self.reports),
            "gpu_benchmark_work_dir": work,
            "gpu_benchmark_server": "custom",
            "gpu_benchmark_model": "tiny",
            "gpu_benchmark_tokenizer": place.model,
            "gpu_benchmark_server_port": self.port,
            "gpu_benchmark_server_command": [
                place.python, f"{place.scripts}/llama_server.py", f"{place.model}/model.gguf",
                str(self.port), "8",
            ],
            "gpu_benchmark_server_environment": place.environment,
            "gpu_benchmark_client_command": [place.python, f"{place.scripts}/sglang_client.py"],
            "gpu_benchmark_client_environment": hub,
            "gpu_benchmark_ready_timeout": 60,
            "gpu_benchmark_levels": LEVELS,
            "gpu_benchmark_repeats": REPEATS,
            "gpu_benchmark_input_length": 64,
            "gpu_benchmark_output_length": 32,
            "gpu_benchmark_warmup_requests": 1,
            "gpu_benchmark_requests_per_stream": 2,
            "gpu_benchmark_least_requests": 4,
            "gpu_benchmark_interval": 0.5,
            **changes,
        }  # fmt: skip
        hosts = {"hosts": {"bench": self.place.variables()}, "vars": variables}
        path = self.folder / "hosts.yml"
        path.write_text(yaml.safe_dump({"all": {"children": {"inference": hosts}}}))
        return path

    def run(self, *arguments: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        tool = pathlib.Path(sys.executable).parent / "ansible-playbook"
        plugins = str(ROOT / "connection_plugins")
        settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_CONNECTION_PLUGINS": plugins}
        return subprocess.run(
            [str(tool), "-i", str(self.inventory(**changes)), "playbooks/benchmark.yml", *arguments],
            cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False,
            timeout=2400,
        )  # fmt: skip

    def report(self, name: str) -> dict[str, Any]:
        """The newest report of a name."""
        found = sorted((self.reports / "benchmarks/bench").glob(f"*-{name}/report.json"))
        return dict(json.loads(found[-1].read_text()))


@pytest.fixture
def playbook(tmp_path: pathlib.Path, place: Place) -> Playbook:
    return Playbook(tmp_path, place)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["verdict"] for one in report["comparison"] if one["headline"]}


def test_baseline_then_an_equal_arm_then_a_throttled_one(
    playbook: Playbook, place: Place, capsys: Any
) -> None:
    baseline = playbook.run("--tags", "baseline", gpu_benchmark_name="first")
    assert baseline.returncode == 0, baseline.stdout
    assert "concurrency 4" in baseline.stdout
    assert "s left)" in baseline.stdout
    kept = json.loads((playbook.reports / "benchmarks/bench/baselines/before.json").read_text())
    jsonschema.validate(kept, json.loads((ROOT / "benchmark_report/measurement.schema.json").read_text()))
    assert len(kept["inference"]["runs"]) == REPEATS * len(LEVELS)
    assert all(not run["problems"] for run in kept["inference"]["runs"])

    for _ in range(2):  # a machine whose load changed between the arms did differ: one more look is fair
        assert playbook.run(gpu_benchmark_name="equal").returncode == 0
        equal = verdicts(playbook.report("equal"))
        if not {"improved", "regressed"} & set(equal.values()):
            break
    slow = {**place.environment, "SERVER_SHARE": "0.25"}
    throttled = playbook.run(gpu_benchmark_name="throttled", gpu_benchmark_server_environment=slow)
    assert throttled.returncode == 0, throttled.stdout
    found = playbook.report("throttled")
    with capsys.disabled():
        print(
            f"\n  in {'a container' if place.container else 'this machine'}: equal {equal}"
            f"\n  throttled {verdicts(found)}"
        )
    assert not {"improved", "regressed"} & set(equal.values())
    assert {name: word for name, word in verdicts(found).items() if "throughput" in name} == {
        f"inference.throughput.c{level}": "regressed" for level in LEVELS
    }
    assert "The settings of both sides are not on record" in str(found["comparison"])
    # Beside the report: this host has no record of a tuning run that the section could go into.
    (kept_record,) = (playbook.reports / "benchmarks/bench").glob("*-throttled/system-improve.md")
    record = kept_record.read_text()
    assert record.count("gpu_benchmark begin") == 1
    assert "**regressed**" in record
    assert (
        next((playbook.reports / "benchmarks/bench").glob("*-throttled/report.html")).stat().st_size > 20000
    )
    assert place.servers_left() == []


def test_check_mode_starts_and_writes_nothing(playbook: Playbook, place: Place) -> None:
    done = playbook.run("--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert "changed=0" in done.stdout
    assert not playbook.reports.exists()
    assert place.servers_left() == []


def test_a_run_that_fails_says_why_keeps_what_it_has_and_no_baseline(
    playbook: Playbook, place: Place
) -> None:
    command = [place.python, "-c", "import time; print('waiting for rank 3', flush=True); time.sleep(300)"]
    done = playbook.run(
        "--tags", "baseline", gpu_benchmark_server_command=command, gpu_benchmark_ready_timeout=2
    )  # fmt: skip
    assert done.returncode == 2
    assert "was not ready after 2 s" in done.stdout
    assert "waiting for rank 3" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert playbook.report("baseline")["notes"]
    assert not (playbook.reports / "benchmarks/bench/baselines").exists()
    assert place.servers_left() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_benchmark_levels": [0]},
        {"gpu_benchmark_levels": [2, 2]},
        {"gpu_benchmark_repeats": 0},
        {"gpu_benchmark_model": ""},
        {"gpu_benchmark_server_command": []},
        {"gpu_benchmark_server": "tgi"},
    ],
)
def test_settings_that_make_no_run_are_refused_before_anything_starts(
    playbook: Playbook, changes: dict[str, Any]
) -> None:
    done = playbook.run("--tags", "inference", **changes)
    assert done.returncode == 2
    assert "Measure the inference server" not in done.stdout
    assert not playbook.reports.exists()


def test_another_workload_is_not_compared(playbook: Playbook) -> None:
    quick = {"gpu_benchmark_repeats": 1, "gpu_benchmark_levels": [1]}
    assert playbook.run("--tags", "baseline", **quick).returncode == 0
    assert playbook.run(gpu_benchmark_output_length=16, **quick).returncode == 0
    report = playbook.report("run")
    assert report["refused"] == ["workload output_length: 32 -> 16"]
    assert report["comparison"] == []
