# SPDX-License-Identifier: GPL-3.0-or-later
"""The repair on a file system with the manners of /etc/pve."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_tuning import lxc_repair
from gpu_tuning import lxc_write as files
from gpu_tuning.lxc_repair import Outcome, Request
from support.pmxcfs import mounted

ALLOW = "lxc.cgroup2.devices.allow"
STALE = f"memory: 1\n{ALLOW}: c 195:* rwm\n{ALLOW}: c 504:* rwm\n" + "# text\n" * 2000
REPAIRED = STALE.replace("504", "509")


class Cluster:
    """The mounted stand-in, with the rest of a host beside it."""

    def __init__(self, root: Path) -> None:
        self.root, self.pve, self.control = root, root / "pve", root / "control"

    def quorum(self, word: str) -> None:
        self.control.write_text(word)

    def config(self, number: int) -> Path:
        path = self.pve / "lxc" / f"{number}.conf"
        path.write_text(STALE)
        return path

    def run(self, **more: object) -> Outcome:
        roots = {
            name: str(self.root / name)
            for name in ("procfs_root", "dev_root", "state_root", "lxc_root", "lock_root")
        }
        fixed = {"state": "repaired", "recorded_devices": str(self.root / "old"), "pve_root": str(self.pve)}
        return lxc_repair.run(Request(**{**roots, **fixed, **more}))  # type: ignore[arg-type]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    place = Cluster(tmp_path)
    (tmp_path / "procfs_root").mkdir()
    (tmp_path / "procfs_root" / "devices").write_text("Character devices:\n195 nvidia\n509 nvidia-uvm\n")
    (tmp_path / "old").write_text("Character devices:\n195 nvidia\n504 nvidia-uvm\n")
    with mounted(place.pve, place.control):
        (place.pve / "lxc").mkdir()
        yield place


def test_the_stand_in_has_the_measured_manners(cluster: Cluster) -> None:
    path = cluster.config(101)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o640)
    os.chown(path, 0, 33)
    refused = {
        errno.EPERM: [
            lambda: path.chmod(0o600),
            lambda: os.chown(path, 0, 0),
            lambda: os.link(path, cluster.pve / "x"),
        ],
        errno.ENOSYS: [lambda: os.symlink("x", cluster.pve / "y")],
        errno.EOPNOTSUPP: [lambda: os.listxattr(path)],
        errno.EFBIG: [lambda: os.truncate(path, 2 << 20)],
    }
    for number, calls in refused.items():
        for call in calls:
            with pytest.raises(OSError) as error:
                call()
            assert error.value.errno == number
    cluster.quorum("lost")
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert os.access(path, os.W_OK) == (os.geteuid() == 0)
    with pytest.raises(PermissionError):
        path.write_text("x")
    with pytest.raises(PermissionError):
        (cluster.pve / "lxc" / "new").write_text("x")


def test_the_repair_works_and_the_second_run_writes_nothing(cluster: Cluster) -> None:
    path = cluster.config(101)
    assert cluster.run().errors == []
    assert path.read_text() == REPAIRED
    assert os.listdir(path.parent) == ["101.conf"]
    number = path.stat().st_ino
    assert cluster.run().changed is False
    assert path.stat().st_ino == number


def test_without_quorum_nothing_is_tried(cluster: Cluster) -> None:
    path = cluster.config(101)
    cluster.quorum("lost")
    for check in (True, False):
        outcome = cluster.run(check=check)
        assert outcome.changed is False
        assert "no quorum" in outcome.errors[0]
    assert path.read_text() == STALE
    assert not (cluster.root / "state_root" / "lxc-backups").exists()


def test_a_quorum_lost_at_any_call_between_two_writes_loses_nothing(cluster: Cluster) -> None:
    paths = [cluster.config(101), cluster.config(102)]
    seen = set()
    for calls in range(0, 40):
        cluster.quorum("quorate")
        for path in paths:
            path.write_text(STALE)
        cluster.quorum(str(_changes_so_far(cluster) + calls))
        outcome = cluster.run()
        texts = [path.read_text() for path in paths]
        seen.add(tuple(text == REPAIRED for text in texts))
        assert set(texts) <= {STALE, REPAIRED}
        if not outcome.errors:
            break
        assert any("quorum" in error for error in outcome.errors)
        cluster.quorum("quorate")
        assert cluster.run().errors == []
        assert [path.read_text() for path in paths] == [REPAIRED, REPAIRED]
        assert sorted(os.listdir(paths[0].parent)) == ["101.conf", "102.conf"]
    assert seen == {(False, False), (True, False), (True, True)}


def _changes_so_far(cluster: Cluster) -> int:
    """Return how many changing calls the stand-in has counted: a new file's number is the count plus one."""
    probe = cluster.pve / "lxc" / "probe"
    probe.touch()
    probe.unlink()
    probe.touch()
    count = probe.stat().st_ino - 2 + 1
    probe.unlink()
    return count + 1


def test_a_config_over_one_mebibyte_is_refused(cluster: Cluster) -> None:
    with pytest.raises(files.ConfigError, match="no such container"):
        files.read_config(str(cluster.pve / "lxc" / "101.conf"))
    path = cluster.config(101)
    source = files.read_config(str(path))
    with pytest.raises(files.WriteRefused, match="EFBIG"):
        files.replace_config(source, b"x" * ((1 << 20) + 1), "proxmox")
    assert path.read_text() == STALE
