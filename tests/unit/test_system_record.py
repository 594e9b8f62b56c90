# SPDX-License-Identifier: GPL-3.0-or-later
"""Sections that several runs put into one system-improve.md."""

from __future__ import annotations

import pathlib

import system_record


def test_a_section_replaces_its_predecessor_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "host/system-improve.md"
    assert system_record.put_section(str(path), "gpu_benchmark", "first")
    assert not system_record.put_section(str(path), "gpu_benchmark", "first")
    path.write_bytes(b"# Host\r\n\nmine  \n" + path.read_bytes() + b"\nafter\n")
    path.chmod(0o640)
    assert system_record.put_section(str(path), "gpu_benchmark", "second")
    text = path.read_bytes().decode()
    assert text.startswith("# Host\r\n\nmine  \n")
    assert text.endswith("\nafter\n")
    assert "second" in text
    assert "first" not in text
    assert path.stat().st_mode & 0o777 == 0o640
