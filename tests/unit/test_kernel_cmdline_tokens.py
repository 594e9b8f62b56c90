# SPDX-License-Identifier: GPL-3.0-or-later
"""The tokens of a command line, as the kernel sees them."""

from __future__ import annotations

import pytest
from gpu_tuning.cmdline import (
    REPEATED,
    CommandLine,
    Token,
    check,
    parse,
    removals,
    split,
    wanted_tokens,
)
from hypothesis import given
from hypothesis import strategies as st

LINES = st.text(st.sampled_from("ab=-_.\" \t\n'$"), max_size=40)
NAMES = st.sampled_from(["quiet", "amd_pstate", "amd-pstate", "console", "processor.max_cstate"])
VALUES = st.sampled_from([None, "", "1", "active", "ttyS0,115200"])
TOKENS = st.builds(lambda n, v: Token(n if v is None else f"{n}={v}"), NAMES, VALUES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quiet", [("quiet", None)]),
        ("a=1  b=\tc", [("a", "1"), ("b", ""), ("c", None)]),
        ("amd-pstate=active", [("amd_pstate", "active")]),
        ('dyndbg="file x.c +p" quiet', [("dyndbg", "file x.c +p"), ("quiet", None)]),
        ('"dyndbg=file x.c +p" quiet', [("dyndbg", "file x.c +p"), ("quiet", None)]),
        ('a="never closed b', [("a", "never closed b")]),
        ("root=UUID=6d1f", [("root", "UUID=6d1f")]),
        ("", []),
    ],
)
def test_parse(text: str, expected: list[tuple[str, str | None]]) -> None:
    assert [(token.name, token.value) for token in parse(text).tokens] == expected


def test_what_follows_two_dashes_is_inits() -> None:
    line = parse("quiet -- amd_pstate=active 3")
    assert not line.has(Token("amd_pstate=active"))
    assert line.changed([Token("nosmt")]).text == "quiet nosmt -- amd_pstate=active 3"


def test_the_last_one_counts() -> None:
    line = parse("mitigations=off quiet mitigations=auto")
    assert line.has(Token("mitigations=auto"))
    assert not line.has(Token("mitigations=off"))
    assert line.changed([Token("mitigations=off")]).text == "quiet mitigations=off"


def test_repeated_names_add_up() -> None:
    line = parse("console=tty0 console=ttyS0")
    assert line.has(Token("console=tty0"))
    assert line.changed([Token("console=hvc0")]).text == "console=tty0 console=ttyS0 console=hvc0"


def test_removal_by_name_and_by_value() -> None:
    line = parse("console=tty0 quiet console=ttyS0")
    assert line.changed([], [Token("console=tty0")]).text == "quiet console=ttyS0"
    assert line.changed([], [Token("console")]).text == "quiet"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["a=1 b=2"], "one token per entry"),
        ([""], "one token per entry"),
        (["a\nb"], "printable ASCII"),
        (['a="b'], "not closed"),
        (["=1"], "no parameter's name"),
        (["root=/dev/sda1"], "boot loader's own"),
        (["mitigations=off", "mitigations=auto"], "keep one of them"),
    ],
)
def test_bad_tokens_are_refused(tokens: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wanted_tokens(tokens)


def test_set_and_remove_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="both to be set and to be removed"):
        removals(["amd-pstate"], wanted_tokens(["amd_pstate=active"]))


def test_same_token_twice_is_one() -> None:
    assert wanted_tokens(["console=tty0", "console=tty0", "console=hvc0"]) == [
        Token("console=tty0"),
        Token("console=hvc0"),
    ]


def test_a_line_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="2050 characters"):
        check(parse(f"a={'x' * 2048}"), "some entry")


@given(LINES)
def test_any_text_parses_and_its_tokens_survive(text: str) -> None:
    tokens = split(text)
    assert "".join("".join(t.text for t in tokens).split()) == "".join(text.split())
    if text.count('"') % 2 == 0:
        assert split(" ".join(token.text for token in tokens)) == tokens


@given(st.lists(TOKENS, max_size=8), st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=2))
def test_a_change_sets_removes_keeps_and_is_idempotent(
    old: list[Token], wanted: list[Token], removed: list[Token]
) -> None:
    try:
        wanted = wanted_tokens([token.text for token in wanted])
        removed = removals([token.text for token in removed], wanted)
    except ValueError:
        return
    line = CommandLine(tuple(old))
    new = line.changed(wanted, removed)
    assert all(new.has(token) for token in wanted)
    assert all(new.lacks(removal) for removal in removed)
    assert new.changed(wanted, removed) == new
    touched = {t.name for t in wanted} | {r.name for r in removed}
    assert [t for t in new.tokens if t.name not in touched] == [t for t in old if t.name not in touched]
    foreign = [t for t in old if t.name in REPEATED and t.name not in {r.name for r in removed}]
    assert all(token in new.tokens for token in foreign)
