# SPDX-License-Identifier: GPL-3.0-or-later
"""Real LXC containers whose device rules are stale: refused inside before the playbook, open after it.

The stand-in for nvidia-uvm is /dev/cpu/0/cpuid (major 203), which any x86 kernel serves: the recorded
/proc/devices gives that major to nvidia-uvm, and the config still names 504.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import lxc_config, lxc_devices, lxc_host, proc_devices

REPO = Path(__file__).resolve().parents[2]
MAJOR = 203
OLD = "Character devices:\n195 nvidia\n504 nvidia-uvm\n"
NOW = f"Character devices:\n195 nvidia\n{MAJOR} nvidia-uvm\n"


def _family() -> str:
    with open("/proc/cgroups") as stream:
        line = next(line.split() for line in stream if line.startswith("devices"))
    return "cgroup" if line[1] != "0" else "cgroup2"


class Site:
    """A directory with containers, a recorded procfs, and the roots of the playbook."""

    def __init__(self, root: Path) -> None:
        self.root, self.lxc = root, root / "lxc"
        self.names: list[str] = []
        (root / "proc").mkdir()
        (root / "proc" / "devices").write_text(NOW)
        (root / "proc" / "cgroups").write_text(Path("/proc/cgroups").read_text())
        (root / "devices.old").write_text(OLD)
        self.node = root / "nodes" / "nvidia-uvm"
        self.node.parent.mkdir()
        os.mknod(self.node, stat.S_IFCHR | 0o666, os.makedev(MAJOR, 0))

    def start(self, name: str, rule: str = "c 504:* rwm") -> Path:
        home = self.lxc / name
        for directory in ("dev", "proc", "sys", "usr", "etc", "tmp", "run"):
            (home / "rootfs" / directory).mkdir(parents=True)
        for link in ("bin", "lib", "lib64", "sbin"):
            (home / "rootfs" / link).symlink_to(f"usr/{link}")
        allow = f"lxc.{_family()}.devices"
        lines = [
            "# a comment that names 504",
            f"lxc.uts.name = {name}",
            f"lxc.rootfs.path = dir:{home}/rootfs",
            "lxc.init.cmd = /bin/sleep 100000",
            "lxc.signal.halt = SIGKILL",
            "lxc.net.0.type = empty",
            "lxc.mount.auto = proc:mixed sys:ro",
            "lxc.apparmor.profile = unconfined",
            f"{allow}.deny = a",
            *(f"{allow}.allow = c {base}:* rwm" for base in (1, 5, 136)),
            f"{allow}.allow = {rule}",
            "lxc.mount.entry = /usr usr none ro,bind 0 0",
            f"lxc.mount.entry = {self.node} dev/nvidia-uvm none bind,create=file 0 0",
        ]
        config = home / "config"
        config.write_text("\n".join(lines) + "\n")
        self.names.append(name)
        subprocess.run(["lxc-start", *self.arguments(name)], check=True)
        subprocess.run(["lxc-wait", *self.arguments(name), "-s", "RUNNING", "-t", "30"], check=True)
        return config

    def arguments(self, name: str) -> list[str]:
        return ["-P", str(self.lxc), "-n", name]

    def pid(self, name: str) -> str:
        command = ["lxc-info", *self.arguments(name), "-p", "-H"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def open_inside(self, name: str) -> str:
        """Return "ok" or what the container's shell says about opening the device for reading and writing."""
        command = ["lxc-attach", *self.arguments(name), "--", "/bin/sh", "-c", "exec 3<>/dev/nvidia-uvm"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        return done.stderr.strip().rsplit(": ", 1)[-1] if done.returncode else "ok"

    def play(self, *arguments: str, succeed: bool = True, **variables: Any) -> str:
        """Run the playbook and return what it printed."""
        extra = {
            "procfs_root": str(self.root / "proc"),
            "state_root": str(self.root / "state"),
            "lxc_gpu_devices_lxc_root": str(self.lxc),
            "lxc_gpu_devices_pve_root": str(self.root / "pve"),
            "lxc_gpu_devices_lock_root": str(self.root / "lock"),
            "lxc_gpu_devices_recorded_devices": str(self.root / "devices.old"),
            "lxc_gpu_devices_live": True,
            "lxc_gpu_devices_verify": True,
            "lxc_gpu_devices_restart_timeout": 30,
            **variables,
        }
        command = [
            os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK", "ansible-playbook"),
            *("-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"),
            *("-e", json.dumps(extra), *arguments, "playbooks/lxc.yml"),
        ]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        assert (done.returncode == 0) is succeed, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> None:
        for name in self.names:
            subprocess.run(["lxc-stop", *self.arguments(name), "-k"], check=False)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    place = Site(tmp_path)
    yield place
    place.stop()


@pytest.fixture(autouse=True)
def _containers_are_possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("real LXC containers need root")
    if not Path("/dev/cpu/0/cpuid").exists():
        pytest.skip("this kernel serves no /dev/cpu/0/cpuid, the stand-in for a GPU's device")


def test_live_the_refused_device_opens_without_a_restart(site: Site) -> None:
    config = site.start("gpu")
    before, pid = config.read_text(), site.pid("gpu")
    assert site.open_inside("gpu") == "Operation not permitted"
    checked = site.play("--check", "--diff")
    assert f"+lxc.{_family()}.devices.allow = c {MAJOR}:* rwm" in checked
    assert config.read_text() == before
    assert site.open_inside("gpu") == "Operation not permitted"
    site.play()
    assert site.open_inside("gpu") == "ok"
    assert site.pid("gpu") == pid
    assert config.read_text() == before.replace("c 504:* rwm", f"c {MAJOR}:* rwm")
    assert "changed=0" in site.play()


def test_without_live_the_play_says_that_a_restart_is_needed_and_the_restart_cures(site: Site) -> None:
    config = site.start("gpu")
    pid = site.pid("gpu")
    told = site.play(lxc_gpu_devices_live=False, succeed=False)
    assert "EPERM" in told
    assert "restart_required" in told or "until they are restarted" in told
    assert f"c {MAJOR}:* rwm" in config.read_text()
    assert site.open_inside("gpu") == "Operation not permitted"
    site.play(lxc_gpu_devices_restart=True)
    assert site.open_inside("gpu") == "ok"
    assert site.pid("gpu") != pid


def test_only_containers_whose_rules_changed_are_restarted(site: Site) -> None:
    site.start("stale-a")
    site.start("right", f"c {MAJOR}:* rwm")
    site.start("stale-b")
    pids = {name: site.pid(name) for name in site.names}
    site.play(lxc_gpu_devices_restart=True)
    assert {name for name in site.names if site.pid(name) != pids[name]} == {"stale-a", "stale-b"}
    assert [site.open_inside(name) for name in site.names] == ["ok", "ok", "ok"]


def test_lxc_resolves_a_rule_by_path_at_start(site: Site) -> None:
    """What mode major_free relies on, with this machine's LXC."""
    site.start("gpu", f"{site.node} rwm")
    assert site.open_inside("gpu") == "ok"
    site.start("other", "/dev/null rwm")
    assert site.open_inside("other") == "Operation not permitted"


def _plan(site: Site, config: Path, *nodes: str) -> lxc_devices.Plan:
    mounts = "".join(f"lxc.mount.entry = /dev/{node} dev/{node} none bind,optional\n" for node in nodes)
    parsed = lxc_config.parse(config.read_text() + mounts, "lxc")
    family = "cgroup1" if _family() == "cgroup" else "cgroup2"
    host = lxc_devices.Host(
        proc_devices.parse_proc_devices(NOW), dev_root=str(site.node.parent), family=family
    )
    return lxc_devices.diagnose(lxc_devices.Container("gpu", str(config), parsed), host)


def _inside(site: Site, script: str) -> None:
    subprocess.run(["lxc-attach", *site.arguments("gpu"), "--", "/bin/sh", "-ec", script], check=True)


def test_the_errors_inside_are_told_apart_each_with_its_cure(site: Site) -> None:
    config = site.start("gpu", "c 10:* rwm")
    _inside(
        site,
        "mkdir /dev/nvidia-caps; mknod /dev/nvidia-caps/nvidia-cap1 c 10 254; mknod /dev/nvidiactl c 1 3",
    )
    _inside(
        site,
        "mkdir /dev/nvidia-caps-imex-channels; mount -t tmpfs -o nodev none /dev/nvidia-caps-imex-channels",
    )
    _inside(site, "mknod /dev/nvidia-caps-imex-channels/channel0 c 1 3; : > /dev/nvidia0")
    nodes = {
        "nvidia-uvm": "EPERM: the device cgroup refuses it",
        "nvidia-modeset": "ENOENT: there is no such node",
        "nvidia-caps-imex-channels/channel0": "EACCES: the node's mode or owner refuses it",
        "nvidia-caps/nvidia-cap1": "ENODEV: no driver answers",
        "nvidia0": "ENOTCHR: remove what is there",
        "nvidiactl": "",
    }
    rows = {
        row.target: row for row in lxc_host.verify_inside(_plan(site, config, *nodes), str(site.node.parent))
    }
    for node, words in nodes.items():
        row = rows[f"gpu/open/dev/{node}"]
        assert words in (row.reason or ""), node
        assert (row.status == "ok") is (words == ""), node
    assert "no CUDA runtime" in (rows["gpu/cuda"].reason or "")


@pytest.mark.parametrize(
    ("code", "words"), [(0, ""), (999, "cuInit gives 999 in gpu: the usual cause is /dev/nvidia-uvm")]
)
def test_a_cuda_runtime_is_initialised(site: Site, code: int, words: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("a stand-in for libcuda needs gcc")
    config = site.start("gpu", f"c {MAJOR}:* rwm")
    place = site.lxc / "gpu" / "rootfs"
    (place / "opt").mkdir()
    (place / "etc" / "ld.so.conf").write_text("/opt\n")
    source = f"int cuInit(unsigned flags) {{ return {code} + 0 * flags; }}"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-xc",
        "-",
        "-o",
        str(place / "opt" / "libcuda.so.1"),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    _inside(site, "/sbin/ldconfig")
    row = lxc_host.verify_inside(_plan(site, config), str(site.node.parent))[-1]
    assert row.target == "gpu/cuda"
    assert row.status == ("failed" if code else "ok")
    assert words in (row.reason or "")
