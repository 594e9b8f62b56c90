# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from pathlib import Path

import pytest
from gpu_tuning import lxc_config as grammar
from gpu_tuning import lxc_rules as rules
from hypothesis import given
from hypothesis import strategies as st

ALLOW, DENY = "lxc.cgroup2.devices.allow", "lxc.cgroup2.devices.deny"


def _rule(value: str, key: str = ALLOW) -> rules.Rule:
    rule = rules.rule_of(grammar.parse(f"{key} = {value}", grammar.LXC).lines[0])
    assert rule is not None
    return rule


@pytest.mark.parametrize(
    "value",
    [
        "c 1:11 rwm # text",
        "c 1:11 rwm#text",
        "c\t1:11\trwm",
        "c 1:11 mwr",
        "c 1:11 rwm\r",
        "b 7:* r",
        "c *:* m",
    ],
)
def test_rules_that_lxc_takes(value: str) -> None:
    assert _rule(value).reason == ""


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("c 1:11 rw # text", "access letters"),
        ("c 1:11 r # text", "access letters"),
        ("c 1:11 rw\r", "form"),
        ("c  1:11 rwm", "form"),
        ("c 1:11  rwm", "form"),
        ("C 1:11 rwm", "lower-case"),
        ("c 1:11 rwx", "form"),
        ("c 1:11", "form"),
        ("c 1:1-2 rwm", "form"),
        ("c 0x1f8:* rwm", "hexadecimal"),
        ("c 1f8:* rwm", "hexadecimal"),
        ("c 600:* rwm", "over 511"),
        ("c 99999999999:* rwm", "int"),
        ("a *:* rwm", "does not start"),
    ],
)
def test_rules_that_lxc_skips(value: str, word: str) -> None:
    assert word in _rule(value).reason


def test_the_digits_of_the_major_are_found_in_the_text() -> None:
    text = "memory: 504\nlxc.cgroup2.devices.allow:   c 504:7 rw\n"
    rule = rules.rule_of(grammar.parse(text, grammar.PROXMOX).lines[1])
    assert rule is not None
    assert text[rule.major_start : rule.major_end] == "504"
    assert text[: rule.major_start].endswith("c ")
    assert (rule.major, rule.minor, rule.access) == (504, 7, "rw")


def test_a_rule_by_path() -> None:
    rule = _rule("/dev/nvidia-uvm rwm")
    assert (rule.type, rule.path, rule.access, rule.reason) == ("path", "/dev/nvidia-uvm", "rwm", "")


@given(st.text(alphabet=st.characters(max_codepoint=255, exclude_characters="\n")))
def test_any_value_is_read_without_an_exception(value: str) -> None:
    for key in (ALLOW, "lxc.cgroup.devices.deny"):
        rules.rule_of(grammar.parse(f"{key}: {value}", grammar.PROXMOX).lines[0])


def _effect(text: str, config_format: str = grammar.LXC, family: str = rules.V2) -> rules.Enforcement:
    return rules.enforcement(grammar.parse(text, config_format), family, rules.Includes())


PVE_ALLOW = f"{ALLOW}: c 195:* rwm\n"


@pytest.mark.parametrize(
    ("text", "config_format", "family", "enforced", "why", "active"),
    [
        (PVE_ALLOW, grammar.PROXMOX, rules.V2, True, "", 1),
        ("", grammar.PROXMOX, rules.V2, True, "", 0),
        (f"unprivileged: 1\n{PVE_ALLOW}", grammar.PROXMOX, rules.V2, False, "unprivileged", 0),
        (f"unprivileged: 1\n{DENY}: a\n{PVE_ALLOW}", grammar.PROXMOX, rules.V2, True, "", 1),
        (f"{ALLOW}: a\n{PVE_ALLOW}", grammar.PROXMOX, rules.V2, False, "allow_all", 0),
        (f"{PVE_ALLOW}{ALLOW}:\n", grammar.PROXMOX, rules.V2, False, "no_rules", 0),
        (f"{ALLOW}:\n{PVE_ALLOW}", grammar.PROXMOX, rules.V2, True, "", 1),
        (f"{PVE_ALLOW}[snap]\n{ALLOW}: a\n", grammar.PROXMOX, rules.V2, True, "", 1),
        (f"{ALLOW} = c 195:* rwm\n{DENY} = a\n", grammar.LXC, rules.V2, False, "no_rules", 0),
        (f"{DENY} = a\n{ALLOW} = c 195:* rwm\n", grammar.LXC, rules.V2, True, "", 1),
        (f"{ALLOW} = c 195:* rwm\n", grammar.LXC, rules.V2, True, "", 1),
        ("", grammar.LXC, rules.V2, False, "no_rules", 0),
        ("lxc.cgroup.devices.allow = c 195:* rwm\n", grammar.LXC, rules.V1, False, "no_rules", 1),
        (
            "lxc.cgroup.devices.deny = a\nlxc.cgroup.devices.allow = c 195:* rwm\n",
            grammar.LXC,
            rules.V1,
            True,
            "",
            1,
        ),
    ],
)
def test_what_is_in_force(
    text: str, config_format: str, family: str, enforced: bool, why: str, active: int
) -> None:
    effect = _effect(text, config_format, family)
    assert (effect.enforced, effect.why, len(effect.active)) == (enforced, why, active)


def test_a_rule_that_a_later_line_resets_is_named() -> None:
    effect = _effect(f"{ALLOW} = c 195:* rwm\n{DENY} = a\n{ALLOW} = c 1:3 r\n")
    assert list(effect.void) == [1]
    assert "line 2" in effect.void[1]


def test_includes_are_read_in_their_place(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.conf").write_text(f"{ALLOW} = c 1:3 rwm\n")
    (tmp_path / "d" / "ignored.txt").write_text(f"{ALLOW} = a\n")
    (tmp_path / "loop").write_text(f"lxc.include = {tmp_path}/loop\n{DENY} = a\n")
    above = _effect(f"lxc.include = {tmp_path}/d\nlxc.include = {tmp_path}/loop\n")
    assert (above.enforced, above.active) == (False, ())
    below = _effect(f"lxc.include = {tmp_path}/loop\nlxc.include = {tmp_path}/d\n")
    assert [rule.major for rule in below.active] == [1]


def test_an_include_that_cannot_be_read_is_named() -> None:
    includes = rules.Includes()
    rules.enforcement(grammar.parse("lxc.include = /nonexistent/x\n", grammar.LXC), rules.V2, includes)
    assert list(includes.broken) == ["/nonexistent/x"]
