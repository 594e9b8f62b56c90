# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong on real hosts, with the real modules: each fault is one clear row or sentence."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import modules
from support.modules import REPO, by_id
from support.small_host import ALL_SECTIONS, WANTED, SmallHost, gpu_address, small_host
from support.tree import changed_paths, make_recorded_host, manifest

NOBODY = 65534
CLONE_NEWNS = 0x00020000
PROC_SYS = Path("/proc/sys")
#: What the tests below write for real; all of them are given back.
REAL_KEYS = (
    *("vm.swappiness", "vm.dirty_ratio", "vm.dirty_bytes", "vm.dirty_background_ratio"),
    *("vm.dirty_background_bytes", "fs.pipe-max-size"),
)


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    return small_host(memory_path / "host")


def settle(host: SmallHost, state: str = "applied", check: bool = False, **more: Any) -> dict[str, Any]:
    """Run host_settings with the ten fixes, or to restore everything."""
    sections = ALL_SECTIONS if state == "restored" else WANTED
    prepare = more.pop("prepare", None)
    return modules.run("host_settings", {**sections, **host.roots, "state": state, **more}, check, prepare)


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {identity: row["status"] for identity, row in by_id(result).items()}


# This machine


def key(name: str) -> Path:
    return PROC_SYS / name.replace(".", "/")


