# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole runs over config files: discovery, check mode, refusals, the record, the modes."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
from gpu_tuning import lxc_repair
from gpu_tuning.lxc_repair import BadInput, Outcome, Request
from support.lxc_cases import Case, cases, faults
from support.tree import manifest

OLD = "Character devices:\n195 nvidia\n504 nvidia-uvm\n507 nvidia-caps\n"
NOW = "Character devices:\n195 nvidia\n509 nvidia-uvm\n237 nvidia-caps\n"
ALLOW = "lxc.cgroup2.devices.allow"
STALE = f"memory: 1\n{ALLOW}: c 195:* rwm\n{ALLOW}: c 504:* rwm\n"
MOUNTS = "".join(
    f"lxc.mount.entry: /dev/{name} dev/{name} none bind,optional,create=file\n"
    for name in ("nvidia0", "nvidia-uvm", "nvidia-uvm-tools")
)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")


@dataclasses.dataclass
class Site:
    """A host in a directory: its roots, and what a run over it is asked."""

    root: Path

    def request(self, **more: object) -> Request:
        roots = {
            name: str(self.root / name.replace("_root", ""))
            for name in ("procfs_root", "dev_root", "state_root", "pve_root", "lxc_root", "lock_root")
        }
        defaults = {"state": "repaired", "recorded_devices": str(self.root / "devices.old"), **roots}
        return Request(**{**defaults, **more})  # type: ignore[arg-type]

    def run(self, **more: object) -> Outcome:
        return lxc_repair.run(self.request(**more))

    def config(self, name: str, text: str | bytes, plain: bool = False) -> Path:
        path = self.root / "lxc" / name / "config" if plain else self.root / "pve" / "lxc" / f"{name}.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o640)
        return path

    def devices(self, text: str) -> None:
        (self.root / "procfs" / "devices").write_text(text)

    def node(self, name: str, major: int, minor: int, mode: int = 0o666) -> None:
        path = self.root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
        path.chmod(mode)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    place = Site(tmp_path)
    for name in ("procfs", "dev", "pve/lxc"):
        (tmp_path / name).mkdir(parents=True)
    place.devices(NOW)
    (tmp_path / "devices.old").write_text(OLD)
    return place


def _row(outcome: Outcome, target: str) -> lxc_repair.DeviceRow:
    return next(row for row in outcome.rows if row.target == target)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.path.name)
def test_the_cases_through_a_whole_run(site: Site, case: Case) -> None:
    site.devices(case.devices)
    (site.root / "devices.old").write_text(case.old_devices)
    path = site.root / "conf"
    path.write_bytes(case.config)
    for major, minor, node in case.nodes if os.geteuid() == 0 else []:
        site.node(node[len("/dev/") :], major, minor)
    predicted = site.run(paths=[str(path)], check=True, config_format=case.format)
    assert path.read_bytes() == case.config
    real = site.run(paths=[str(path)], config_format=case.format)
    assert faults(case, path.read_bytes()) == []
    assert (predicted.changed, predicted.diff) == (real.changed, real.diff)
    assert real.changed is (path.read_bytes() != case.config)
    for message in case.meta["must_report"]:
        assert any(message in (row.reason or "") for row in real.rows), message
    assert real.errors == []
    second = site.run(paths=[str(path)], config_format=case.format)
    assert (second.changed, second.diff) == (False, [])


def test_the_format_of_every_case_is_found_by_itself(site: Site) -> None:
    for case in cases():
        path = site.root / case.path.name
        path.write_bytes(case.config)
        outcome = site.run(paths=[str(path)], state="diagnosed")
        if case.config:
            assert outcome.containers[0]["format"] == case.format, case.path.name


