# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gpu_tuning import proc_devices as devices
from hypothesis import given
from hypothesis import strategies as st

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
237 nvidia-caps
238 nvidia-caps-imex-channels
509 nvidia-uvm

Block devices:
504 nvidia-uvm
  8 sd
"""


def test_whole_names_of_the_character_section_only() -> None:
    majors = devices.parse_proc_devices(DEVICES)
    assert majors.majors("nvidia-uvm") == (509,)
    assert majors.majors("nvidia-caps") == (237,)
    assert majors.owners(504) == ()
    assert majors.majors("sd") == ()


@pytest.mark.parametrize("name", ["nvidia-frontend", "nvidiactl", "nvidia-modeset", "nvidia"])
def test_the_static_major_has_one_name(name: str) -> None:
    assert devices.parse_proc_devices(f"Character devices:\n195 {name}\n").majors("nvidia") == (195,)


@pytest.mark.parametrize(
    ("major", "dynamic"),
    [
        (233, False),
        (234, True),
        (254, True),
        (255, False),
        (383, False),
        (384, True),
        (511, True),
        (512, False),
    ],
)
def test_dynamic_ranges(major: int, dynamic: bool) -> None:
    assert devices.is_dynamic(major) is dynamic


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/nvidia-uvm", ("nvidia-uvm", 0)),
        ("/dev/nvidia-uvm-tools", ("nvidia-uvm", 1)),
        ("/dev/nvidia7", ("nvidia", 7)),
        ("/dev/nvidiactl", ("nvidia", 255)),
        ("/dev/nvidia-caps/nvidia-cap2", ("nvidia-caps", 2)),
        ("/dev/nvidia-caps", ("nvidia-caps", None)),
        ("/dev/nvidia-caps-imex-channels/channel0", ("nvidia-caps-imex-channels", 0)),
        ("/dev/dri/renderD128", ("drm", 128)),
        ("/dev/net/tun", (None, None)),
        ("/dev/../etc/nvidia0", (None, None)),
    ],
)
def test_node_classes(path: str, expected: tuple[str | None, int | None]) -> None:
    assert devices.class_of_node(path) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello\n", "no copy of /proc/devices"),
        ("Character devices:\n0x1f8 nvidia-uvm\n", "decimal"),
        ("Character devices:\n600 nvidia-uvm\n", "over 511"),
        ("{}", "no readable table"),
        ('{"majors": {"x": [true]}}', "decimal"),
        ('{"majors": {"x": [999]}}', "over 511"),
        ('{"majors": [1]}', "no readable table"),
    ],
)
def test_a_bad_recorded_map_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(devices.RecordError, match="saved.devices.*" + words):
        devices.parse_recorded(text, "saved.devices")


def test_both_recorded_forms_are_read() -> None:
    majors = devices.parse_proc_devices(DEVICES)
    assert devices.parse_recorded(DEVICES, "x") == majors
    assert devices.parse_recorded(json.dumps({"majors": majors.as_dict()}), "x") == majors


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    devices.parse_proc_devices(text)
    devices.parse_proc_devices(f"Character devices:\n{text}")


def test_nodes_are_told_apart(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making device nodes needs root")
    os.mknod(tmp_path / "nvidia-uvm", 0o20666, os.makedev(509, 0))
    os.chmod(tmp_path / "nvidia-uvm", 0o666)
    (tmp_path / "nvidia-caps").mkdir()
    os.mknod(tmp_path / "nvidia-caps" / "nvidia-cap1", 0o20400, os.makedev(237, 1))
    (tmp_path / "nvidia0").write_text("a file")
    root = str(tmp_path)
    uvm = devices.stat_node(root, "/dev/nvidia-uvm")
    assert (uvm.kind, uvm.major, uvm.minor, uvm.mode) == ("char", 509, 0, 0o666)
    assert devices.stat_node(root, "/dev/nvidia0").kind == "other"
    assert devices.stat_node(root, "/dev/nvidiactl").kind == "missing"
    assert devices.stat_node(root, "/dev/nvidia-caps").kind == "dir"
    assert [node.path for node in devices.char_nodes_below(root, "/dev/nvidia-caps")] == [
        "/dev/nvidia-caps/nvidia-cap1"
    ]
    assert [node.path for node in devices.nodes_of_major(root, 509)] == ["/dev/nvidia-uvm"]
    assert [node.path for node in devices.nodes_of_major(root, 237)] == ["/dev/nvidia-caps/nvidia-cap1"]
