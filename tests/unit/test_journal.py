# SPDX-License-Identifier: GPL-3.0-or-later
"""The journal: what is on disk when, who may hold it, and where it refuses to be."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import journal
from gpu_tuning.journal import Entry, Journal, JournalError

BOOT = "7d5e1c0a-3f0b-4e58-9a0e-2b7f4a1f6c11"


def entry(before: Any, wanted: Any = None, target: str = "a.b") -> Entry:
    return {"kind": "sysctl", "target": target, "before": before, "set": wanted}


@pytest.fixture
def state_root(memory_path: Path) -> Path:
    return memory_path / "state"


@pytest.fixture
def kept(state_root: Path) -> Journal:
    return Journal(str(state_root), BOOT, "6.8.12")


def loaded(state_root: Path) -> dict[str, Entry]:
    again = Journal(str(state_root), BOOT)
    again.load()
    return again.entries


# What is recorded


def test_nothing_is_made_by_looking(kept: Journal, state_root: Path) -> None:
    kept.load()
    assert (kept.entries, kept.other_boots(), state_root.exists()) == ({}, [], False)


def test_the_document(kept: Journal, state_root: Path) -> None:
    with kept.locked():
        kept.record({"x": entry("1", "2")})
    document = json.loads(Path(kept.path).read_text())
    assert document["created"].endswith("Z")
    del document["created"]
    assert document == {
        "version": 1,
        "boot_id": BOOT,
        "kernel_release": "6.8.12",
        "entries": {"x": entry("1", "2")},
    }


def test_the_first_value_wins_and_what_was_set_is_kept(kept: Journal, state_root: Path) -> None:
    with kept.locked():
        kept.record({"x": entry("1")})
        kept.record({"x": entry("1", "2")})
        kept.record({"x": entry("2"), "y": entry("7")})
        kept.record({"x": entry("2", "3")})
    assert loaded(state_root) == {"x": entry("1", "3"), "y": entry("7")}


def test_nothing_new_is_not_written_again(kept: Journal) -> None:
    with kept.locked():
        kept.record({"x": entry("1")})
        before = os.stat(kept.path)
        kept.record({"x": entry("2")})
        kept.forget(["z"])
    assert os.stat(kept.path).st_ino == before.st_ino


def test_what_is_back_is_forgotten_and_an_empty_document_goes(kept: Journal, state_root: Path) -> None:
    with kept.locked():
        kept.record({"x": entry("1"), "y": entry("2")})
        kept.forget(["x"])
        assert loaded(state_root) == {"y": entry("2")}
        kept.forget(["y"])
        kept.forget(["y"])
    assert kept.entries == {}
    assert sorted(os.listdir(state_root / "journal")) == ["lock"]


def test_values_of_any_bytes(kept: Journal, state_root: Path) -> None:
    text = b"caf\xe9 \xff\x00\xc3\xa4\n".decode("utf-8", "surrogateescape")
    with kept.locked():
        kept.record({"x": entry(text)})
    assert loaded(state_root)["x"]["before"] == text


def test_only_root_sees_it(kept: Journal, state_root: Path) -> None:
    before = os.umask(0)
    try:
        with kept.locked():
            kept.record({"x": entry("1")})
    finally:
        os.umask(before)
    for path, mode in (
        (state_root, 0o700),
        (state_root / "journal", 0o700),
        (state_root / "journal/lock", 0o600),
        (Path(kept.path), 0o600),
    ):
        assert stat.S_IMODE(path.lstat().st_mode) == mode, path


# Other boots


def test_other_boots_oldest_first(state_root: Path, kept: Journal) -> None:
    for number, boot in enumerate(("c", "a", "b")):
        other = Journal(str(state_root), boot)
        with other.locked():
            other.record({"x": entry("1")})
        os.utime(other.path, (number, number))
    with kept.locked():
        kept.record({"x": entry("1")})
    assert kept.other_boots() == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("text", "boot"),
    [
        (f"{BOOT}\n", BOOT),
        (None, "no-boot-id"),
        ("", "no-boot-id"),
        ("../../x\n", "no-boot-id"),
        ("a b", "no-boot-id"),
    ],
)
def test_a_boot_id_is_a_name_of_a_file(memory_path: Path, text: str | None, boot: str) -> None:
    if text is not None:
        (memory_path / "sys/kernel/random").mkdir(parents=True)
        (memory_path / "sys/kernel/random/boot_id").write_text(text)
    assert journal.boot_id(str(memory_path)) == boot


# Damage

WHOLE = {"version": 1, "boot_id": BOOT, "kernel_release": None, "created": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\x00" * 64,
        "[]",
        "null",
        "{}",
        json.dumps(WHOLE),
        json.dumps({**WHOLE, "entries": []}),
        json.dumps({**WHOLE, "entries": None}),
        json.dumps({**WHOLE, "entries": {"x": "60"}}),
        json.dumps({**WHOLE, "entries": {"x": {"kind": "sysctl", "target": "vm.swappiness"}}}),
        json.dumps({**WHOLE, "entries": {"x": {**entry("1"), "target": 7}}}),
        json.dumps({**WHOLE, "entries": {"x": entry([1])}}),
        json.dumps({**WHOLE, "version": 2, "entries": {"x": entry("1")}}),
    ],
)
def test_a_damaged_document_is_named(kept: Journal, state_root: Path, text: str) -> None:
    (state_root / "journal").mkdir(parents=True, mode=0o700)
    Path(kept.path).write_text(text)
    with pytest.raises(JournalError) as refused:
        kept.load()
    assert f"the journal {kept.path} is damaged" in str(refused.value)
    assert "move it aside" in str(refused.value)
    assert Path(kept.path).read_text() == text


def test_bytes_that_are_no_text(kept: Journal, state_root: Path) -> None:
    (state_root / "journal").mkdir(parents=True, mode=0o700)
    Path(kept.path).write_bytes(b"\xff\xfe{}")
    with pytest.raises(JournalError, match="is damaged"):
        kept.load()


def test_a_folder_in_the_documents_place(kept: Journal) -> None:
    os.makedirs(kept.path, mode=0o700)
    with pytest.raises(JournalError, match=r"cannot read the journal .*EISDIR"):
        kept.load()


# Where it refuses to be


def test_a_journal_that_others_can_enter(kept: Journal, state_root: Path) -> None:
    (state_root / "journal").mkdir(parents=True)
    (state_root / "journal").chmod(0o750)
    with pytest.raises(JournalError, match=r"mode 0700.*nothing was changed"), kept.locked():
        pass


def test_a_journal_that_is_a_link(kept: Journal, state_root: Path, memory_path: Path) -> None:
    (memory_path / "elsewhere").mkdir(mode=0o700)
    state_root.mkdir()
    (state_root / "journal").symlink_to(memory_path / "elsewhere")
    with pytest.raises(JournalError, match="no link"), kept.locked():
        pass
    assert os.listdir(memory_path / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_state_root_that_others_can_write(kept: Journal, state_root: Path, mode: int) -> None:
    """They could put a journal of their own there, and with it any value of any sysctl."""
    state_root.mkdir()
    state_root.chmod(mode)
    with pytest.raises(JournalError, match=f"{state_root} must be .*nothing was changed"), kept.locked():
        pass
    assert os.listdir(state_root) == []


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711])
def test_a_state_root_that_others_can_only_read(kept: Journal, state_root: Path, mode: int) -> None:
    state_root.mkdir()
    state_root.chmod(mode)
    with kept.locked():
        kept.record({"x": entry("1")})
    assert stat.S_IMODE(state_root.stat().st_mode) == mode


@pytest.mark.parametrize("end", ["", "/", "/."])
def test_a_state_root_that_is_a_link(state_root: Path, memory_path: Path, end: str) -> None:
    (memory_path / "elsewhere").mkdir(mode=0o700)
    state_root.symlink_to(memory_path / "elsewhere")
    kept = Journal(f"{state_root}{end}", BOOT)
    with pytest.raises(JournalError, match=f"{state_root} must be .*no link"), kept.locked():
        pass
    assert os.listdir(memory_path / "elsewhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
def test_a_state_root_of_another_user(kept: Journal, state_root: Path) -> None:
    state_root.mkdir(mode=0o755)
    os.chown(state_root, 65534, 65534)
    with pytest.raises(JournalError, match="directory of the running user"), kept.locked():
        pass


def test_a_file_in_the_state_roots_place(kept: Journal, state_root: Path) -> None:
    state_root.touch()
    with pytest.raises(JournalError, match=f"{state_root}.*nothing was changed"), kept.locked():
        pass


def test_a_lock_that_is_a_link(kept: Journal, state_root: Path, memory_path: Path) -> None:
    (state_root / "journal").mkdir(parents=True, mode=0o700)
    state_root.chmod(0o700)
    (state_root / "journal").chmod(0o700)
    (state_root / "journal/lock").symlink_to(memory_path / "target")
    with pytest.raises(JournalError, match="ELOOP"), kept.locked():
        pass
    assert not (memory_path / "target").exists()


# Who holds it


def test_the_second_is_told_who_the_first_is(kept: Journal, state_root: Path) -> None:
    second = Journal(str(state_root), BOOT)
    with kept.locked():
        with (
            pytest.raises(JournalError, match=f"process {os.getpid()}.*nothing was changed"),
            second.locked(),
        ):
            pass
        # The refusal has taken nothing from the first.
        with pytest.raises(JournalError, match="another run"), second.locked():
            pass
    with second.locked():
        pass


def test_the_lock_goes_with_an_error(kept: Journal) -> None:
    with pytest.raises(RuntimeError), kept.locked():
        raise RuntimeError
    with kept.locked():
        pass


def test_a_file_system_without_locks(kept: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(JournalError, match=r"ENOLCK.*no setting was changed.*another state_root"),
        kept.locked(),
    ):
        pass


def test_what_a_killed_run_was_writing_goes(kept: Journal, state_root: Path) -> None:
    with kept.locked():
        pass
    (state_root / "journal/.journal-x.tmp").write_text("{")
    with kept.locked():
        assert sorted(os.listdir(state_root / "journal")) == ["lock"]


def test_leftovers_that_cannot_be_removed(kept: Journal, state_root: Path) -> None:
    with kept.locked():
        pass
    (state_root / "journal/x.tmp").mkdir()
    with pytest.raises(JournalError, match=r"cannot .* the journal"), kept.locked():
        pass


# A full disk at any step


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(("before", "after"), [({}, {}), ({"x": "1"}, {"x": "1"})])
def test_a_failed_write_leaves_the_document_as_it_was(
    kept: Journal,
    state_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with kept.locked():
        kept.record({name: entry(value) for name, value in before.items()})
        monkeypatch.setattr(os, call, full)
        with pytest.raises(JournalError, match=r"ENOSPC.*no setting was changed; make room"):
            kept.record({"y": entry("1")})
        assert set(kept.entries) == set(before)
        monkeypatch.undo()
        assert not [name for name in os.listdir(state_root / "journal") if name.endswith(".tmp")]
    assert {name: each["before"] for name, each in loaded(state_root).items()} == after


def test_a_rollback_that_cannot_write_says_that_the_values_are_back(
    kept: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with kept.locked():
        kept.record({"x": entry("1")})
        monkeypatch.setattr(os, "unlink", read_only)
        with pytest.raises(JournalError, match=r"EROFS.*the recorded values are back"):
            kept.forget(["x"])


def test_the_document_is_synced_before_it_has_its_name(
    kept: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the folder after it: a crash leaves the old document or the new one."""
    steps = []
    for call in ("fsync", "replace"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, call=call, real=real: (steps.append(call), real(*a))[1])
    with kept.locked():
        kept.record({"x": entry("1")})
    assert steps == ["fsync", "replace", "fsync"]