def test_a_repair_in_full(site: Site) -> None:
    path = site.config("101", STALE)
    outcome = site.run()
    assert path.read_text() == STALE.replace("504", "509")
    row = _row(outcome, "101/nvidia-uvm")
    assert (row.id, row.before, row.desired, row.after, row.status) == (
        "lxc_device:101/nvidia-uvm",
        "504",
        "509",
        "509",
        "changed",
    )
    assert outcome.diff == [
        {
            "before_header": str(path),
            "after_header": str(path),
            "before": STALE,
            "after": STALE.replace("504", "509"),
        }
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    backups = list((site.root / "state" / "lxc-backups").iterdir())
    assert [backup.read_text() for backup in backups] == [STALE]


def test_check_mode_writes_nothing_at_all_and_predicts_exactly(site: Site) -> None:
    site.config("101", STALE)
    site.config("102", STALE + "lock: backup\n")
    before = manifest(site.root)
    predicted = site.run(check=True)
    assert manifest(site.root) == before
    real = site.run()
    assert (predicted.changed, predicted.diff, predicted.errors) == (real.changed, real.diff, real.errors)
    assert [row.id for row in predicted.rows] == [row.id for row in real.rows]
    would = {row.id for row in predicted.rows if row.status == "would_change"}
    assert would == {row.id for row in real.rows if row.status == "changed"}


def test_diagnosing_writes_nothing_at_all(site: Site) -> None:
    site.config("101", STALE)
    before = manifest(site.root)
    outcome = site.run(state="diagnosed")
    assert manifest(site.root) == before
    assert (outcome.changed, outcome.diff) == (False, [])
    assert _row(outcome, "101/nvidia-uvm").finding == "stale"


def test_only_what_is_stale_is_written(site: Site) -> None:
    stale = site.config("101", STALE)
    right = site.config("103", STALE.replace("504", "509"))
    web = site.config("102", "hostname: web\nlxc.cgroup2.devices.allow: c 10:200 rwm\n")
    before = {path: path.stat() for path in (right, web)}
    outcome = site.run()
    assert {container["name"] for container in outcome.containers if container["changed"]} == {"101"}
    assert {container["name"] for container in outcome.containers if container["rules_changed"]} == {"101"}
    assert stale.read_text() != STALE
    for path, found in before.items():
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (found.st_mtime_ns, found.st_ino)


def test_discovery_finds_both_kinds_but_no_generated_config(site: Site) -> None:
    site.config("101", "memory: 1\n")
    site.config("9", "memory: 1\nstartup: order=1\n")
    site.config("gpu", "lxc.uts.name = gpu\n", plain=True)
    site.config("101", "lxc.uts.name = generated\n", plain=True)
    (site.root / "pve" / "lxc" / "101.conf.tmp.7").write_text("")
    found = site.run(state="diagnosed").containers
    assert [container["name"] for container in found] == ["9", "101", "gpu"]
    assert found[2]["arguments"] == ["-P", str(site.root / "lxc"), "-n", "gpu"]
    assert found[1]["arguments"] == ["-n", "101"]


def test_containers_are_found_by_name(site: Site) -> None:
    site.config("101", STALE)
    site.config("gpu", STALE.replace(":", " =", 1), plain=True)
    outcome = site.run(paths=["gpu", "101", str(site.root / "pve" / "lxc" / "101.conf")], state="diagnosed")
    assert [container["name"] for container in outcome.containers] == ["gpu", "101"]


def test_one_name_twice_gives_two_ids(site: Site) -> None:
    paths = [site.root / "a" / "gpu" / "config", site.root / "b" / "gpu" / "config"]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(f"{ALLOW} = c 504:* rwm\n")
    outcome = site.run(paths=[str(path) for path in paths])
    assert len({row.id for row in outcome.rows}) == len(outcome.rows)
    assert all(path.read_text() == f"{ALLOW} = c 509:* rwm\n" for path in paths)


def test_no_quorum_refuses_before_the_first_change_and_says_so_in_check_mode_too(site: Site) -> None:
    path = site.config("101", STALE)
    path.chmod(0o440)
    for check in (True, False):
        outcome = site.run(check=check)
        assert outcome.changed is False
        assert "no quorum" in outcome.errors[0]
        assert _row(outcome, "101/nvidia-uvm").status == "read_only"
    assert path.read_text() == STALE
    assert stat.S_IMODE(path.stat().st_mode) == 0o440


def test_a_refusal_of_one_container_does_not_hold_up_the_others(site: Site) -> None:
    locked = site.config("101", STALE + "lock: backup\n")
    other = site.config("102", STALE)
    outcome = site.run()
    assert "'lock: backup'" in outcome.errors[0]
    assert _row(outcome, "101/nvidia-uvm").status == "rejected"
    assert "504" in locked.read_text()
    assert "504" not in other.read_text()


def test_a_refused_container_keeps_its_meaning_for_the_next_run(site: Site) -> None:
    path = site.config("101", STALE + "lock: backup\n")
    site.run()
    path.write_text(STALE)
    site.run(recorded_devices=None)
    assert path.read_text() == STALE.replace("504", "509")


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        ({"paths": ["999"]}, "no container 999"),
        ({"paths": ["/nonexistent/999.conf"]}, "no such container"),
        ({"paths": ["../etc"]}, "does not exist"),
        ({"paths": ["a b"]}, "neither a path nor"),
        (
            {"recorded_devices": "/nonexistent/devices"},
            "recorded_devices /nonexistent/devices cannot be read",
        ),
        ({"procfs_root": "/nonexistent"}, "/nonexistent/devices cannot be read"),
    ],
)
def test_bad_input_is_refused_before_the_first_write(
    site: Site, request_of: dict[str, object], words: str
) -> None:
    path = site.config("101", STALE)
    paths = request_of.get("paths")
    with pytest.raises(BadInput, match=words):
        site.run(**{**request_of, **({"paths": ["101", *paths]} if paths else {})})  # type: ignore[misc]
    assert path.read_text() == STALE


