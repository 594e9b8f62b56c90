# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs on the measured host beside the P2P program: fingerprint, repeats of the fabric, the job."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from benchmark_samples import ROOT, standin
from gpu_tuning.benchmark import bundle, fingerprint, job, sweep


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with both stand-in libraries."""
    folder = tmp_path_factory.mktemp("libraries")
    standin("libcuda_standin.c", folder / "libcuda.so.1")
    standin("libnvml_standin.c", folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture
def pyz(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "benchmark.pyz"
    path.write_bytes(bundle.build(str(ROOT / "roles/gpu_benchmark/files/p2p_bandwidth.py")))
    return path


def call(pyz: pathlib.Path, *arguments: str, **settings: Any) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("STANDIN", "LD_"))}
    done = subprocess.run(
        [sys.executable, str(pyz), *arguments],
        env={**clean, **{name: str(value) for name, value in settings.items()}},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return dict(json.loads(done.stdout))


def order(tmp_path: pathlib.Path, lease: float = 30, **spec: Any) -> str:
    whole = {
        "python": sys.executable, "engine": "driver", "repeats": 2, "size_mib": 1, "timeout_s": 60,
        "arguments": ["--size-mib", "1", "--iterations", "3", "--timeout", "60"], **spec,
    }  # fmt: skip
    path = tmp_path / "order.json"
    path.write_text(
        json.dumps(
            {
                "base": str(tmp_path / "work"), "lease": lease, "program": "fabric", "spec": whole,
                "procfs_root": "/proc", "sysfs_root": "/sys", "environment": {"NCCL_DEBUG": "WARN"},
            }
        )
    )  # fmt: skip
    return str(path)


def finish(pyz: pathlib.Path, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    deadline = time.monotonic() + 60
    while (answer := call(pyz, "poll", folder, "0"))["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    result = pathlib.Path(folder) / "result.json"
    return answer, json.loads(result.read_text()) if result.exists() else {}


def test_the_fabric_is_measured_as_often_as_asked(
    pyz: pathlib.Path, drivers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    started = call(pyz, "start", order(tmp_path), LD_LIBRARY_PATH=drivers, STANDIN_DEVICES=2)
    answer, result = finish(pyz, started["folder"])
    assert answer["outcome"] == {"exit_code": 0, "reason": None}
    assert result["status"] == "complete"
    assert [run["status"] for run in result["runs"]] == ["complete", "complete"]
    assert "fabric, repeat 2/2" in answer["text"]
    assert "GPU 0 -> GPU 1, push, peer access on" in answer["text"]
    assert oct(os.stat(started["folder"]).st_mode & 0o777) == "0o700"
    assert started["fingerprint"]["driver"] == "595.45"
    assert started["fingerprint"]["gpus"][0]["max_memory_clock_mhz"] == 14001
    assert started["fingerprint"]["environment"]["NCCL_DEBUG"] == "WARN"


def test_no_gpu_is_exit_code_3_and_one_sentence(pyz: pathlib.Path, tmp_path: pathlib.Path) -> None:
    answer, result = finish(pyz, call(pyz, "start", order(tmp_path))["folder"])
    assert answer["outcome"]["exit_code"] == 3
    assert result["status"] == "failed"
    assert "libcuda.so.1 cannot be loaded" in result["error"]


def test_a_hang_under_a_lapsed_lease_leaves_no_process(
    pyz: pathlib.Path, drivers: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    started = call(
        pyz, "start", order(tmp_path, lease=3), LD_LIBRARY_PATH=drivers, STANDIN_DEVICES=2, STANDIN_HANG="0>1"
    )
    folder = pathlib.Path(started["folder"])
    deadline = time.monotonic() + 60
    while "GPU 1 -> host" not in call(pyz, "poll", str(folder), "0")["text"] and time.monotonic() < deadline:
        time.sleep(0.1)  # the copy after this one hangs
    while not (folder / "outcome.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    outcome = json.loads((folder / "outcome.json").read_text())
    assert "nobody asked after it for 3 s" in outcome["reason"]
    result = json.loads((folder / "result.json").read_text())
    assert result["runs"][0]["status"] == "partial"
    left = [
        entry.name
        for entry in pathlib.Path("/proc").iterdir()
        if entry.name.isdigit() and str(folder) in _words(entry)
    ]
    assert left == []


def _words(process: pathlib.Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


FAKE_NVBANDWIDTH = """#!{python}
import json, sys
rows = [["N/A", "50.0"], ["49.0", "N/A"]]
case = {{"name": "device_to_device_memcpy_write_ce", "status": "{status}", "bandwidth_matrix": rows}}
assert sys.argv[1:4] == ["-j", "-b", "1"], sys.argv
print(json.dumps({{"nvbandwidth": {{"testcases": [case], "GPU Device list": ["0: a", "1: b"]}}}}))
"""


@pytest.mark.parametrize(("status", "code"), [("Passed", 0), ("Error", 1)])
def test_nvbandwidth_is_used_where_it_is_installed(
    pyz: pathlib.Path, tmp_path: pathlib.Path, status: str, code: int
) -> None:
    tool = tmp_path / "bin/nvbandwidth"
    tool.parent.mkdir()
    tool.write_text(FAKE_NVBANDWIDTH.format(python=sys.executable, status=status))
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    answer, result = finish(pyz, call(pyz, "start", order(tmp_path, engine="auto"), PATH=path)["folder"])
    assert answer["outcome"]["exit_code"] == code
    if code:
        assert "measured nothing" in result["error"]
    else:
        assert [one["median_gbps"] for one in result["runs"][1]["measurements"]] == [50.0, 49.0]


def test_clocks_and_bus_as_nvml_tells_them(drivers: pathlib.Path) -> None:
    script = "from gpu_tuning.benchmark import nvml; import json; print(json.dumps(nvml.gpus()))"

    def ask(**settings: Any) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": f"{ROOT}/module_utils", **{name: str(one) for name, one in settings.items()}},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    version, gpus = ask(LD_LIBRARY_PATH=drivers, STANDIN_DEVICES=3)
    assert (version, len(gpus)) == ("595.45", 3)
    assert gpus[2] == {
        "name": "Stand-in GPU 2", "memory_clock_mhz": 405, "sm_clock_mhz": 210, "max_memory_clock_mhz": 14001,
        "max_sm_clock_mhz": 2600, "memory_bus_bits": 512,
    }  # fmt: skip
    assert ask(LD_LIBRARY_PATH=drivers, STANDIN_NO_BUS=1)[1][0]["memory_bus_bits"] is None
    assert ask(LD_LIBRARY_PATH=drivers, STANDIN_NVML=9) == [None, []]
    assert ask() == [None, []]


NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45  Release Build  (dvs)\n"


def test_the_fingerprint_of_a_recorded_host(tmp_path: pathlib.Path) -> None:
    texts = {
        "proc/sys/kernel/osrelease": "6.8.12-4-pve\n",
        "proc/cmdline": "quiet iommu=pt amd_pstate=active\n",
        "proc/driver/nvidia/version": NVRM,
        "sys/kernel/iommu_groups/0/type": "identity\n",
        "sys/kernel/iommu_groups/1/type": "DMA-FQ\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    }  # fmt: skip
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = fingerprint.collect(
        f"{tmp_path}/proc", f"{tmp_path}/sys", {"NCCL_P2P_LEVEL": "SYS", "HOME": "/x"}
    )
    assert found["kernel"] == "6.8.12-4-pve"
    assert found["cmdline"] == ["quiet", "iommu=pt", "amd_pstate=active"]
    assert found["driver"] == "595.45"
    assert found["iommu"] == ["DMA-FQ", "identity"]
    assert found["governor"] == "performance"
    assert found["environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert "HOME" not in found["environment"]


def test_secrets_stay_out_of_the_fingerprint() -> None:
    given = {"SGLANG_API_KEY": "s", "VLLM_HF_TOKEN": "s", "NCCL_IB_HCA": "mlx5", "HF_TOKEN": "s"}
    assert fingerprint.environment(given) == {"NCCL_IB_HCA": "mlx5"}


def test_a_reused_process_number_is_not_taken_for_the_supervisor(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pid").write_text(f"{os.getpid()} 1")
    (tmp_path / "progress").write_text("")
    assert job.poll(str(tmp_path), 0)["state"] == "lost"
    job.stop(str(tmp_path))  # ends nothing: this test goes on


def test_only_a_jobs_own_folder_is_removed(tmp_path: pathlib.Path) -> None:
    own, other = tmp_path / "gpu-benchmark-x", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    link = tmp_path / "gpu-benchmark-link"
    link.symlink_to(other)
    job.remove(str(own))
    assert not own.exists()
    for wrong in (other, link):
        with pytest.raises(ValueError, match="no job's folder"):
            job.remove(str(wrong))
    assert other.is_dir()


def test_seeds_differ_per_repeat_and_level_and_match_across_arms() -> None:
    spec = {"seed": 7, "levels": [1, 10, 64]}
    seeds = [sweep.seed_of(spec, repeat, level) for repeat in range(1, 6) for level in spec["levels"]]
    assert len(set(seeds)) == 15
    assert seeds == [
        sweep.seed_of(dict(spec), repeat, level) for repeat in range(1, 6) for level in (1, 10, 64)
    ]


def test_only_known_names_are_filled_into_a_command() -> None:
    command = ["x", "--seed={seed}", '{"stop": "{end}"}']
    assert sweep.fill(command, {"seed": 5}) == ["x", "--seed=5", '{"stop": "{end}"}']


@pytest.mark.parametrize(("level", "wanted"), [(1, 8), (10, 40), (64, 256)])
def test_every_stream_has_several_requests(level: int, wanted: int) -> None:
    assert sweep.requests_of(level, {"requests_per_stream": 4, "least_requests": 8}) == wanted
