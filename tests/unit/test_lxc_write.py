# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of the write: whatever happens, the config is the old or the new one, whole."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import lxc_config as grammar
from gpu_tuning import lxc_write as files
from gpu_tuning import rows as status

OLD = b"memory: 1\nlxc.cgroup2.devices.allow: c 504:* rwm\n" + b"# text\n" * 3000
NEW = OLD.replace(b"504", b"509")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "lxc" / "101.conf"
    path.parent.mkdir()
    path.write_bytes(OLD)
    path.chmod(0o640)
    return path


def _replace(path: Path, config_format: str = grammar.PROXMOX) -> bytes:
    return files.replace_config(files.read_config(str(path)), NEW, config_format)


def _parse(data: bytes) -> grammar.Config:
    return grammar.parse(data.decode("latin-1"), grammar.PROXMOX)


def test_the_new_bytes_are_read_back_and_nothing_is_left(config: Path) -> None:
    assert _replace(config) == NEW
    assert config.read_bytes() == NEW
    assert os.listdir(config.parent) == ["101.conf"]


@root_only
@pytest.mark.parametrize("mode", [0o640, 0o600, 0o644])
def test_owner_mode_and_attributes_are_kept(config: Path, mode: int) -> None:
    config.chmod(mode)
    os.chown(config, 1234, 5678)
    os.setxattr(config, "user.note", b"kept")
    _replace(config)
    found = config.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (mode, 1234, 5678)
    assert os.getxattr(config, "user.note") == b"kept"


def test_a_config_that_changed_since_it_was_read_is_left(config: Path) -> None:
    source = files.read_config(str(config))
    config.write_bytes(OLD + b"swap: 1\n")
    with pytest.raises(files.WriteRefused, match="changed since it was read") as refused:
        files.replace_config(source, NEW, grammar.PROXMOX)
    assert refused.value.row_status == status.FAILED
    assert config.read_bytes() == OLD + b"swap: 1\n"
    assert os.listdir(config.parent) == ["101.conf"]


def test_a_link_put_in_the_place_of_the_config_is_not_followed(config: Path, tmp_path: Path) -> None:
    source = files.read_config(str(config))
    (tmp_path / "secret").write_bytes(OLD)
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    with pytest.raises(files.WriteRefused):
        files.replace_config(source, NEW, grammar.PROXMOX)
    assert (tmp_path / "secret").read_bytes() == OLD


STEPS = ("open", "write", "fsync", "fchmod", "fchown", "stat", "rename", "unlink", "close")


def _killed_at(number: int, before: bool) -> Callable[[], None]:
    """Return a function that makes the process kill itself before or after its n-th system call."""
    calls = 0

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == number
            if mine and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **named)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return stepped

    def install() -> None:
        for name in STEPS:
            setattr(os, name, wrap(getattr(os, name)))

    return install