def _link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("name", "words"), [("binary", "binary data"), ("large", "1 MiB"), ("link", "symbolic link")]
)
def test_one_bad_config_of_many(site: Site, name: str, words: str) -> None:
    good, bad = site.config("101", STALE), site.root / "pve" / "lxc" / "102.conf"
    {
        "binary": lambda: bad.write_bytes(os.urandom(4096)),
        "large": lambda: bad.write_bytes(b"a" * 10_000_000),
    }.get(name, lambda: _link(bad))()
    with pytest.raises(BadInput, match=words):
        site.run(paths=["101", "102"])
    assert good.read_text() == STALE
    found = site.run()
    assert words in found.errors[0]
    assert good.read_text() != STALE


def test_a_config_of_another_cluster_node_is_refused(site: Site) -> None:
    other = site.root / "pve" / "nodes" / "two" / "lxc" / "201.conf"
    other.parent.mkdir(parents=True)
    other.write_text(STALE)
    (site.root / "pve" / "local").symlink_to("nodes/one")
    with pytest.raises(BadInput, match="belongs to node two and this host is one"):
        site.run(paths=[str(other)])
    assert other.read_text() == STALE


def test_a_damaged_record_is_named(site: Site) -> None:
    site.config("101", STALE)
    (site.root / "state").mkdir()
    (site.root / "state" / "device-majors.json").write_text('{"majors": {}, "earlier": 7}')
    with pytest.raises(BadInput, match=r"device-majors\.json is damaged"):
        site.run()


def test_the_record_makes_the_next_repair_certain(site: Site) -> None:
    text = f"{ALLOW}: c 504:* rwm\n{ALLOW}: c 507:0 r\n"
    path = site.config("101", text)
    site.devices(OLD)
    assert site.run(state="diagnosed", record=True, recorded_devices=None).changed is False
    assert stat.S_IMODE((site.root / "state").stat().st_mode) == 0o700
    record = json.loads((site.root / "state" / "device-majors.json").read_text())
    assert record["majors"]["nvidia-uvm"] == [504]
    site.devices(OLD.replace("504", "x").replace("507", "504").replace("x", "507"))
    site.run(recorded_devices=None)
    assert path.read_text() == f"{ALLOW}: c 507:* rwm\n{ALLOW}: c 504:0 r\n"
    assert site.run(recorded_devices=None).changed is False


def test_the_record_given_as_recorded_devices_is_the_record(site: Site) -> None:
    path = site.config("101", STALE)
    site.devices(OLD)
    site.run(recorded_devices=None)
    site.devices(NOW)
    site.run(recorded_devices=str(site.root / "state" / "device-majors.json"))
    assert path.read_text() == STALE.replace("504", "509")


def test_a_second_run_writes_nothing_at_all(site: Site) -> None:
    site.config("101", STALE)
    site.run()
    before = {path: path.stat().st_mtime_ns for path in site.root.rglob("*")}
    site.run()
    assert {path: path.stat().st_mtime_ns for path in site.root.rglob("*")} == before


def test_two_runs_at_once_are_refused(site: Site) -> None:
    site.config("101", STALE)
    with lxc_repair._only_run(str(site.root / "state")), pytest.raises(BadInput, match="another run repairs"):
        site.run()


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        ("devices\t5\t1\t1\n", "cgroup1"),
        ("devices\t0\t1\t1\n", "cgroup2"),
        ("cpu\t5\t1\t1\n", "cgroup2"),
        (None, "cgroup2"),
    ],
)
def test_the_cgroup_version(site: Site, cgroups: str | None, expected: str) -> None:
    if cgroups is not None:
        (site.root / "procfs" / "cgroups").write_text(f"#subsys_name\thierarchy\n{cgroups}")
    assert lxc_repair.cgroup_family(str(site.root / "procfs")) == expected


