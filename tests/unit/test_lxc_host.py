# SPDX-License-Identifier: GPL-3.0-or-later
"""Loading drivers, creating nodes and changing running containers, with stand-ins for the tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_tuning import lxc_boot, lxc_config, lxc_devices, lxc_host, lxc_repair
from gpu_tuning.lxc_repair import Request
from gpu_tuning.proc_devices import Majors

ALLOW = "lxc.cgroup2.devices.allow"
CONFIG = f"{ALLOW}: c 195:* rwm\n{ALLOW}: c 504:* rwm\n" + "".join(
    f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file\n"
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm")
)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")


class Tools:
    """A directory that is all of PATH, with a log of the calls."""

    def __init__(self, root: Path) -> None:
        self.path, self.log = root / "bin", root / "calls"
        self.path.mkdir()
        self.log.touch()

    def add(self, name: str, body: str = "exit 0") -> None:
        script = self.path / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\nPATH=/usr/bin:/bin\n{body}\n')
        script.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    found = Tools(tmp_path)
    monkeypatch.setenv("PATH", str(found.path))
    return found


@pytest.fixture
def request_of(tmp_path: Path) -> Request:
    for name in ("proc", "dev", "pve/lxc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc" / "devices").write_text("Character devices:\n195 nvidia\n")
    (tmp_path / "old").write_text("Character devices:\n195 nvidia\n504 nvidia-uvm\n")
    (tmp_path / "pve" / "lxc" / "101.conf").write_text(CONFIG)
    roots = {f"{name}_root": str(tmp_path / name) for name in ("dev", "state", "pve", "lxc", "lock")}
    return Request(
        state="repaired",
        procfs_root=str(tmp_path / "proc"),
        recorded_devices=str(tmp_path / "old"),
        load=True,
        **roots,  # type: ignore[arg-type]
    )


def _loads_uvm(tools: Tools, root: Path) -> None:
    tools.add("modprobe", f'[ "$1" = nvidia-uvm ] && echo "509 nvidia-uvm" >> {root}/proc/devices')
    nodes = {"nvidia0": "195 0", "nvidiactl": "195 255", "nvidia-uvm": "509 0"}
    made = "\n".join(f"mknod -m 666 {root}/dev/{node} c {numbers}" for node, numbers in nodes.items())
    tools.add("nvidia-modprobe", made)


@root_only
def test_drivers_are_loaded_first_and_their_new_majors_used(
    tools: Tools, request_of: Request, tmp_path: Path
) -> None:
    _loads_uvm(tools, tmp_path)
    outcome = lxc_repair.run(request_of)
    assert f"{ALLOW}: c 509:* rwm" in (tmp_path / "pve" / "lxc" / "101.conf").read_text()
    assert tools.calls() == ["modprobe nvidia-uvm", "nvidia-modprobe -u -c 0"]
    host = {row.target: row.status for row in outcome.rows if row.container == "host"}
    assert host == {
        "host/nvidia-uvm": "changed",
        "host/dev/nvidia-uvm": "changed",
        "host/dev/nvidia0": "changed",
        "host/dev/nvidiactl": "changed",
    }
    assert lxc_repair.run(request_of).changed is False


def test_in_check_mode_no_tool_runs(tools: Tools, request_of: Request, tmp_path: Path) -> None:
    _loads_uvm(tools, tmp_path)
    import dataclasses

    outcome = lxc_repair.run(dataclasses.replace(request_of, check=True))
    assert tools.calls() == []
    assert outcome.changed is True
    row = next(row for row in outcome.rows if row.target == "host/nvidia-uvm")
    assert "would be loaded" in (row.reason or "")


def test_a_driver_that_does_not_load_changes_nothing_of_its_rule(
    tools: Tools, request_of: Request, tmp_path: Path
) -> None:
    tools.add("modprobe", "echo 'FATAL: Module nvidia-uvm not found' >&2; exit 1")
    outcome = lxc_repair.run(request_of)
    assert (tmp_path / "pve" / "lxc" / "101.conf").read_text() == CONFIG
    reasons = {row.target: row.reason or "" for row in outcome.rows}
    assert "modprobe nvidia-uvm failed: FATAL: Module nvidia-uvm not found" in reasons["host/nvidia-uvm"]
    assert "nvidia-modprobe is not installed, so /dev/nvidia0 was not created" in reasons["host/dev/nvidia0"]
    assert "nvidia-uvm is not registered" in reasons["101/nvidia-uvm"]


def test_a_helper_that_creates_nothing_is_reported(tools: Tools, request_of: Request) -> None:
    tools.add("modprobe")
    tools.add("nvidia-modprobe", "echo no device; exit 1")
    outcome = lxc_repair.run(request_of)
    row = next(row for row in outcome.rows if row.target == "host/dev/nvidia0")
    assert "still missing: nvidia-modprobe ended with 1: no device" in (row.reason or "")


@pytest.mark.parametrize(
    ("paths", "flags"),
    [
        (["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia0"], ["-c", "3", "-c", "0"]),
        (["/dev/nvidia-uvm-tools", "/dev/nvidia-uvm", "/dev/nvidia-modeset"], ["-u", "-m"]),
        (["/dev/nvidia-nvswitchctl", "/dev/nvidia-nvlink", "/dev/nvidia-caps/nvidia-cap1"], ["-s", "-l"]),
    ],
)
def test_the_vendors_flags(paths: list[str], flags: list[str]) -> None:
    assert lxc_host.helper_flags(paths) == flags


def _moved_plan(text: str) -> lxc_devices.Plan:
    host = lxc_devices.Host(
        Majors({"nvidia-uvm": (507,), "nvidia-caps": (504,)}),
        explicit=Majors({"nvidia-uvm": (504,), "nvidia-caps": (507,)}),
        nodes_known=False,
    )
    container = lxc_devices.Container("101", "/etc/pve/lxc/101.conf", lxc_config.parse(text, "proxmox"))
    return lxc_devices.diagnose(container, host)


def test_live_takes_all_old_rules_away_before_it_gives_new_ones(tools: Tools) -> None:
    tools.add("lxc-cgroup")
    plan = _moved_plan(f"{ALLOW}: c 504:* rwm # x\n{ALLOW}: c 507:0 r\n")
    assert lxc_host.apply_live(plan) == (lxc_host.APPLIED, "")
    assert tools.calls() == [
        "lxc-cgroup -n 101 devices.deny c 504:* rwm",
        "lxc-cgroup -n 101 devices.deny c 507:0 r",
        "lxc-cgroup -n 101 devices.allow c 507:* rwm",
        "lxc-cgroup -n 101 devices.allow c 504:0 r",
    ]


def test_live_that_fails_says_why_and_what_does_not_apply_is_told(tools: Tools) -> None:
    plan = _moved_plan(f"{ALLOW}: c 504:* rwm\n")
    assert lxc_host.apply_live(plan) == (
        lxc_host.NOT_APPLIED,
        "lxc-cgroup devices.deny 'c 504:* rwm' failed: lxc-cgroup is not installed",
    )
    deny = _moved_plan(f"{ALLOW.replace('allow', 'deny')}: c 504:* rwm\n")
    assert lxc_host.apply_live(deny)[0] == lxc_host.NOT_APPLIED
    open_list = _moved_plan(f"{ALLOW}: a\n{ALLOW}: c 504:* rwm\n")
    assert lxc_host.apply_live(open_list)[0] == lxc_host.NOTHING_TO_APPLY


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("sh: 1: cannot create /dev/nvidia0: Operation not permitted", "EPERM"),
        ("sh: can't create /dev/nvidia0: Permission denied", "EACCES"),
        ("/bin/sh: line 1: /dev/nvidia0: No such device or address", "ENXIO"),
        ("sh: 1: cannot create /dev/nvidia0: No such device", "ENODEV"),
        ("ENOENT", "ENOENT"),
        ("something else", ""),
    ],
)
def test_what_shells_say_is_understood(answer: str, name: str) -> None:
    assert lxc_host.error_name(answer) == name


@root_only
def test_the_boot_repair_is_the_same_code(
    tools: Tools, request_of: Request, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _loads_uvm(tools, tmp_path)
    roots = {
        name: f"{tmp_path}/{name.split('-')[0]}"
        for name in ("procfs-root", "dev-root", "state-root", "pve-root")
    }
    roots["procfs-root"] = str(tmp_path / "proc")
    roots |= {"lxc-root": f"{tmp_path}/lxc", "lock-root": f"{tmp_path}/lock"}
    arguments = [f"--{name}={value}" for name, value in roots.items()]
    lxc_repair.run(Request(state="diagnosed", record=True, **_recorded_roots(request_of, tmp_path)))
    assert lxc_boot.main(arguments) == 0
    assert f"{ALLOW}: c 509:* rwm" in (tmp_path / "pve" / "lxc" / "101.conf").read_text()
    assert "repaired: 101" in capsys.readouterr().out


def _recorded_roots(request: Request, root: Path) -> dict[str, str]:
    """Return the roots of the host as it was before the reboot: nvidia-uvm had 504."""
    before = root / "proc.before"
    before.mkdir()
    (before / "devices").write_text((root / "old").read_text())
    names = ("dev_root", "state_root", "pve_root", "lxc_root", "lock_root")
    return {"procfs_root": str(before), **{name: getattr(request, name) for name in names}}


def test_the_boot_repair_waits_for_quorum_only_so_long(tmp_path: Path) -> None:
    config = tmp_path / "lxc" / "101.conf"
    config.parent.mkdir()
    config.write_text("memory: 1\n")
    config.chmod(0o440)
    assert lxc_boot.wait_for_quorum(str(tmp_path), 0) is False
    config.chmod(0o640)
    assert lxc_boot.wait_for_quorum(str(tmp_path), 0) is True
    assert lxc_boot.wait_for_quorum("/nonexistent", 0) is True


def test_the_boot_repair_fails_loudly_for_what_needs_a_person(
    tools: Tools, request_of: Request, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--no-load", f"--pve-root={tmp_path}/pve", f"--state-root={tmp_path}/state"]
    arguments += [
        f"--procfs-root={tmp_path}/proc",
        f"--lock-root={tmp_path}/lock",
        f"--lxc-root={tmp_path}/lxc",
    ]
    assert lxc_boot.main([*arguments, "--path", "999"]) == 1
    assert "no container 999" in capsys.readouterr().err
    (tmp_path / "pve" / "lxc" / "101.conf").write_text(CONFIG + "lock: backup\n" + f"{ALLOW}: c 511:* r\n")
    assert lxc_boot.main(arguments) == 1
