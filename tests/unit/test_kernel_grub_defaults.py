# SPDX-License-Identifier: GPL-3.0-or-later
"""/etc/default/grub read without running it agrees with the shell that runs it."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from gpu_tuning.grub_defaults import ShellSyntaxError, assignments, last
from hypothesis import given, settings
from hypothesis import strategies as st
from support.boot import FIXTURES

GRUB_FILES = sorted((FIXTURES / "grub").iterdir())


def read(text: str) -> dict[str, tuple[str, bool]]:
    return {name: (a.value, a.dynamic) for name, a in last(assignments([("grub", text)])).items()}


def as_the_shell_reads(text: str, name: str) -> str:
    script = f'{text}\nprintf "%s." "${{{name}-}}"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout[:-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": ("1", False)}),
        ("A='x y'z\"w $B\"", {"A": ("x yzw ", False)}),
        ('B=b; A="$B-${B}"', {"B": ("b", False), "A": ("b-b", False)}),
        ('A="a\\"b\\$c\\q"', {"A": ('a"b$c\\q', False)}),
        ('A="one \\\ntwo"', {"A": ("one two", False)}),
        ("#A=1\nB=2 # A=3\n", {"B": ("2", False)}),
        ("export A=1", {"A": ("1", False)}),
        ("echo A=1", {}),
        ("A=`uname -r`", {"A": ("", True)}),
        ('A="q $(printf "%s)" "x")"', {"A": ("q ", True)}),
        ("if true; then A=1; fi; B=2", {"A": ("1", True), "B": ("2", False)}),
        ("f() {\nA=1\n}\nB=2", {"A": ("1", True), "B": ("2", False)}),
        ("A=1\nA+=2", {"A": ("12", False)}),
        ("A=1\nA=2", {"A": ("2", False)}),
    ],
)
def test_assignments(text: str, expected: dict[str, tuple[str, bool]]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize("path", GRUB_FILES, ids=lambda path: path.name)
def test_real_files_read_as_the_shell_reads_them(path: Path) -> None:
    text = path.read_text()
    if path.name == "unclosed-quote.grub":
        with pytest.raises(ShellSyntaxError, match='line 3: " is not closed'):
            read(text)
        return
    for name, (value, dynamic) in read(text).items():
        assert dynamic or value == as_the_shell_reads(text, name), name


def test_places() -> None:
    found = assignments([("grub", "\n\nA='x\ny'\n"), ("later.cfg", 'A="$A z"')])
    assert [(a.place, a.value) for a in found] == [("grub, line 3", "x\ny"), ("later.cfg, line 1", "x\ny z")]


PIECES = st.sampled_from(
    ["a", "B", " ", "=", "'", '"', "\\", "$A", "${B}", "$(echo x)", "`", "#", ";", "\n", "A="]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=20).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ShellSyntaxError):
        assignments([("grub", text)])


QUOTED = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab=-. "), max_size=5).map(lambda t: f"'{t}'"),
        st.text(st.sampled_from("ab=-. "), max_size=5).map(lambda t: f'"{t}"'),
        st.sampled_from(["x", "\\ ", '\\"', '"\\$"', '"\\\\"', "$V", '"${V}"']),
    ),
    min_size=1,
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(QUOTED)
def test_any_static_word_is_what_the_shell_makes_of_it(word: str) -> None:
    text = f"V='a  b'\nX={word}"
    assert read(text)["X"] == (as_the_shell_reads(text, "X"), False)
