# SPDX-License-Identifier: GPL-3.0-or-later
"""Sysctl names, comparison, and what capture, apply and restore make of a small /proc/sys."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from gpu_tuning import engine, journal, sysctl
from gpu_tuning.rows import Row
from hypothesis import given
from hypothesis import strategies as st

COMPONENT = st.text("abcxyz019_:@+", min_size=1, max_size=6).filter(lambda s: s not in (".", ".."))
INTERFACE = st.builds(".".join, st.lists(COMPONENT, min_size=1, max_size=3))
NUMBER = st.integers(-(2**63), 2**64 - 1)


# Names


@pytest.mark.parametrize(
    ("written", "path", "canonical"),
    [
        ("vm.swappiness", "vm/swappiness", "vm.swappiness"),
        ("vm/swappiness", "vm/swappiness", "vm.swappiness"),
        (
            "net.ipv4.conf.eth0/100.rp_filter",
            "net/ipv4/conf/eth0.100/rp_filter",
            "net.ipv4.conf.eth0/100.rp_filter",
        ),
        (
            "net/ipv4/conf/eth0.100/rp_filter",
            "net/ipv4/conf/eth0.100/rp_filter",
            "net.ipv4.conf.eth0/100.rp_filter",
        ),
        ("fs.mqueue/x", "fs/mqueue.x", "fs.mqueue/x"),
    ],
)
def test_forms_of_a_name(written: str, path: str, canonical: str) -> None:
    assert "/".join(sysctl.components(written)) == path
    assert sysctl.canonical_name(written) == canonical


@pytest.mark.parametrize(
    "written",
    [
        *("", "swappiness", ".", "/", "vm.", ".vm", "vm..swappiness", "/proc/sys/vm/swappiness"),
        *("vm/../swappiness", "vm/..", "../vm", "vm././x", "net.ipv4.conf.*.rp_filter", "vm.a b"),
        *("vm.a\n", "vm.a\0b", "-vm.swappiness", "-net/ipv4/ip_forward"),
    ],
)
def test_names_that_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="is not a sysctl name: write it like"):
        sysctl.components(written)


@given(st.lists(COMPONENT, min_size=1, max_size=3), st.lists(INTERFACE, min_size=1, max_size=3))
def test_both_forms_lead_to_the_same_key(first: list[str], rest: list[str]) -> None:
    slashes = "/".join([*first, *rest])
    dots = sysctl.canonical_name(slashes)
    assert sysctl.components(slashes) == sysctl.components(dots) == [*first, *rest]
    assert sysctl.canonical_name(dots) == dots


@given(st.text(st.sampled_from("./\\-_az0*~ \0\n:@"), max_size=12) | st.text(max_size=12))
def test_no_name_leaves_proc_sys(name: str) -> None:
    try:
        path = sysctl.Sysctls([], "/proc").path(name)
    except ValueError:
        return
    assert os.path.normpath(path) == path
    assert path.startswith("/proc/sys/")


# Settings


@pytest.mark.parametrize(
    ("value", "match", "word"),
    [
        ("1", "about", "match must be one of exact, minimum, maximum"),
        ("", "minimum", "needs a number"),
        ("  ", "maximum", "needs a number"),
        ("many", "minimum", "needs integers"),
        ("1 2 x", "maximum", "needs integers"),
        ("1.5", "minimum", "needs integers"),
        ("1\n2", "exact", "one line"),
        ("1\0", "exact", "one line"),
        ("0x" + "f" * 5000, "minimum", "needs integers"),
        ("9" * 5000, "minimum", "needs integers"),
    ],
)
def test_values_that_are_refused(value: str, match: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sysctl.setting("vm.swappiness", value, match)


def test_one_key_twice_in_two_forms_is_refused() -> None:
    both = [sysctl.setting("vm.swappiness", "1"), sysctl.setting("vm/swappiness", "2")]
    with pytest.raises(ValueError, match="named twice"):
        sysctl.checked_settings(both)


@pytest.mark.parametrize("pair", ["vm.dirty", "vm.dirty_background"])
def test_both_of_a_pair_are_refused(pair: str) -> None:
    both = [sysctl.setting(f"{pair}_ratio", "5"), sysctl.setting(f"{pair}_bytes", "1000000")]
    with pytest.raises(ValueError, match="zero each other"):
        sysctl.checked_settings(both)


def test_both_of_a_pair_may_be_watched() -> None:
    both = [sysctl.setting("vm.dirty_ratio"), sysctl.setting("vm.dirty_bytes")]
    assert sysctl.checked_settings(both) == both


# Comparison


@pytest.mark.parametrize(
    ("wanted", "read", "same"),
    [
        ("10", "10", True),
        ("0x10", "16", True),
        ("010", "8", True),
        ("-0x10", "-16", True),
        ("4096 87380 6291456", "4096\t87380\t6291456", True),
        ("10", "0x10", False),
        ("10", "16", False),
        ("0x10", "10", False),
        ("010", "10", False),
        ("10", "10 10", False),
        ("10", "1", False),
        ("", "", True),
        ("", "0", False),
        ("bbr", "BBR", False),
        ("09", "9", False),  # the kernel's parser stops at the 9 of an octal number
        ("0x" + "f" * 5000, "1", False),
    ],
)
def test_tokens(wanted: str, read: str, same: bool) -> None:
    assert sysctl.same_tokens(wanted, read) is same


@given(st.text(), st.text())
def test_comparing_never_fails(wanted: str, read: str) -> None:
    assert sysctl.same_tokens(wanted, wanted)
    assert sysctl.same_tokens(wanted, read) in (True, False)


@given(NUMBER, NUMBER)
def test_numbers_are_the_same_both_ways_or_neither(one: int, other: int) -> None:
    assert (
        sysctl.same_tokens(str(one), str(other)) == sysctl.same_tokens(str(other), str(one)) == (one == other)
    )


@given(NUMBER)
def test_hexadecimal_equals_only_its_own_number(number: int) -> None:
    sign = "-" if number < 0 else ""
    written = f"{sign}0x{abs(number):x}"
    assert sysctl.same_tokens(written, str(number))
    digits = f"{abs(number):x}"
    assert sysctl.same_tokens(digits, written) is False


@given(st.lists(NUMBER, min_size=1, max_size=4), st.data())
def test_a_minimum_never_lowers_and_a_maximum_never_raises(found: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(NUMBER, min_size=len(found), max_size=len(found)))
    text, value = " ".join(map(str, found)), " ".join(map(str, wanted))
    for match, choose in (("minimum", max), ("maximum", min)):
        target = sysctl.target_value(text, sysctl.setting("a.b", value, match))
        assert [int(token) for token in target.split()] == [choose(f, w) for f, w in zip(found, wanted)]
        assert sysctl.target_value(target, sysctl.setting("a.b", value, match)) == target


@given(st.text(st.characters(exclude_characters="\n\0")), st.text(st.characters(exclude_characters="\n\0")))
def test_what_was_written_satisfies_an_exact_setting(found: str, value: str) -> None:
    wanted = sysctl.setting("a.b", value)
    target = sysctl.target_value(sysctl.normalised(found), wanted)
    read_back = sysctl.normalised(target)
    assert sysctl.target_value(read_back, wanted) == read_back


@pytest.mark.parametrize(
    ("found", "value", "match"),
    [("auto", "5", "minimum"), ("1 2", "5", "minimum"), ("", "5", "maximum"), ("5", "1 2", "maximum")],
)
def test_what_cannot_be_compared_is_a_row_and_not_written(
    memory_path: Path, found: str, value: str, match: str
) -> None:
    tree = proc_sys(memory_path, {"a.b": found})
    (row,) = sysctl.Sysctls([sysctl.setting("a.b", value, match)], str(tree)).capture()
    assert (row.status, row.before) == ("failed", found)
    assert f"the {match}" in str(row.reason)


# Capture, apply, restore


def proc_sys(memory_path: Path, settings: dict[str, str]) -> Path:
    """Write a procfs with the given keys, each text as it stands."""
    for name, text in settings.items():
        path = memory_path / "proc/sys" / name.replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return memory_path / "proc"


def apply(memory_path: Path, *settings: sysctl.Setting) -> dict[str, Row]:
    """Apply settings to the procfs in ``memory_path`` as a run of its own."""
    kind = sysctl.Sysctls(sysctl.checked_settings(list(settings)), str(memory_path / "proc"))
    kept = journal.Journal(str(memory_path / "state"), "boot")
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.applied([kind], kept)}


def restore(memory_path: Path, *names: str) -> dict[str, Row]:
    """Restore the named keys, or all."""
    kind = sysctl.Sysctls([sysctl.setting(name) for name in names], str(memory_path / "proc"))
    kept = journal.Journal(str(memory_path / "state"), "boot")
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.restored([kind], kept, check=False)}


@pytest.mark.parametrize(
    ("found", "value", "match", "status", "written"),
    [
        ("60", "10", "exact", "changed", "10\n"),
        ("10", "0xa", "exact", "ok", "10\n"),
        ("4\t5", "4 5", "exact", "ok", "4\t5\n"),
        ("4\t5", "4 6", "exact", "changed", "4 6\n"),
        ("212992", "16777216", "minimum", "changed", "16777216\n"),
        ("33554432", "16777216", "minimum", "ok", "33554432\n"),
        ("1\t9", "5 5", "minimum", "changed", "5 9\n"),
        ("4", "1", "maximum", "changed", "1\n"),
        ("-1", "1", "maximum", "ok", "-1\n"),
    ],
)
def test_apply(memory_path: Path, found: str, value: str, match: str, status: str, written: str) -> None:
    proc_sys(memory_path, {"kernel.x": found})
    row = apply(memory_path, sysctl.setting("kernel.x", value, match))["kernel.x"]
    assert (row.status, (memory_path / "proc/sys/kernel/x").read_text()) == (status, written)
    assert row.after == sysctl.normalised(written)
    restore(memory_path)
    assert (memory_path / "proc/sys/kernel/x").read_text() == f"{found}\n"


def test_a_larger_value_that_stays_says_why(memory_path: Path) -> None:
    proc_sys(memory_path, {"net.core.rmem_max": "33554432"})
    row = apply(memory_path, sysctl.setting("net.core.rmem_max", "16777216", "minimum"))["net.core.rmem_max"]
    assert row.reason == "33554432 stays: the policy asks for a minimum of 16777216"


@pytest.mark.parametrize(
    "name", ["kernel.missing", "missing.altogether", "kernel.x.below_a_file", "kernel.folder"]
)
def test_a_key_that_is_not_there(memory_path: Path, name: str) -> None:
    proc_sys(memory_path, {"kernel.x": "1", "kernel.folder.y": "1"})
    row = apply(memory_path, sysctl.setting(name, "1"))[name]
    assert (row.status, row.before, row.after) == ("unsupported", None, None)
    assert f"has no {memory_path}/proc/sys/{name.replace('.', '/')}" in str(row.reason)
    assert not (memory_path / "state/journal/boot.json").exists()


class Kernel(sysctl.Sysctls):
    """Sysctls of a kernel that rounds up to powers of two, like fs.pipe-max-size."""

    def write(self, row: Row) -> None:
        power = 1 << (int(str(row.desired)) - 1).bit_length()
        super().write(row.with_status(row.status, desired=str(power)))


@pytest.mark.parametrize(
    ("match", "status"),
    [("exact", "clamped"), ("minimum", "changed"), ("maximum", "clamped")],
)
def test_a_value_that_the_kernel_rounds_up(memory_path: Path, match: str, status: str) -> None:
    """What is read back has to satisfy the setting, not to equal what was written."""
    root = proc_sys(memory_path, {"fs.pipe-max-size": "4096" if match != "maximum" else "1048576"})
    kind = Kernel([sysctl.setting("fs.pipe-max-size", "5000", match)], str(root))
    (row,) = engine.written([(kind, row) for row in kind.capture()])
    assert (row.after, row.status) == ("8192", status)


def test_capture_alone_watches_and_never_asks(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"kernel.x": "4\t5"})
    (row,) = sysctl.Sysctls([sysctl.setting("kernel.x")], str(root)).capture()
    assert (row.before, row.desired, row.status, row.reason) == ("4 5", None, "ok", None)


# The dirty_* pairs

DIRTY = {"vm.dirty_ratio": "20", "vm.dirty_bytes": "0"}


def test_the_partner_is_captured_too(memory_path: Path) -> None:
    proc_sys(memory_path, DIRTY)
    rows = apply(memory_path, sysctl.setting("vm.dirty_ratio", "5"))
    assert {name: row.status for name, row in rows.items()} == {
        "vm.dirty_ratio": "changed",
        "vm.dirty_bytes": "ok",
    }
    assert "sysctl:vm.dirty_bytes" in (memory_path / "state/journal/boot.json").read_text()


class Pairs(sysctl.Sysctls):
    """Sysctls of a kernel: writing one of a pair zeroes the other, zero bytes and 101 percent are EINVAL."""

    def write(self, row: Row) -> None:
        if row.target not in self._zeroed_by_kernel:
            if row.desired == "101" or (row.desired == "0" and "bytes" in row.target):
                raise OSError(errno.EINVAL, "Invalid argument")
            Path(self.path(sysctl.PARTNERS[row.target])).write_text("0\n")
        super().write(row)


def test_only_the_non_zero_one_is_restored(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"vm.dirty_ratio": "0", "vm.dirty_bytes": "500000"})
    kept = journal.Journal(str(memory_path / "state"), "boot")
    with kept.locked():
        rows = engine.applied([Pairs([sysctl.setting("vm.dirty_ratio", "5")], str(root))], kept)
        assert [(row.target, row.status, row.after) for row in rows] == [
            ("vm.dirty_ratio", "changed", "5"),
            ("vm.dirty_bytes", "changed", "0"),
        ]
        rows = engine.restored([Pairs([], str(root))], kept, check=False)
        assert {(row.target, row.status, row.after) for row in rows} == {
            ("vm.dirty_ratio", "changed", "0"),
            ("vm.dirty_bytes", "changed", "500000"),
        }
        assert kept.entries == {}


def test_a_partner_is_not_clamped_when_its_main_key_is_rejected(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"vm.dirty_ratio": "0", "vm.dirty_bytes": "500000"})
    kind = Pairs([sysctl.setting("vm.dirty_ratio", "101")], str(root))
    main, partner = engine.written([(kind, row) for row in kind.capture()])
    assert main.status == "rejected"
    assert "EINVAL" in str(main.reason)
    assert (partner.status, partner.after) == ("not_applicable", "500000")
    assert partner.reason == "stays at 500000: vm.dirty_ratio was not written"


class Locked(Pairs):
    """Sysctls of a kernel that has become read-only."""

    def write(self, row: Row) -> None:
        self.path = lambda name: str(Path("/nowhere") / name)  # type: ignore[method-assign]
        try:
            super(Pairs, self).write(row)
        finally:
            del self.path


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({"vm.dirty_ratio": "20", "vm.dirty_bytes": "0"}, {"vm.dirty_ratio": "0", "vm.dirty_bytes": "7000"}),
        ({"vm.dirty_ratio": "0", "vm.dirty_bytes": "7000"}, {"vm.dirty_ratio": "20", "vm.dirty_bytes": "0"}),
    ],
)
def test_a_pair_that_could_not_be_restored_stays_recorded(
    memory_path: Path, recorded: dict[str, str], now: dict[str, str]
) -> None:
    root = str(proc_sys(memory_path, recorded))
    kept = journal.Journal(str(memory_path / "state"), "boot")
    with kept.locked():
        engine.captured([Pairs([sysctl.setting("vm.dirty_ratio")], root)], kept)
        proc_sys(memory_path, now)
        kept.load()
        rows = engine.restored([Locked([], root)], kept, check=False)
    assert {row.status for row in rows} == {"failed", "not_applicable"}
    assert set(kept.entries) == {"sysctl:vm.dirty_ratio", "sysctl:vm.dirty_bytes"}


# What a rollback gives back


def test_the_text_comes_back_with_every_tab(memory_path: Path) -> None:
    proc_sys(memory_path, {"net.ipv4.tcp_rmem": "4096\t131072\t6291456"})
    apply(memory_path, sysctl.setting("net.ipv4.tcp_rmem", "4096 131072 33554432"))
    row = restore(memory_path)["net.ipv4.tcp_rmem"]
    assert (row.status, row.before) == ("changed", "4096 131072 33554432")
    assert (memory_path / "proc/sys/net/ipv4/tcp_rmem").read_text() == "4096\t131072\t6291456\n"


def test_bytes_that_are_not_utf8_come_back(memory_path: Path) -> None:
    proc_sys(memory_path, {"kernel.x": ""})
    (memory_path / "proc/sys/kernel/x").write_bytes(b"caf\xe9\n")
    assert apply(memory_path, sysctl.setting("kernel.x", "tea"))["kernel.x"].status == "changed"
    restore(memory_path)
    assert (memory_path / "proc/sys/kernel/x").read_bytes() == b"caf\xe9\n"


def test_the_first_value_wins_until_it_is_rolled_back(memory_path: Path) -> None:
    proc_sys(memory_path, {"kernel.x": "1"})
    apply(memory_path, sysctl.setting("kernel.x", "2"))
    apply(memory_path, sysctl.setting("kernel.x", "3"))
    assert restore(memory_path)["kernel.x"].after == "1"
    apply(memory_path, sysctl.setting("kernel.x", "4"))
    assert restore(memory_path)["kernel.x"].after == "1"


def test_someone_elses_change_is_named(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"kernel.x": "1"})
    apply(memory_path, sysctl.setting("kernel.x", "2"))
    (root / "sys/kernel/x").write_text("7\n")
    row = restore(memory_path)["kernel.x"]
    assert (row.status, row.after) == ("changed", "1")
    assert row.reason == "something else had set it since: it was 7, this tool had set 2"


def test_restoring_named_keys_leaves_the_others(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"kernel.x": "1", "kernel.y": "1"})
    apply(memory_path, sysctl.setting("kernel.x", "2"), sysctl.setting("kernel.y", "2"))
    assert list(restore(memory_path, "kernel/y")) == ["kernel.y"]
    assert (root / "sys/kernel/x").read_text() == "2\n"
    assert list(restore(memory_path)) == ["kernel.x"]


def test_a_key_that_has_gone_stays_recorded(memory_path: Path) -> None:
    root = proc_sys(memory_path, {"kernel.x": "1"})
    apply(memory_path, sysctl.setting("kernel.x", "2"))
    (root / "sys/kernel/x").unlink()
    row = restore(memory_path)["kernel.x"]
    assert row.status == "failed"
    assert f"{root}/sys/kernel/x" in str(row.reason)
    (root / "sys/kernel/x").write_text("2\n")
    assert restore(memory_path)["kernel.x"].after == "1"