def _survives(path: Path, install: Callable[[], None]) -> bool:
    """Replace the config in a child that kills itself; return whether the child got to its end."""
    child = os.fork()
    if child == 0:
        install()
        _replace(path)
        os._exit(0)
    _pid, code = os.waitpid(child, 0)
    assert os.WIFEXITED(code) or os.WTERMSIG(code) == signal.SIGKILL
    return os.WIFEXITED(code)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_killed_at_any_call_the_config_is_whole_and_the_next_run_finishes(config: Path, before: bool) -> None:
    seen = set()
    for number in range(1, 100):
        config.write_bytes(OLD)
        survived = _survives(config, _killed_at(number, before))
        seen.add(config.read_bytes())
        assert seen <= {OLD, NEW}
        if survived:
            break
        assert _replace(config) == NEW
        assert os.listdir(config.parent) == ["101.conf"]
    assert number > 8
    assert seen == {OLD, NEW}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for one config, not two."""
    place = tmp_path / "tiny"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tiny", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@root_only
def test_a_full_disk_leaves_the_old_config(tiny: Path) -> None:
    path = tiny / "101.conf"
    path.write_bytes(OLD)
    with pytest.raises(files.WriteRefused, match=r"ENOSPC.*make room"):
        _replace(path)
    assert path.read_bytes() == OLD
    assert os.listdir(tiny) == ["101.conf"]


@root_only
def test_without_room_for_the_backup_nothing_is_written(tiny: Path, config: Path) -> None:
    (tiny / "filler").write_bytes(b"x" * 16384)
    with pytest.raises(files.WriteRefused, match=r"was not changed: its backup .*ENOSPC"):
        files.backup(str(tiny / "backups"), files.read_config(str(config)))
    assert os.listdir(tiny / "backups") == []


@root_only
def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    place = tmp_path / "frozen"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "frozen", str(place)], check=True)
    try:
        (place / "101.conf").write_bytes(OLD)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(files.WriteRefused, match="EROFS") as refused:
            _replace(place / "101.conf")
        assert refused.value.row_status == status.READ_ONLY
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_backup_is_private_and_kept_once(config: Path, tmp_path: Path) -> None:
    place = tmp_path / "state" / "lxc-backups"
    first = files.backup(str(place), files.read_config(str(config)))
    assert files.backup(str(place), files.read_config(str(config))) == first
    assert Path(first).read_bytes() == OLD
    assert os.stat(first).st_mode & 0o777 == 0o600
    assert os.stat(place).st_mode & 0o777 == 0o700
    assert len(os.listdir(place)) == 1


def test_a_backup_directory_that_others_can_write_is_refused(config: Path, tmp_path: Path) -> None:
    place = tmp_path / "backups"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(files.WriteRefused, match="nobody else can write"):
        files.backup(str(place), files.read_config(str(config)))


def test_no_quorum_is_seen_by_the_mode(config: Path) -> None:
    config.chmod(0o440)
    with pytest.raises(files.WriteRefused, match="no quorum") as refused:
        files.preflight(files.read_config(str(config)), _parse(OLD))
    assert refused.value.row_status == status.READ_ONLY


def test_a_locked_container_is_refused(config: Path) -> None:
    config.write_bytes(OLD + b"lock: backup\n[snap]\nlock: other\n")
    with pytest.raises(files.WriteRefused, match="'lock: backup'"):
        files.preflight(files.read_config(str(config)), _parse(config.read_bytes()))


def test_a_lock_in_a_snapshot_is_no_lock(config: Path) -> None:
    config.write_bytes(OLD + b"[snap]\nlock: other\n")
    files.preflight(files.read_config(str(config)), _parse(config.read_bytes()))


def test_hard_links_are_refused(config: Path) -> None:
    os.link(config, config.parent / "other")
    with pytest.raises(files.WriteRefused, match="hard links"):
        files.preflight(files.read_config(str(config)), _parse(OLD))


def test_proxmox_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    with open(tmp_path / "pve-config-101.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(files.WriteRefused, match=r"pve-config-101\.lock"),
            files.proxmox_lock(str(tmp_path), "101", timeout=0.2),
        ):
            pytest.fail("the lock was given")
    with (
        files.proxmox_lock(str(tmp_path), "101", timeout=0),
        open(tmp_path / "pve-config-101.lock") as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such container"),
        (_make_link, "symbolic link"),
        (lambda path: path.mkdir(), "no regular file"),
        (lambda path: os.mkfifo(path), "no regular file"),
        (lambda path: path.write_bytes(b"x" * 10_000_000), "holds 10000000 bytes"),
        (lambda path: path.write_bytes(bytes(range(256)) * 4), "binary data"),
    ],
    ids=["missing", "link", "directory", "fifo", "10 MB", "binary"],
)
def test_what_is_no_config_is_refused_in_one_sentence(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    path = tmp_path / "101.conf"
    make(path)
    with pytest.raises(files.ConfigError, match=words) as refused:
        files.read_config(str(path))
    assert str(path) in str(refused.value)


def test_a_config_that_may_not_be_read_is_named(config: Path) -> None:
    if os.geteuid() == 0:
        child = os.fork()
        if child == 0:
            config.parent.chmod(0o700)
            os.setuid(65534)
            try:
                files.read_config(str(config))
            except files.ConfigError as error:
                os._exit(0 if "EACCES" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        config.chmod(0)
        with pytest.raises(files.ConfigError, match="EACCES"):
            files.read_config(str(config))
