# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive, units, rule and metrics, by the programs that will read them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_tuning import agent_archive, gpu_health, metrics, persist, persist_files
from gpu_tuning.rows import Row
from support.persisted import PersistedHost, section
from support.tree import make_recorded_host

#: promtool comes with Debian's prometheus; it need not be installed to be used.
PROMTOOL = os.environ.get("GPU_TUNING_PROMTOOL") or shutil.which("promtool")
HAS_UDEVADM_VERIFY = (
    shutil.which("udevadm") is not None
    and subprocess.run(["udevadm", "verify", "--help"], capture_output=True, check=False).returncode == 0
)


@pytest.fixture
def host(memory_path: Path) -> PersistedHost:
    host = PersistedHost(make_recorded_host(memory_path / "host"))
    host.run(persist.PERSISTED)
    return host


def promtool(*arguments: str, text: str = "") -> None:
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# The archive


def test_a_check_imports_little(host: PersistedHost) -> None:
    """Most of what a check costs on every host every few minutes is imports."""
    script = """import sys
sys.path.insert(0, sys.argv[1])
from gpu_tuning.agent import main
assert main(["--policy", sys.argv[2], "metrics"]) == 0
print("imported:", *sys.modules)"""
    files = (
        f"{host.root}/usr/local/lib/gpu-tuning/gpu-tuning.pyz",
        f"{host.root}/etc/gpu-tuning/policy.json",
    )
    command = [sys.executable, "-IS", "-c", script, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.partition("imported:")[2].split())
    assert {"json", "gpu_tuning.cpuidle"} <= imported
    costly = {"argparse", "dataclasses", "fnmatch", "inspect", "random", "subprocess", "tempfile", "typing"}
    assert not costly & imported


def test_an_archive_holds_what_its_main_module_imports_and_no_more() -> None:
    held = agent_archive.sources("agent")
    assert {"__init__.py", "agent.py", "tuner.py", "pcie_mrrs.py", "sysctl_d.py"} <= set(held)
    assert not {"persist.py", "persist_files.py", "agent_archive.py", "report.py"} & set(held)
    assert not any(path.startswith("facts/") for path in held)


def test_packages_within_the_package_are_followed() -> None:
    held = agent_archive.sources("facts.cpu")
    assert {"__init__.py", "facts/__init__.py", "facts/cpu.py", "facts/reader.py"} <= set(held)


def test_an_archive_runs_alone(tmp_path: Path) -> None:
    for compiled in (False, True):
        path = tmp_path / f"{compiled}.pyz"
        path.write_bytes(agent_archive.build("agent", sys.executable, compiled))
        path.chmod(0o755)
        done = subprocess.run(
            [str(path), "--help"], capture_output=True, text=True, check=False, cwd="/", env={}
        )
        assert "usage: gpu-tuning.pyz" in done.stderr, done.stderr


def test_byte_code_is_really_used(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(agent_archive.build("agent", sys.executable, True))
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "byte-code.pyz", "w") as stripped:
        for name in whole.namelist():
            if name.endswith(".pyc"):
                stripped.writestr(name, whole.read(name))
    command = [sys.executable, "-IS", str(tmp_path / "byte-code.pyz"), "--help"]
    assert "usage" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_archives_are_the_same_for_the_same_sources_and_python() -> None:
    one = agent_archive.build("agent", "/usr/bin/python3", True)
    assert agent_archive.same(one, agent_archive.build("agent", "/usr/bin/python3", True))
    assert not agent_archive.same(one, agent_archive.build("agent", "/usr/bin/python3.9", True))
    assert not agent_archive.same(one, agent_archive.build("agent", "/usr/bin/python3", False))
    assert not agent_archive.same(one, one[: len(one) // 2])
    assert not agent_archive.same(one, b"")


def test_a_changed_source_makes_another_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    one = agent_archive.build("rows")
    real = agent_archive.sources("rows")
    monkeypatch.setattr(agent_archive, "sources", lambda main: {**real, "rows.py": real["rows.py"] + "#"})
    assert not agent_archive.same(one, agent_archive.build("rows"))


# Units and the rule


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this machine")
def test_systemd_takes_the_units(host: PersistedHost) -> None:
    units = sorted((host.root / "etc/systemd/system").glob("gpu-tuning-*"))
    assert [unit.name for unit in units] == [
        "gpu-tuning-apply.service",
        "gpu-tuning-check.service",
        "gpu-tuning-check.timer",
        "gpu-tuning-device@.service",
    ]
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units)], capture_output=True, text=True, check=False
    )
    # Names only our units: others on the machine may be wrong in their own ways.
    assert not [line for line in done.stderr.splitlines() if "gpu-tuning" in line]


