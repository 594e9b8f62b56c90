# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from gpu_tuning import lxc_config as grammar
from hypothesis import given
from hypothesis import strategies as st

FORMATS = st.sampled_from(grammar.FORMATS)
PIECES = [
    "lxc.cgroup2.devices.allow",
    "lxc.cgroup.devices.deny",
    "c 504:* rwm",
    "[snap]",
    "[pve:pending]",
    "dev0: /dev/nvidia0",
    "lxc.include",
    *":=a#\"' \t\r\n\x85\x1c\x0cé",
]
TEXTS = st.one_of(
    st.text(alphabet=st.characters(max_codepoint=255)), st.lists(st.sampled_from(PIECES)).map("".join)
)


def _kinds(text: str, config_format: str = grammar.PROXMOX) -> list[str]:
    return [line.kind for line in grammar.parse(text, config_format).lines]


@given(TEXTS, FORMATS)
def test_every_byte_is_in_the_lines(text: str, config_format: str) -> None:
    config = grammar.parse(text, config_format)
    assert "".join(line.text for line in config.lines) == text
    for line in config.lines:
        assert text[line.start : line.start + len(line.text)] == line.text
        assert text[line.value_start : line.value_start + len(line.value)] == line.value


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("lxc.cgroup2.devices.allow: c 504:* rwm", grammar.RAW),
        ("lxc.cgroup2.devices.allow = c 504:* rwm", grammar.RAW),
        ("lxc.cgroup2.devices.allow=c 504:* rwm", grammar.RAW),
        ("lxc.cgroup2.devices.allow:", grammar.RAW),
        ("  lxc.cgroup2.devices.allow: c 504:* rwm", grammar.DEAD),
        ("\tlxc.cgroup2.devices.allow: c 504:* rwm", grammar.DEAD),
        ("lxc.cgroup2.devices.allow : c 504:* rwm", grammar.DEAD),
        ("LXC.cgroup2.devices.allow: c 504:* rwm", grammar.DEAD),
        ("\tdev0: /dev/nvidia0", grammar.DEAD),
        (" lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind", grammar.DEAD),
        ("dev0: /dev/nvidia0,mode=0660", grammar.OPTION),
        ("dev255: path=/dev/nvidia0", grammar.OPTION),
        ("dev256: /dev/nvidia0", grammar.DEAD),
        ("dev0: /etc/passwd", grammar.DEAD),
        ("# lxc.cgroup2.devices.allow: c 504:* rwm", grammar.COMMENT),
        ("  # lxc.cgroup2.devices.allow: c 504:* rwm", grammar.OTHER),
        ("[before-upgrade]", grammar.SECTION),
        ("[pve:pending]  \r", grammar.SECTION),
        ("[x]", grammar.OTHER),
        ("[1abc]", grammar.OTHER),
        (" [snap]", grammar.OTHER),
        ("  \r", grammar.BLANK),
        ("memory: 512", grammar.OPTION),
    ],
)
def test_proxmox_lines(line: str, kind: str) -> None:
    assert _kinds(line) == [kind]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("  lxc.cgroup2.devices.allow = c 504:* rwm", grammar.RAW),
        ("lxc.cgroup2.devices.allow: c 504:* rwm", grammar.FATAL),
        ("lxc.mount.entry: /dev/x dev/x none bind,create=file", grammar.FATAL),
        ("  # text", grammar.COMMENT),
        ("memory: 12", grammar.OTHER),
        ("LXC.cgroup2.devices.allow = c 504:* rwm", grammar.DEAD),
        ("[snap]", grammar.OTHER),
    ],
)
def test_plain_lxc_lines(line: str, kind: str) -> None:
    assert _kinds(line, grammar.LXC) == [kind]


def test_a_section_ends_the_live_part() -> None:
    config = grammar.parse("memory: 1\n[pve:pending]\nmemory: 2\n[snap-1]\nmemory: 3\n", grammar.PROXMOX)
    assert config.value("memory") == "1"
    assert config.sections() == ["pve:pending", "snap-1"]
    assert [line.value for line in config.of_section("snap-1")] == ["3"]


def test_plain_lxc_strips_matching_quotes_only() -> None:
    config = grammar.parse('lxc.uts.name = "gpu"\nlxc.arch = \'x"\n', grammar.LXC)
    assert config.value("lxc.uts.name") == "gpu"
    assert config.value("lxc.arch") == "'x\""


def test_device_paths_of_mounts_and_passthrough() -> None:
    text = (
        "dev3: path=/dev/nvidia-uvm,mode=0666\n"
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
        "lxc.mount.entry: /dev/with\\040blank dev/x none bind\n"
        "lxc.mount.entry: /srv srv none bind\n"
        "[snap]\n"
        "dev4: /dev/nvidia1\n"
    )
    found = grammar.device_paths(grammar.parse(text, grammar.PROXMOX))
    assert [(path.path, path.passthrough, path.optional) for path in found] == [
        ("/dev/nvidia-uvm", True, False),
        ("/dev/nvidia0", False, True),
        ("/dev/with blank", False, False),
    ]


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("/etc/pve/lxc/101.conf", "", grammar.PROXMOX),
        ("/var/lib/lxc/gpu/config", "", grammar.LXC),
        ("/tmp/conf", "arch: amd64\nlxc.cgroup2.devices.allow = c 1:3 r\n", grammar.PROXMOX),
        ("/tmp/conf", "  lxc.uts.name = gpu\n", grammar.LXC),
        ("/tmp/conf", "lxc.cgroup2.devices.allow: c 1:3 r\n", grammar.PROXMOX),
    ],
)
def test_the_format_is_found(path: str, text: str, expected: str) -> None:
    assert grammar.detect_format(path, text) == expected


@given(st.text(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.text(max_size=5))))
def test_edits_touch_only_their_spans(text: str, wanted: list[tuple[int, int, str]]) -> None:
    edits, position = [], 0
    for gap, length, new in wanted:
        start = position + gap
        if start + length > len(text):
            break
        edits.append(grammar.Edit(start, start + length, new))
        position = start + length
    result, at, offset = grammar.apply_edits(text, reversed(edits)), 0, 0
    for edit in edits:
        kept = text[at : edit.start]
        assert result[offset : offset + len(kept)] == kept
        offset += len(kept)
        assert result[offset : offset + len(edit.new)] == edit.new
        at, offset = edit.end, offset + len(edit.new)
    assert result[offset:] == text[at:]


def test_overlapping_edits_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="overlap"):
        grammar.apply_edits("abcdef", [grammar.Edit(0, 3, "x"), grammar.Edit(2, 4, "y")])


@pytest.mark.parametrize(
    ("text", "config_format", "order"),
    [
        ("startup: order=2,up=30\n", grammar.PROXMOX, 2),
        ("startup: 7\n", grammar.PROXMOX, 7),
        ("startup: up=30\n", grammar.PROXMOX, 1 << 30),
        ("lxc.start.order = 10\n", grammar.LXC, -10),
        ("", grammar.LXC, 1 << 30),
    ],
)
def test_start_order(text: str, config_format: str, order: int) -> None:
    assert grammar.start_order(grammar.parse(text, config_format)) == order