@pytest.fixture
def this_machine(memory_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Give a function that runs sysctl_snapshot here, and put every value back in any case."""
    if not all(os.access(key(name), os.W_OK) for name in REAL_KEYS):
        pytest.skip("this machine's /proc/sys cannot be written: run as root, outside a container")
    before = {name: key(name).read_text() for name in REAL_KEYS}
    state_root = str(memory_path / "state")

    def run(
        settings: list[dict[str, str]] | None = None, prepare: Callable[[], object] | None = None, **more: Any
    ) -> dict[str, Any]:
        arguments = {"settings": settings, "state_root": state_root, **more}
        return modules.run("sysctl_snapshot", arguments, prepare=prepare)

    try:
        yield run
    finally:
        for name, text in before.items():
            # Writing 0 to a *_bytes key is an error: its partner zeroes it.
            if key(name).read_text() != text and text != "0\n":
                key(name).write_text(text)
        assert {name: key(name).read_text() for name in REAL_KEYS} == before


def want(name: str, value: object, match: str = "exact") -> dict[str, str]:
    return {"name": name, "value": str(value), "match": match}


def other_than(name: str, *values: str) -> str:
    """Return the first of some values that a key does not have."""
    return next(value for value in values if key(name).read_text().strip() != value)


def test_a_key_that_this_kernel_does_not_have(this_machine: Callable[..., dict[str, Any]]) -> None:
    swappiness = other_than("vm.swappiness", "11", "12")
    result = this_machine([want("kernel.no_such_key", 1), want("vm.swappiness", swappiness)])
    assert statuses(result) == {"sysctl:kernel.no_such_key": "unsupported", "sysctl:vm.swappiness": "changed"}
    assert result["failed"] is False
    assert key("vm.swappiness").read_text() == f"{swappiness}\n"
    assert this_machine(state="restored")["failed"] is False


def test_a_value_that_the_kernel_refuses(this_machine: Callable[..., dict[str, Any]]) -> None:
    before = key("vm.dirty_background_ratio").read_text()
    swappiness = other_than("vm.swappiness", "11", "12")
    result = this_machine([want("vm.dirty_background_ratio", 101), want("vm.swappiness", swappiness)])
    row = by_id(result)["sysctl:vm.dirty_background_ratio"]
    assert (row["status"], row["after"]) == ("rejected", before.strip())
    assert row["reason"] == "the kernel refused 101 for vm.dirty_background_ratio: EINVAL (Invalid argument)"
    assert (result["failed"], result["changed"]) == (True, True)
    assert "1 of 3 settings failed: sysctl:vm.dirty_background_ratio: rejected" in result["msg"]
    assert by_id(result)["sysctl:vm.swappiness"]["status"] == "changed"


@pytest.mark.parametrize(("match", "status"), [("exact", "clamped"), ("minimum", "changed")])
def test_a_value_that_the_kernel_rounds_up(
    this_machine: Callable[..., dict[str, Any]], match: str, status: str
) -> None:
    """Pipes hold powers of two."""
    found = int(key("fs.pipe-max-size").read_text())
    result = this_machine([want("fs.pipe-max-size", found + 1, match)])
    row = by_id(result)["sysctl:fs.pipe-max-size"]
    assert (row["status"], row["after"]) == (status, str(2 * found))
    assert (result["failed"], result["changed"]) == (status == "clamped", True)
    if status == "clamped":
        assert row["reason"] == f"asked for {found + 1}, the kernel took the write and reads {2 * found}"
    this_machine(state="restored")
    assert key("fs.pipe-max-size").read_text() == f"{found}\n"


def test_bytes_come_back_where_a_ratio_was_set(this_machine: Callable[..., dict[str, Any]]) -> None:
    key("vm.dirty_bytes").write_text("500000000\n")
    assert key("vm.dirty_ratio").read_text() == "0\n"
    result = this_machine([want("vm.dirty_ratio", 5)])
    rows = by_id(result)
    assert rows["sysctl:vm.dirty_ratio"]["after"] == "5"
    assert (rows["sysctl:vm.dirty_bytes"]["status"], rows["sysctl:vm.dirty_bytes"]["after"]) == (
        "changed",
        "0",
    )
    assert statuses(this_machine([want("vm.dirty_ratio", 5)])) == dict.fromkeys(rows, "ok")
    assert this_machine(state="restored")["failed"] is False
    assert [key(f"vm.dirty_{which}").read_text() for which in ("bytes", "ratio")] == ["500000000\n", "0\n"]


def test_bytes_stay_where_a_ratio_was_refused(this_machine: Callable[..., dict[str, Any]]) -> None:
    key("vm.dirty_bytes").write_text("500000000\n")
    result = this_machine([want("vm.dirty_ratio", 101)])
    assert statuses(result) == {
        "sysctl:vm.dirty_ratio": "rejected",
        "sysctl:vm.dirty_bytes": "not_applicable",
    }
    assert key("vm.dirty_bytes").read_text() == "500000000\n"


def in_own_mounts(*mounts: list[str]) -> Callable[[], None]:
    """Return what gives a process mounts of its own and then runs some mount commands."""

    def prepare() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        for arguments in (["--make-rprivate", "/"], *mounts):
            subprocess.run(["mount", *arguments], check=True)

    return prepare


def test_read_only_proc_sys(this_machine: Callable[..., dict[str, Any]]) -> None:
    """As LXC and podman mount it."""
    before = key("vm.swappiness").read_text()
    read_only = in_own_mounts(["--bind", "/proc/sys", "/proc/sys"], ["-o", "remount,bind,ro", "/proc/sys"])
    settings = [want("vm.swappiness", other_than("vm.swappiness", "11", "12")), want("kernel.no_such_key", 1)]
    result = this_machine(settings, prepare=read_only)
    row = by_id(result)["sysctl:vm.swappiness"]
    assert (row["status"], row["after"]) == ("read_only", before.strip())
    assert "not writable: /proc/sys/vm/swappiness" in row["reason"]
    assert "in a container, set it on the host" in row["reason"]
    assert (result["failed"], result["changed"]) == (False, False)
    assert key("vm.swappiness").read_text() == before


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user, or mounts")


@needs_root
@pytest.mark.parametrize("state", ["applied", "restored"])
def test_an_unprivileged_user_is_told_to_become_root(memory_path: Path, state: str) -> None:
    arguments = {
        "settings": [want("vm.swappiness", 1)],
        "state": state,
        "state_root": str(memory_path / "state"),
    }
    result = modules.run("sysctl_snapshot", arguments, prepare=as_nobody)
    assert result["msg"] == "changing this host's settings needs root: run the play with --become"
    assert not (memory_path / "state").exists()


@needs_root
def test_an_unprivileged_look_at_real_devices_says_what_it_could_not_see(memory_path: Path) -> None:
    devices = sorted(path.name for path in Path("/sys/bus/pci/devices").glob("*"))
    if not devices:
        pytest.skip("this machine has no PCI device")
    arguments = {"devices": devices[-1:], "value": 512, "state_root": str(memory_path / "state")}
    result = modules.run("pcie_maxreadreq", arguments, check=True, prepare=as_nobody)
    (row,) = result["rows"]
    assert row["status"] == "failed"
    assert "cannot read beyond 64 bytes without privilege" in row["reason"]


@needs_root
def test_an_unprivileged_user_on_a_recorded_machine(host: SmallHost) -> None:
    """A check says what root would change; a run changes nothing and says that it may not."""
    host.state_root.mkdir()
    os.chown(host.state_root, NOBODY, NOBODY)
    host.config(1).chmod(0o600)
    before = manifest(host.root)
    unreadable = f"pcie_mrrs:{gpu_address(1)}"
    for check, status in ((True, "would_change"), (False, "read_only")):
        result = settle(host, check=check, prepare=as_nobody)
        expected = {row["id"]: status for row in result["rows"] if row["desired"] is not None}
        assert {i: s for i, s in statuses(result).items() if i in expected} == {
            **expected,
            unreadable: "read_only",
        }
        assert "EACCES" in by_id(result)[unreadable]["reason"]
        assert result["changed"] is check
        assert changed_paths(before, manifest(host.root)) == []


# The journal


@needs_root
@pytest.mark.parametrize(
    ("limit", "what"),
    [("nr_inodes=1", "prepare"), ("nr_inodes=2", "prepare"), ("size=4k", "write"), ("ro", "prepare")],
)
def test_a_full_disk_under_the_journal_changes_nothing(host: SmallHost, limit: str, what: str) -> None:
    host.state_root.mkdir()
    before = manifest(host.root)
    full = in_own_mounts(["-t", "tmpfs", "-o", f"mode=0700,{limit}", "tmpfs", str(host.state_root)])
    result = settle(host, prepare=full)
    error = "EROFS (Read-only file system)" if limit == "ro" else "ENOSPC (No space left on device)"
    refused = re.match(r"(.*) the journal (\S+)/journal\S*: (.*): no setting was changed; ", result["msg"])
    assert refused
    assert refused.groups() == (f"cannot {what}", str(host.state_root), error)
    assert "rows" not in result
    assert changed_paths(before, manifest(host.root)) == []


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"version": 1, "created": "", "entries": {"sysctl:a.b": 1}}']
)
@pytest.mark.parametrize("state", ["captured", "applied", "restored"])
def test_a_damaged_journal_stops_the_run_before_it_changes_anything(
    host: SmallHost, damage: str, state: str
) -> None:
    journal = Path(settle(host)["journal"])
    settle(host, "restored")
    journal.write_text(damage)
    before = manifest(host.root)
    result = settle(host, state)
    assert result["failed"] is True
    assert result["msg"].startswith(f"the journal {journal} is damaged (")
    assert result["msg"].endswith("): move it aside to go on without the values in it")
    assert changed_paths(before, manifest(host.root)) == []
    assert journal.read_text() == damage


def world_writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def linked(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [world_writable, linked])
def test_a_state_root_in_other_hands(host: SmallHost, make: Callable[[Path], None]) -> None:
    make(host.state_root)
    before = manifest(host.root.parent)
    result = settle(host)
    assert result["msg"].startswith(f"{host.state_root} must be a directory of the running user, no link")
    assert changed_paths(before, manifest(host.root.parent)) == []


def at_first(call: str, ending: str, act: Callable[[], object]) -> Callable[[], None]:
    """Return what makes a process act just before its first ``os.call`` on a file of that ending."""

    def prepare() -> None:
        real = getattr(os, call)

        def acting(fd: int, *arguments: object) -> object:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(ending):
                setattr(os, call, real)
                act()
            return real(fd, *arguments)

        setattr(os, call, acting)

    return prepare


def test_two_runs_at_once(host: SmallHost) -> None:
    """The first stops before its first write until the second has been refused."""
    (wait_read, wait_write), (go_read, go_write) = os.pipe(), os.pipe()

    def stop() -> None:
        os.write(wait_write, b".")
        os.read(go_read, 1)

    arguments = {**WANTED, **host.roots}
    first = modules.start("host_settings", arguments, prepare=at_first("write", "numa_balancing", stop))
    try:
        os.read(wait_read, 1)
        before = manifest(host.root), manifest(host.state_root)
        for state in ("captured", "applied", "restored"):
            second = settle(host, state)
            assert re.match(
                rf"another run \(process {first.pid}\) is tuning this host and holds ", second["msg"]
            )
            assert second["msg"].endswith("nothing was changed; run again when it has finished")
        assert settle(host, check=True)["changed"] is True  # only looks, and needs no lock
        assert (manifest(host.root), manifest(host.state_root)) == before
    finally:
        os.write(go_write, b".")
        result = first.result()
        for fd in (wait_read, wait_write, go_read, go_write):
            os.close(fd)
    assert (result["failed"], result["changed"]) == (False, True)
    assert result["recorded"]["sysctl:kernel.numa_balancing"] == "1"
    assert settle(host, "restored")["failed"] is False


def test_values_of_another_boot(host: SmallHost) -> None:
    boot_id = host.root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir()
    boot_id.write_text("11111111-1111-1111-1111-111111111111\n")
    before = manifest(host.root)
    settle(host)
    boot_id.write_text("22222222-2222-2222-2222-222222222222\n")
    tuned = manifest(host.root)
    result = settle(host, "restored")
    assert "another boot (11111111-1111-1111-1111-111111111111, this is 22222222" in result["msg"]
    assert changed_paths(tuned, manifest(host.root)) == []
    assert settle(host, "restored", across_boot=True)["failed"] is False
    assert changed_paths(before, manifest(host.root)) == ["proc/sys/kernel/random/boot_id"]


# GPUs and CPUs


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda config: b"\xff" * len(config), "does not respond (its registers read all ff)"),
        (lambda config: config[:64], "cannot read beyond 64 bytes without privilege (CAP_SYS_ADMIN)"),
        (lambda config: b"", "may just have been removed"),
    ],
)
def test_one_gpu_that_cannot_be_read(host: SmallHost, damage: Callable[[bytes], bytes], words: str) -> None:
    host.config(0).write_bytes(damage(host.config(0).read_bytes()))
    bad = host.config(0).read_bytes()
    result = settle(host)
    row = by_id(result)[f"pcie_mrrs:{gpu_address(0)}"]
    assert (row["status"], row["before"], row["after"]) == ("failed", None, None)
    assert words in row["reason"]
    assert result["failed"] is True
    assert [i for i, s in statuses(result).items() if s == "failed"] == [row["id"]]
    assert by_id(result)[f"pcie_mrrs:{gpu_address(1)}"]["status"] == "changed"
    assert host.config(0).read_bytes() == bad


def test_a_gpu_that_vanishes_midway(host: SmallHost) -> None:
    vanishes = at_first("write", "numa_balancing", lambda: shutil.rmtree(host.gpu(0)))
    result = settle(host, prepare=vanishes)
    assert by_id(result)[f"pcie_mrrs:{gpu_address(0)}"]["status"] == "failed"
    assert "no such PCI device" in by_id(result)[f"pcie_mrrs:{gpu_address(0)}"]["reason"]
    assert by_id(result)[f"pcie_mrrs:{gpu_address(1)}"]["status"] == "changed"
    assert {s for i, s in statuses(result).items() if i.startswith("cpuidle")} == {"changed"}
    back = settle(host, "restored")
    assert list(back["recorded"]) == [f"pcie_mrrs:{gpu_address(0)}"]


def test_a_cpu_that_goes_offline_midway(host: SmallHost) -> None:
    def offline() -> None:
        shutil.rmtree(host.cpu(2) / "cpuidle")
        (host.cpu(2) / "online").write_text("0\n")

    (host.cpu(3) / "online").write_text("0\n")
    result = settle(host, prepare=at_first("write", "numa_balancing", offline))
    rows = by_id(result)
    assert (rows["cpuidle:cpu2/C2"]["status"], rows["cpuidle:cpu3"]["status"]) == ("not_applicable",) * 2
    assert rows["cpuidle:cpu2/C2"]["reason"] == "CPU offline: cpu2 went offline during the run"
    assert rows["cpuidle:cpu1/C2"]["status"] == "changed"
    assert result["failed"] is False


@pytest.mark.parametrize("allowed", [False, True])
def test_max_payload_bounds_the_size_under_bus_perf(memory_path: Path, allowed: bool) -> None:
    host = small_host(memory_path / "host", cmdline="quiet pci=realloc,pcie_bus_perf")
    before = manifest(host.root)
    mrrs = {**WANTED["pcie_maxreadreq"], "allow_above_max_payload": allowed}
    predicted = modules.run("pcie_maxreadreq", {**mrrs, **host.roots}, check=True)
    result = modules.run("pcie_maxreadreq", {**mrrs, **host.roots})
    assert set(statuses(result).values()) == {"changed" if allowed else "rejected"}
    assert predicted["failed"] == result["failed"] == (not allowed)
    assert bool(changed_paths(before, manifest(host.root))) is allowed
    if not allowed:
        assert "pci=pcie_bus_perf" in result["msg"]
        assert "allow_above_max_payload" in result["msg"]


# Kernel modules


def peermem(host: SmallHost, modprobe: str, **more: Any) -> dict[str, Any]:
    """Run kernel_module on a host with an RDMA device; ``modprobe`` is a shell script's body."""
    for folder in ("class/infiniband/mlx5_0", "module/nvidia"):
        (host.root / "sys" / folder).mkdir(parents=True, exist_ok=True)
    for name, body in (("modprobe", modprobe), ("rmmod", f'rmdir "{host.root}/sys/module/$1"')):
        path = host.root.with_name(name)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    wanted = [{"name": "nvidia_peermem", "requires": ["rdma_device", "nvidia_driver"]}]
    return modules.run(
        "kernel_module",
        {"modules": wanted, "modprobe": str(host.root.with_name("modprobe")), **host.roots, **more},
    )


def test_a_module_is_loaded_where_there_is_rdma(host: SmallHost) -> None:
    before = manifest(host.root / "sys/module") if (host.root / "sys/module").exists() else {}
    loads = f'[ "$1" = --dry-run ] || mkdir "{host.root}/sys/module/$1"'
    assert statuses(peermem(host, loads)) == {"module:nvidia_peermem": "changed"}
    assert statuses(peermem(host, loads)) == {"module:nvidia_peermem": "ok"}
    assert statuses(peermem(host, loads, state="restored")) == {"module:nvidia_peermem": "changed"}
    assert changed_paths(before, manifest(host.root / "sys/module")) == ["nvidia"]


def test_a_module_that_the_kernel_refuses(host: SmallHost) -> None:
    said = "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument"
    result = peermem(host, f'[ "$1" = --dry-run ] || {{ echo "{said}" >&2; exit 1; }}')
    (row,) = result["rows"]
    assert (row["status"], row["after"]) == ("rejected", "absent")
    assert row["reason"].endswith(f"failed: {said}")


# Check mode, and Ansible itself


def test_check_mode_writes_nothing_and_predicts_the_run(memory_path: Path) -> None:
    """On the recorded 8-GPU host, with faults of all sorts."""
    faults = ["ff=0000:01:00.0", "read64=0000:11:00.0", "mrrs4096=0000:61:00.0", "mrrs128=0000:71:00.0"]
    options = [word for fault in faults for word in ("--fault", fault)]
    host = SmallHost(make_recorded_host(memory_path / "host", *options, "--offline-cpus", "4,8-11", "--rdma"))
    before = manifest(host.root)
    predicted = settle(host, check=True)
    assert changed_paths(before, manifest(host.root)) == []
    assert not host.state_root.exists()
    real = settle(host)
    expected = {i: "changed" if s == "would_change" else s for i, s in statuses(predicted).items()}
    assert statuses(real) == expected
    assert sum(status == "changed" for status in expected.values()) == 7 + 5 + 123
    assert [each["after"] for each in real["diff"]] == [each["after"] for each in predicted["diff"]]
    again = settle(host)
    assert (again["changed"], again["diff"]) == (False, [])
    back = settle(host, "restored", check=True)
    assert {i for i, s in statuses(back).items() if s == "would_change"} == {
        i for i, s in expected.items() if s == "changed"
    }
    settle(host, "restored")
    assert changed_paths(before, manifest(host.root)) == []


def ad_hoc(module: str, arguments: dict[str, Any], *options: str) -> tuple[int, dict[str, Any]]:
    """Run one module through Ansible, as ``ansible localhost -m`` does; return the status and the result."""
    command = [Path(sys.executable).parent / "ansible", "localhost", "-c", "local", "-m", module]
    done = subprocess.run(
        [*command, "-a", json.dumps(arguments), *options],
        cwd=REPO,
        env={**os.environ, "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "=> {" in done.stdout, done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout[done.stdout.index("=> {") + 3 :])


def test_the_same_through_ansible(host: SmallHost) -> None:
    host.config(0).write_bytes(b"\xff" * 4096)
    before = manifest(host.root)
    status, result = ad_hoc("host_settings", {**WANTED, **host.roots}, "--check")
    assert (status, result["changed"]) == (2, True)
    assert changed_paths(before, manifest(host.root)) == []
    status, result = ad_hoc("host_settings", {**WANTED, **host.roots})
    assert status == 2
    assert (
        f"1 of {len(result['rows'])} settings failed: pcie_mrrs:{gpu_address(0)}: failed: " in result["msg"]
    )
    assert result["changed"] is True
    status, result = ad_hoc("host_settings", {**ALL_SECTIONS, **host.roots, "state": "restored"})
    assert (status, result["changed"]) == (0, True)
    assert changed_paths(before, manifest(host.root)) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one of the following is required: sysctl_snapshot, pcie_maxreadreq"),
        (
            {"pcie_maxreadreq": {"value": 3000, "vendor": "0x10de"}},
            "pcie_maxreadreq: MaxReadReq cannot be 3000 bytes",
        ),
        ({"cpuidle_state": {"limit": 2}}, "cpuidle_state: limit. Supported parameters include"),
        ({"sysctl_snapshot": {"settings": [{"name": "vm.swappiness"}]}}, "missing required arguments: value"),
    ],
)
def test_bad_arguments_of_a_section_are_named(host: SmallHost, arguments: dict[str, Any], words: str) -> None:
    before = manifest(host.root)
    result = modules.run("host_settings", {**arguments, **host.roots})
    assert result["failed"] is True
    assert words in result["msg"]
    assert changed_paths(before, manifest(host.root)) == []