@root_only
def test_major_free_names_the_nodes_and_widens_nothing(site: Site) -> None:
    site.node("nvidia-uvm", 509, 0)
    site.node("nvidia-uvm-tools", 509, 1)
    site.node("nvidia-caps/nvidia-cap2", 237, 2)
    text = (
        f"{ALLOW}: c 195:* rwm\n{ALLOW}: c 504:0 rw\n{ALLOW}: c 504:* rwm # all\n{ALLOW}: c 507:2 r\n# "
        f"504\n{MOUNTS}"
    )
    path = site.config("101", text)
    predicted = site.run(mode="major_free", check=True)
    assert (predicted.diff[0]["before"], path.read_text()) == (text, text)
    outcome = site.run(mode="major_free")
    assert (
        path.read_text()
        == predicted.diff[0]["after"]
        == (
            f"{ALLOW}: c 195:* rwm\n"
            f"{ALLOW}: /dev/nvidia-uvm rw\n"
            f"{ALLOW}: /dev/nvidia-uvm rwm\n{ALLOW}: /dev/nvidia-uvm-tools rwm\n"
            f"{ALLOW}: /dev/nvidia-caps/nvidia-cap2 r\n# 504\n{MOUNTS}"
        )
    )
    assert _row(outcome, "101/nvidia-uvm").after == "/dev/nvidia-uvm,/dev/nvidia-uvm-tools"
    second = site.run(mode="major_free")
    assert second.changed is False
    assert _row(second, "101/nvidia-uvm").finding == "ok"


def test_major_free_keeps_plain_lxc_quotes_and_a_missing_newline(site: Site) -> None:
    path = site.config("gpu", f'lxc.uts.name = gpu\n  {ALLOW} = "c 504:* rwm"', plain=True)
    site.run(mode="major_free")
    assert path.read_text() == (
        f'lxc.uts.name = gpu\n  {ALLOW} = "/dev/nvidia-uvm rwm"\n  {ALLOW} = "/dev/nvidia-uvm-tools rwm"'
    )


@root_only
def test_devn_replaces_mounts_and_rules(site: Site) -> None:
    site.node("nvidia0", 195, 0, 0o660)
    site.node("nvidia-uvm", 509, 0)
    site.node("nvidia-uvm-tools", 509, 1)
    text = f"dev0: /dev/net/tun\r\nmemory: 1\r\n{ALLOW}: c 195:* rwm\r\n{ALLOW}: c 504:* rwm\r\n" + MOUNTS
    path = site.config("101", text + f"{ALLOW}: c 507:* rwm\nlxc.cap.drop:\n[snap]\n{ALLOW}: c 504:* rwm\n")
    outcome = site.run(mode="devn")
    assert path.read_bytes().decode() == (
        "dev0: /dev/net/tun\r\nmemory: 1\r\n"
        "dev1: /dev/nvidia0,mode=0660\r\ndev2: /dev/nvidia-uvm,mode=0666\r\ndev3: "
        "/dev/nvidia-uvm-tools,mode=0666\r\n"
        f"{ALLOW}: c 237:* rwm\nlxc.cap.drop:\n[snap]\n{ALLOW}: c 504:* rwm\n"
    )
    assert "no mount entry names a node" in (_row(outcome, "101/nvidia-caps/devn").reason or "")
    assert site.run(mode="devn").changed is False


@root_only
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{ALLOW}: c 504:* r\n{MOUNTS}", "no rule gives rw on /dev/nvidia-uvm"),
        (f"{ALLOW}: c 504:0 rw\n{MOUNTS}", "no rule gives rw on /dev/nvidia-uvm-tools"),
        (f"{ALLOW}: c 504:* rw\n{MOUNTS.replace(' dev/nvidia-uvm ', ' dev/other ')}", "another path"),
    ],
)
def test_devn_widens_nothing(site: Site, text: str, words: str) -> None:
    site.node("nvidia-uvm", 509, 0)
    site.node("nvidia-uvm-tools", 509, 1)
    path = site.config("101", text)
    outcome = site.run(mode="devn")
    assert path.read_text() == text.replace("504", "509")
    assert words in (_row(outcome, "101/nvidia-uvm/devn").reason or "")


def test_devn_needs_the_nodes(site: Site) -> None:
    path = site.config("101", f"{ALLOW}: c 504:* rwm\n{MOUNTS}")
    outcome = site.run(mode="devn")
    assert "dev0:" not in path.read_text()
    assert "a missing node stops the container's start" in (_row(outcome, "101/nvidia-uvm/devn").reason or "")


def test_devn_is_not_for_plain_lxc(site: Site) -> None:
    path = site.config("gpu", f"lxc.uts.name = gpu\n{ALLOW} = c 504:* rwm\n", plain=True)
    outcome = site.run(mode="devn")
    assert path.read_text() == f"lxc.uts.name = gpu\n{ALLOW} = c 509:* rwm\n"
    assert _row(outcome, "gpu/devn").status == "unsupported"


def test_two_hundred_containers_in_one_call(site: Site) -> None:
    for number in range(100, 300):
        site.config(str(number), STALE)
    outcome = site.run()
    assert sum(container["changed"] for container in outcome.containers) == 200
    assert site.run().changed is False
