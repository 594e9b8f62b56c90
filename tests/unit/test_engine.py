# SPDX-License-Identifier: GPL-3.0-or-later
"""The three steps with kinds of all sorts: order, journal, errors, read-back, diff, a module's result."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any, Optional

import pytest
from gpu_tuning import engine, tuner
from gpu_tuning.engine import Refused
from gpu_tuning.journal import Entry, Journal, JournalError
from gpu_tuning.kernel_files import error_text, read_text, write_text
from gpu_tuning.rows import STATUSES, WOULD_CHANGE, Row, Value, failures
from support.small_host import ALL_SECTIONS, WANTED, SmallHost, small_host
from support.tree import changed_paths, manifest


class Memory(engine.Kind):
    """Settings in a dict; whatever ``trouble`` has for "read", "write" or "read back" of a key is raised."""

    kind = "memory"

    def __init__(
        self,
        values: dict[str, Value],
        wanted: Value = 1,
        trouble: Optional[dict[tuple[str, str], Any]] = None,
    ) -> None:
        self.values, self.wanted, self.trouble = values, wanted, trouble or {}
        self.calls: list[tuple[str, str]] = []

    def capture(self) -> list[Row]:
        rows = [
            Row(f"memory:{key}", "memory", key, before=self.values[key], desired=self.wanted)
            for key in self.values
        ]
        return [
            row if row.before == self.wanted else row.with_status(WOULD_CHANGE, "differs") for row in rows
        ]

    def read(self, row: Row) -> Value:
        self._do("read back" if ("write", row.target) in self.calls else "read", row)
        return self.values[row.target]

    def write(self, row: Row) -> None:
        self._do("write", row)
        self.values[row.target] = row.desired

    def _do(self, step: str, row: Row) -> None:
        self.calls.append((step, row.target))
        trouble = self.trouble.get((step, row.target))
        if isinstance(trouble, Exception):
            raise trouble

    def recorded_row(self, entry: Entry) -> Row:
        return Row(f"memory:{entry['target']}", "memory", entry["target"])


@pytest.fixture
def kept(memory_path: Path) -> Journal:
    return Journal(str(memory_path / "state"), "boot")


def apply(kept: Journal, *kinds: engine.Kind) -> dict[str, Row]:
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.applied(kinds, kept)}


def restore(kept: Journal, *kinds: engine.Kind, check: bool = False) -> dict[str, Row]:
    with kept.locked():
        kept.load()
        return {row.target: row for row in engine.restored(kinds, kept, check)}


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/proc/sys/x")


# Order


def test_all_is_recorded_before_the_first_write_and_read_back_after_the_last(kept: Journal) -> None:
    journal_at_first_write = []

    class Watching(Memory):
        def write(self, row: Row) -> None:
            journal_at_first_write.append(set(kept.entries) if Path(kept.path).exists() else set())
            super().write(row)

    one, two = Watching({"a": 0, "b": 0}), Watching({"c": 0})
    apply(kept, one, two)
    assert journal_at_first_write == [{"memory:a", "memory:b", "memory:c"}] * 3
    assert one.calls == [("write", "a"), ("write", "b"), ("read back", "a"), ("read back", "b")]


def test_nothing_is_written_when_the_journal_cannot_be(
    kept: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise os_error(errno.ENOSPC)

    kind = Memory({"a": 0})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match="ENOSPC"):
        apply(kept, kind)
    assert (kind.values, kind.calls) == ({"a": 0}, [])


def test_what_is_right_already_is_not_written(kept: Journal) -> None:
    kind = Memory({"a": 1})
    row = apply(kept, kind)["a"]
    assert (row.status, row.after, kind.calls) == ("ok", 1, [("read", "a")])


def test_check_mode_writes_nothing_and_recording_is_not_writing(kept: Journal) -> None:
    kind = Memory({"a": 0})
    assert [row.status for row in engine.captured([kind])] == ["would_change"]
    assert not Path(kept.path).exists()
    with kept.locked():
        engine.captured([kind], kept)
    assert kept.entries["memory:a"]["set"] is None
    assert kind.calls == []


# What an error means


@pytest.mark.parametrize(
    ("step", "trouble", "status", "word"),
    [
        (
            "write",
            os_error(errno.EINVAL),
            "rejected",
            "the kernel refused 1 for b: EINVAL (Invalid argument)",
        ),
        ("write", os_error(errno.EBUSY), "rejected", "EBUSY"),
        ("write", os_error(errno.EROFS), "read_only", "not permitted: cannot write /proc/sys/x: EROFS"),
        ("write", os_error(errno.EACCES), "read_only", "EACCES"),
        ("write", os_error(errno.EPERM), "read_only", "EPERM"),
        ("write", os_error(errno.ENOENT), "failed", "vanished during the run: cannot write /proc/sys/x"),
        ("write", os_error(errno.ENODEV), "failed", "vanished"),
        ("write", os_error(4242), "rejected", "errno 4242"),
        ("write", Refused("not_applicable", "gone for good"), "not_applicable", "gone for good"),
        ("read back", os_error(errno.ENOENT), "failed", "vanished during the run: cannot read back"),
        ("read back", os_error(errno.EIO), "failed", "cannot read back /proc/sys/x: EIO"),
        ("read back", Refused("failed", "all ff"), "failed", "all ff"),
    ],
)
def test_an_error_is_a_row_and_stops_no_other(
    kept: Journal, step: str, trouble: Exception, status: str, word: str
) -> None:
    rows = apply(kept, Memory({"a": 0, "b": 0, "c": 0}, trouble={(step, "b"): trouble}))
    assert (rows["a"].status, rows["b"].status, rows["c"].status) == ("changed", status, "changed")
    assert word in str(rows["b"].reason)
    # A value that was refused has been read again; one that cannot be read is not known.
    assert rows["b"].after == (None if step == "read back" else 0)


def test_a_value_that_did_not_stick(kept: Journal) -> None:
    class Clamping(Memory):
        def write(self, row: Row) -> None:
            super().write(row)
            self.values[row.target] = 7

    row = apply(kept, Clamping({"a": 0}))["a"]
    assert (row.status, row.after) == ("clamped", 7)
    assert row.reason == "asked for 1, the kernel took the write and reads 7"


def test_error_text() -> None:
    assert error_text(os_error(errno.EINVAL)) == "EINVAL (Invalid argument)"
    assert error_text(OSError(4242, "odd")) == "errno 4242 (odd)"


# Restoring


def test_restored_values_are_forgotten_and_the_others_kept(kept: Journal) -> None:
    values: dict[str, Value] = {"a": 0, "b": 0}
    apply(kept, Memory(values))
    stuck = Memory(values, trouble={("write", "b"): os_error(errno.EIO)})
    rows = restore(kept, stuck)
    assert (rows["a"].status, rows["b"].status, values) == ("changed", "rejected", {"a": 0, "b": 1})
    assert list(kept.entries) == ["memory:b"]
    assert restore(kept, Memory(values))["b"].status == "changed"
    assert not Path(kept.path).exists()


def test_restoring_in_check_mode_changes_nothing(kept: Journal) -> None:
    values: dict[str, Value] = {"a": 0}
    apply(kept, Memory(values))
    row = restore(kept, Memory(values), check=True)["a"]
    assert (row.status, row.desired, row.after, values) == ("would_change", 0, None, {"a": 1})
    assert list(kept.entries) == ["memory:a"]


def test_a_setting_that_cannot_be_read_is_kept_recorded(kept: Journal) -> None:
    values: dict[str, Value] = {"a": 0}
    apply(kept, Memory(values))
    row = restore(kept, Memory(values, trouble={("read", "a"): os_error(errno.ENODEV)}))["a"]
    assert (row.status, row.before) == ("failed", None)
    assert list(kept.entries) == ["memory:a"]


@pytest.mark.parametrize(("only_own", "after"), [(True, 5), (False, 0)])
def test_what_this_tool_only_looked_at(kept: Journal, only_own: bool, after: int) -> None:
    values: dict[str, Value] = {"a": 0}
    kind = Memory(values)
    kind.restores_only_own = only_own
    with kept.locked():
        engine.captured([kind], kept)
    values["a"] = 5
    row = restore(kept, kind)["a"]
    assert (values["a"], row.after) == (after, after)
    assert kept.entries == {}


def test_other_kinds_entries_are_left_alone(kept: Journal) -> None:
    with kept.locked():
        kept.record({"sysctl:a.b": {"kind": "sysctl", "target": "a.b", "before": "1", "set": "2"}})
    apply(kept, Memory({"a": 0}))
    restore(kept, Memory({"a": 1}))
    assert list(kept.entries) == ["sysctl:a.b"]


# The files


@pytest.mark.parametrize("before", ["60\n", "6\n", "", "a very long text indeed\n"])
@pytest.mark.parametrize("value", ["10\n", "1\n", "another quite long text, longer than before\n"])
def test_a_recorded_attribute_holds_exactly_what_was_written(
    memory_path: Path, before: str, value: str
) -> None:
    path = memory_path / "attribute"
    path.write_text(before)
    path.chmod(0o640)
    inode = path.stat().st_ino
    write_text(str(path), value)
    assert (path.read_text(), path.stat().st_ino, path.stat().st_mode & 0o777) == (value, inode, 0o640)


@pytest.mark.parametrize(
    ("before", "value"), [("16777216\n", "10\n"), ("10\n", "16777216\n"), ("60\n", "10\n")]
)
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("call", ["open", "write", "ftruncate", "close"])
def test_a_kill_after_any_call_leaves_the_old_or_the_new_value(
    memory_path: Path, before: str, value: str, call: str, which: int
) -> None:
    """The first open and close are those of a look at what is there."""
    path = memory_path / "attribute"
    path.write_text(before)
    pid = os.fork()
    if pid == 0:
        real, calls = getattr(os, call), []

        def fatal(*arguments: Any) -> Any:
            result = real(*arguments)
            calls.append(call)
            if len(calls) == which:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, call, fatal)
        write_text(str(path), value)
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_text().strip() in (before.strip(), value.strip())


@pytest.mark.parametrize("user", [0, 65534])
def test_a_file_that_has_gone_is_not_writable(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert engine.writable(str(memory_path / "missing")) is False


def test_a_missing_attribute_is_not_made(memory_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(str(memory_path / "missing"), "1\n")
    assert not (memory_path / "missing").exists()


def test_bytes_survive(memory_path: Path) -> None:
    (memory_path / "a").write_bytes(b"\xff\xfe\n")
    write_text(str(memory_path / "a"), read_text(str(memory_path / "a")))
    assert (memory_path / "a").read_bytes() == b"\xff\xfe\n"


# Diff


def test_cpus_are_folded_together() -> None:
    rows = [
        Row(f"cpuidle:cpu{n}/C2", "cpuidle", f"cpu{n}/C2", "enabled", "disabled", "disabled", "changed")
        for n in range(128)
    ]
    rows.append(Row("sysctl:a.b", "sysctl", "a.b", "1", "2", None, "would_change"))
    rows.append(Row("sysctl:a.c", "sysctl", "a.c", "1", "1", "1", "ok"))
    idle, keys = engine.diff(rows)
    assert (idle["before"], idle["after"]) == ("C2 on 128 CPUs = enabled\n", "C2 on 128 CPUs = disabled\n")
    assert (keys["before"], keys["after"]) == ("a.b = 1\n", "a.b = 2\n")


def test_nothing_changes_no_diff() -> None:
    assert engine.diff([Row("a:b", "a", "b", status=status) for status in ("ok", "rejected", "failed")]) == []


def test_failures() -> None:
    rows = [Row(f"a:{status}", "a", status, status=status) for status in STATUSES]
    assert [row.status for row in failures(rows)] == ["rejected", "clamped", "overridden", "failed"]


# The module's result


@pytest.fixture
def host(memory_path: Path) -> SmallHost:
    return small_host(memory_path / "host")


def run(host: SmallHost, sections: dict[str, Any], check: bool = False, **common: Any) -> dict[str, Any]:
    """Call tuner.run with the defaults that argument_specs fill in."""
    filled = {
        name: {**{o: spec.get("default") for o, spec in tuner.SECTIONS[name].arguments.items()}, **given}
        for name, given in sections.items()
    }
    for setting in filled.get("sysctl_snapshot", {}).get("settings") or ():
        setting.setdefault("match", "exact")
    defaults = {o: spec["default"] for o, spec in tuner.COMMON_ARGUMENTS.items()}
    return tuner.run(filled, {**defaults, **host.roots, **common}, check)


def ids(result: dict[str, Any], status: str) -> set[str]:
    return {row["id"] for row in result["rows"] if row["status"] == status}


def test_the_result_of_a_run(host: SmallHost) -> None:
    before = manifest(host.root)
    predicted = run(host, WANTED, check=True)
    assert (predicted["changed"], predicted["failed"], predicted["recorded"]) == (True, False, {})
    assert changed_paths(before, manifest(host.root)) == []
    assert not host.state_root.exists()
    real = run(host, WANTED)
    assert (real["changed"], real["failed"]) == (True, False)
    assert ids(real, "changed") == ids(predicted, "would_change") != set()
    assert [each["before"] for each in real["diff"]] == [each["before"] for each in predicted["diff"]]
    assert [each["after"] for each in real["diff"]] == [each["after"] for each in predicted["diff"]]
    assert real["recorded"]["sysctl:vm.swappiness"] == "60"
    again = run(host, WANTED)
    assert (again["changed"], again["diff"]) == (False, [])
    back = run(host, ALL_SECTIONS, state="restored")
    assert (back["changed"], back["recorded"]) == (True, {})
    assert changed_paths(before, manifest(host.root)) == []
    assert run(host, ALL_SECTIONS, state="restored")["rows"] == []


def test_capturing_records_and_changes_nothing(host: SmallHost) -> None:
    before = manifest(host.root)
    result = run(host, WANTED, state="captured")
    assert (result["changed"], result["failed"], result["diff"]) == (False, False, [])
    assert result["recorded"]["pcie_mrrs:0000:01:00.0"] == 512
    assert Path(result["journal"]).exists()
    assert changed_paths(before, manifest(host.root)) == []


def test_a_failure_is_told_after_everything_was_tried(host: SmallHost) -> None:
    host.config(0).write_bytes(b"\xff" * 4096)
    result = run(host, WANTED)
    assert (result["failed"], result["changed"]) == (True, True)
    assert result["msg"].startswith("1 of ")
    assert "pcie_mrrs:0000:01:00.0: failed: 0000:01:00.0: the device does not respond" in result["msg"]
    assert "sysctl:vm.swappiness" in ids(result, "changed")


def test_a_clamped_value_has_changed_the_host(host: SmallHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(path: str, text: str) -> None:
        write_text(path, f"{int(text) // 2}\n")

    monkeypatch.setattr("gpu_tuning.sysctl.write_text", halved)
    wanted = {"sysctl_snapshot": {"settings": [{"name": "vm.swappiness", "value": "10"}]}}
    result = run(host, wanted)
    assert (result["rows"][0]["status"], result["rows"][0]["after"]) == ("clamped", "5")
    assert (result["changed"], result["failed"]) == (True, True)
    assert run(host, wanted)["changed"] is False


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"sysctl_snapshot": {}}, "sysctl_snapshot: state applied needs settings"),
        ({"sysctl_snapshot": {"names": ["vm.swappiness"]}}, "needs settings"),
        ({"pcie_maxreadreq": {"value": 4096}}, "needs devices or vendor"),
        ({"pcie_maxreadreq": {"vendor": "0x10de"}}, "needs value"),
        ({"pcie_maxreadreq": {"vendor": "0x10de", "value": 3000}}, "cannot be 3000 bytes"),
        ({"cpuidle_state": {}}, "needs max_exit_latency_us or names"),
        ({"cpuidle_state": {"names": []}}, "needs max_exit_latency_us or names"),
        ({"cpuidle_state": {"names": ["C1"]}}, "C1 is never disabled"),
        ({"cpuidle_state": {"max_exit_latency_us": -1}}, "cannot be -1"),
        ({"kernel_module": {"modules": []}}, "needs modules"),
        (
            {
                "kernel_module": {
                    "modules": [{"name": "a-b", "requires": None}, {"name": "a_b", "requires": None}]
                }
            },
            "twice",
        ),
        ({"sysctl_snapshot": {"settings": [{"name": "x", "value": "1"}]}}, "is not a sysctl name"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    host: SmallHost, sections: dict[str, Any], word: str
) -> None:
    before = manifest(host.root)
    # A good section before the bad one must not have been written either.
    good = {"cpuidle_state": {"max_exit_latency_us": 2}} if "cpuidle_state" not in sections else {}
    with pytest.raises(tuner.CannotStart, match=word):
        run(host, {**good, **sections})
    assert changed_paths(before, manifest(host.root)) == []
    assert not host.state_root.exists()


@pytest.mark.parametrize("section", ["cpuidle_state", "pcie_maxreadreq", "sysctl_snapshot"])
def test_an_empty_list_restores_everything_like_no_list(host: SmallHost, section: str) -> None:
    option = {"cpuidle_state": "names", "pcie_maxreadreq": "devices", "sysctl_snapshot": "names"}[section]
    run(host, {section: WANTED[section]})
    result = run(host, {section: {option: []}}, state="restored")
    assert result["recorded"] == {}
    assert len(ids(result, "changed")) > 1


# Across a reboot


def reboot(host: SmallHost, boot: str) -> None:
    path = host.root / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{boot}\n")


def test_another_boots_values_are_not_written_unless_told(host: SmallHost) -> None:
    reboot(host, "1111")
    before = manifest(host.root)
    run(host, WANTED)
    reboot(host, "2222")
    for check in (True, False):
        with pytest.raises(tuner.CannotStart, match=r"another boot \(1111, this is 2222\).*across_boot"):
            run(host, ALL_SECTIONS, check, state="restored")
    result = run(host, ALL_SECTIONS, state="restored", across_boot=True)
    assert (result["boot_id"], result["failed"], result["recorded"]) == ("1111", False, {})
    reboot(host, "1111")
    assert changed_paths(before, manifest(host.root)) == []


def test_a_new_boot_has_a_journal_of_its_own(host: SmallHost) -> None:
    reboot(host, "1111")
    run(host, WANTED)
    host.sysctl("vm.swappiness").write_text("33\n")
    reboot(host, "2222")
    assert run(host, WANTED)["recorded"]["sysctl:vm.swappiness"] == "33"
    run(host, ALL_SECTIONS, state="restored")
    assert host.sysctl("vm.swappiness").read_text() == "33\n"
    assert [path.name for path in (host.state_root / "journal").glob("*.json")] == ["1111.json"]
