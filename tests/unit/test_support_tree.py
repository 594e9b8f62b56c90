# SPDX-License-Identifier: GPL-3.0-or-later
"""The tests' own measuring tools: a manifest that misses a change would prove nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.shared import shared, why_missing
from support.tree import Entry, changed_bits, changed_paths, manifest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "below").chmod(0o755)
    (tmp_path / "below/file").write_bytes(b"old\n")
    (tmp_path / "below/file").chmod(0o640)
    (tmp_path / "link").symlink_to("below")
    return tmp_path


def test_manifest_holds_kind_mode_and_content(tree: Path) -> None:
    assert manifest(tree) == {
        "below": Entry("directory", 0o755, b""),
        "below/file": Entry("file", 0o640, b"old\n"),
        "link": Entry("link", 0o777, "below"),
    }


def same_size_write(tree: Path) -> None:
    before = os.stat(tree / "below/file")
    (tree / "below/file").write_bytes(b"new\n")
    os.utime(tree / "below/file", ns=(before.st_atime_ns, before.st_mtime_ns))


def relink(tree: Path) -> None:
    (tree / "link").unlink()
    (tree / "link").symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (same_size_write, "below/file"),
        (lambda tree: (tree / "below/file").chmod(0o644), "below/file"),
        (lambda tree: (tree / "below").chmod(0o700), "below"),
        (lambda tree: (tree / "below/file").unlink(), "below/file"),
        (lambda tree: (tree / "more").mkdir(), "more"),
        (lambda tree: os.mkfifo(tree / "pipe"), "pipe"),
        (relink, "link"),
    ],
)
def test_every_change_is_seen(tree: Path, change, path: str) -> None:
    before = manifest(tree)
    change(tree)
    assert changed_paths(before, manifest(tree)) == [path]


def test_nothing_changed(tree: Path) -> None:
    assert changed_paths(manifest(tree), manifest(tree)) == []


def test_changed_bits() -> None:
    assert changed_bits(b"\x00\x29\xff", b"\x00\x59\xfe") == [(1, 0x70), (2, 0x01)]
    with pytest.raises(ValueError, match="3 bytes became 2"):
        changed_bits(b"abc", b"ab")


def test_shared_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_TUNING_SHARED", str(tmp_path))
    (tmp_path / "here").touch()
    assert shared("here") == tmp_path / "here"
    assert "GPU_TUNING_SHARED" in str(why_missing("gone"))
    with pytest.raises(pytest.skip.Exception, match="gone"):
        shared("gone")