@pytest.mark.skipif(not HAS_UDEVADM_VERIFY, reason="no udevadm verify (systemd 254) on this machine")
def test_udev_takes_the_rule(host: PersistedHost) -> None:
    rule = host.root / "etc/udev/rules.d/90-gpu-tuning.rules"
    done = subprocess.run(["udevadm", "verify", str(rule)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("given", "matches"),
    [
        (
            {"vendor": "0x10DE", "class": ["0x0300", "0x030200"]},
            'ATTR{vendor}=="0x10de", ATTR{class}=="0x0300*|0x030200*"',
        ),
        ({"devices": ["01:00.0", "0000:11:00.0"]}, 'KERNEL=="0000:01:00.0|0000:11:00.0"'),
        ({"vendor": "0x10de", "device": "0x2bb1"}, 'ATTR{vendor}=="0x10de", ATTR{device}=="0x2bb1"'),
        ({"driver": "nvidia"}, 'DRIVER=="nvidia"'),
    ],
)
def test_the_rule_matches_what_the_policy_selects(given: dict[str, object], matches: str) -> None:
    rule = persist_files.udev_rule(section("pcie_maxreadreq", value=4096, **given)).splitlines()[-1]
    assert rule == (
        f'ACTION=="bind", SUBSYSTEM=="pci", {matches}, '
        'RUN+="/usr/bin/systemctl --no-block start gpu-tuning-device@%k.service"'
    )


# Metrics


@pytest.mark.skipif(not PROMTOOL, reason="no promtool (Debian: prometheus); GPU_TUNING_PROMTOOL names one")
def test_promtool_takes_the_metrics(host: PersistedHost) -> None:
    host.write("sys/bus/pci/devices/0000:01:00.0/aer_dev_correctable", "RxErr 3\nTOTAL_ERR_COR 3\n")
    said = host.agent("metrics")
    assert said.returncode == 0
    promtool("check", "metrics", text=said.stdout)


def test_a_check_writes_what_it_found(host: PersistedHost) -> None:
    textfile = host.write("var/lib/prometheus/node-exporter/gpu_tuning.prom", "old\n")
    host.write("proc/sys/vm/swappiness", "60\n")
    host.write("sys/bus/pci/devices/0000:01:00.0/aer_dev_fatal", "TOTAL_ERR_FATAL 2\n")
    (host.root / "sys/bus/pci/devices/0000:11:00.0/config").write_bytes(b"\xff" * 4096)
    checked = host.agent("check")
    assert checked.returncode == 0
    assert "sysctl:vm.swappiness: overridden" in checked.stderr
    lines = textfile.read_text().splitlines()
    assert 'gpu_tuning_setting_actual{id="sysctl:vm.swappiness",kind="sysctl"} 60' in lines
    assert 'gpu_tuning_setting_desired{id="sysctl:vm.swappiness",kind="sysctl"} 10' in lines
    assert 'gpu_tuning_setting_in_desired_state{id="sysctl:vm.swappiness",kind="sysctl"} 0' in lines
    assert 'gpu_tuning_setting_in_desired_state{id="cpuidle:cpu127/C2",kind="cpuidle"} 1' in lines
    assert "gpu_tuning_gpus 7" in lines
    assert "gpu_tuning_gpus_expected 8" in lines
    assert 'gpu_tuning_gpu_present{address="0000:11:00.0"} 0' in lines
    assert 'gpu_tuning_pcie_link_width_lanes{address="0000:01:00.0"} 16' in lines
    assert 'gpu_tuning_pcie_aer_errors_total{address="0000:01:00.0",severity="fatal"} 2' in lines
    assert textfile.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in textfile.parent.iterdir()] == [textfile.name]


def test_a_host_without_node_exporter_is_checked_all_the_same(host: PersistedHost) -> None:
    host.write("proc/sys/vm/swappiness", "60\n")
    checked = host.agent("check")
    assert checked.returncode == 0
    assert "no metrics" in checked.stdout
    assert "sysctl:vm.swappiness: overridden" in checked.stderr


def test_what_does_not_apply_gives_no_metric() -> None:
    rows = [
        Row("module:x", "module", "x", desired="loaded", status="not_applicable", reason="no RDMA device"),
        Row("sysctl:a", "sysctl", "a", before="1\t2", desired="1 3", status="overridden", reason="r"),
        Row("cpufreq:p", "cpufreq", "p", before='per"f\\', desired="x", status="ok"),
    ]
    text = metrics.exposition(rows, [], None, 1.0, 0.5)
    assert "module:x" not in text
    assert 'gpu_tuning_setting_info{id="cpufreq:p",kind="cpufreq",desired="x",actual="per\\"f\\\\"} 1' in text
    assert "setting_actual" not in text


def test_only_gpus_are_counted(host: PersistedHost) -> None:
    found = gpu_health.addresses(str(host.root / "sys"))
    assert found == [f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")]
