# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole playbook on the recorded 8-GPU host: only the intended bytes change, and all come back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from support.play import REPO, Run, recorded_host_arguments, records, run_playbook
from support.tree import Entry, changed_bits, changed_paths, make_recorded_host, manifest

GPUS = [f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")]
SYSCTLS = {
    "kernel/numa_balancing": b"0\n",
    "kernel/nmi_watchdog": b"0\n",
    "kernel/sched_autogroup_enabled": b"0\n",
    "kernel/perf_event_paranoid": b"1\n",
    "vm/swappiness": b"10\n",
    "vm/dirty_ratio": b"5\n",
    "vm/dirty_background_ratio": b"2\n",
    "net/core/rmem_max": b"16777216\n",
    "net/core/wmem_max": b"16777216\n",
}
APPLY = "Snapshot, apply"
MAX_READ_REQUEST = 0x70  # bits 14:12, in the second byte of Device Control
DEVICE_CONTROL_HIGH = 0x60 + 8 + 1  # PCI Express is at 0x60 in these GPUs


class Host:
    """A recorded host, runs on it, and a scratch folder for its journal and the reports."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root, scratch

    def play(self, playbook: str, *arguments: str) -> Run:
        return run_playbook(
            self.scratch, playbook, *recorded_host_arguments(self.root, self.scratch), *arguments
        )

    def tune(self, *arguments: str) -> Run:
        return self.play("tune.yml", "--tags", "runtime", *arguments)

    def manifest(self) -> dict[str, Entry]:
        return manifest(self.root)

    def result(self) -> dict:
        return json.loads((records(self.scratch)[-1] / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Entry]]:
    """The host that the tests of this file share, and how it was at first."""
    root = make_recorded_host(tmp_path_factory.mktemp("recorded") / "host")
    return root, manifest(root)


@pytest.fixture
def start(pristine: tuple[Path, dict[str, Entry]]) -> dict[str, Entry]:
    return pristine[1]


@pytest.fixture
def host(pristine: tuple[Path, dict[str, Entry]], tmp_path: Path) -> Iterator[Host]:
    """The shared host; what a test changed is put back, so that 16,204 files are written once."""
    root, start = pristine
    yield Host(root, tmp_path)
    for path in changed_paths(start, manifest(root)):
        (root / path).write_bytes(start[path].content)


def intended(path: str) -> bool:
    """Tell whether a path is one that the policy changes."""
    return (
        path.removeprefix("proc/sys/") in SYSCTLS
        or re.fullmatch(r"sys/devices/system/cpu/cpu\d+/cpuidle/state2/disable", path) is not None
        or any(path.endswith(f"/{gpu}/config") for gpu in GPUS)
    )


def test_only_the_intended_bytes_change_and_the_rollback_gives_all_back(
    host: Host, start: dict[str, Entry]
) -> None:
    check = host.tune("--check", "--diff")
    assert check.returncode == 0, check.output
    assert host.manifest() == start
    assert not (host.scratch / "state").exists()
    assert not (host.scratch / "reports").exists()

    real = host.tune()
    assert real.returncode == 0, real.output
    tuned = host.manifest()
    changed = changed_paths(start, tuned)
    assert [path for path in changed if not intended(path)] == []
    assert len(changed) == len(SYSCTLS) + len(GPUS) + 128
    for key, value in SYSCTLS.items():
        assert tuned[f"proc/sys/{key}"].content == value
    for path in changed:
        if path.endswith("/config"):
            assert changed_bits(start[path].content, tuned[path].content) == [(DEVICE_CONTROL_HIGH, 0x70)]
            assert tuned[path].content[DEVICE_CONTROL_HIGH] & MAX_READ_REQUEST == 5 << 4
        if path.endswith("/disable"):
            assert tuned[path].content == b"1\n"
    assert check.ids(APPLY, "would_change") == real.ids(APPLY, "changed")

    second = host.tune()
    assert second.returncode == 0, second.output
    assert second.recap("changed") == 0
    assert host.manifest() == tuned

    back = host.play("playbooks/rollback.yml")
    assert back.returncode == 0, back.output
    assert changed_paths(start, host.manifest()) == []


def test_the_record_is_complete_and_valid(host: Host) -> None:
    run = host.tune()
    (folder,) = records(host.scratch)
    assert sorted(p.name for p in folder.iterdir()) == [
        "after.json",
        "before.json",
        "result.json",
        "system-improve.md",
    ]
    result = host.result()
    jsonschema.validate(
        result,
        json.loads((REPO / "roles/host_tuning/files/result.schema.json").read_text(encoding="utf-8")),
    )
    headline = "9 of 10 fixes applied, 1 not applicable: nvidia_peermem (no RDMA device)"
    assert result["headline"] == headline
    assert (folder / "system-improve.md").read_text(encoding="utf-8").startswith(f"# {headline}\n")
    assert run.summary[0] == headline
    assert run.summary[-1] == f"record: {folder}/system-improve.md"
    assert any("C2 disabled on 128 of 128 CPUs" in line for line in run.summary)
    before = {r["id"]: r["before"] for r in json.loads((folder / "before.json").read_text())["rows"]}
    after = {r["id"]: r["after"] for r in json.loads((folder / "after.json").read_text())["rows"]}
    assert (before["pcie_mrrs:0000:01:00.0"], after["pcie_mrrs:0000:01:00.0"]) == (512, 4096)
    assert (before["cpuidle:cpu127/C2"], after["cpuidle:cpu127/C2"]) == ("enabled", "disabled")
    assert len([row for row in result["rows"] if row["kind"] == "cpuidle"]) == 128


def test_one_module_invocation(host: Host) -> None:
    assert host.tune().module_invocations == 1


def test_a_report_is_shown_as_lines_of_text_and_its_rows_are_not(host: Host) -> None:
    run = host.tune()
    assert "\nchanged: [localhost]\n    9 of 10 fixes applied, 1 not applicable" in run.output
    assert '"rows"' not in run.output
    assert '"rows"' in host.tune("-v").output


def test_gpus_that_cannot_be_set_do_not_stop_the_others(tmp_path: Path) -> None:
    silent, unreadable = GPUS[2], GPUS[5]
    faults = ("--fault", f"ff={silent}", "--fault", f"read64={unreadable}")
    host = Host(make_recorded_host(tmp_path / "host", *faults), tmp_path)
    start = host.manifest()
    run = host.tune()
    assert run.returncode != 0
    rows = {row["target"]: row for row in host.result()["rows"] if row["kind"] == "pcie_mrrs"}
    assert "does not respond" in rows[silent]["reason"]
    assert "cannot read beyond 64 bytes without privilege" in rows[unreadable]["reason"]
    assert {rows[gpu]["status"] for gpu in GPUS if gpu not in (silent, unreadable)} == {"changed"}
    assert "\nfailed: [localhost]\n" in run.output
    for gpu in (silent, unreadable):
        assert rows[gpu]["status"] == "failed"
        failed = next(line for line in run.summary if line.startswith(f"pcie_mrrs:{gpu}: failed: "))
        assert f"\n    {failed}\n" in run.output
    assert '"rows"' not in run.output
    assert '"rows"' in host.tune("-v").output
    assert host.play("playbooks/rollback.yml").returncode == 0
    assert changed_paths(start, host.manifest()) == []


def test_gpus_in_other_states_are_set_all_the_same(tmp_path: Path) -> None:
    states = ("d3", "x8", "gen4", "mps128", "mrrs128", "mrrs4096")
    faults = [word for state, gpu in zip(states, GPUS) for word in ("--fault", f"{state}={gpu}")]
    host = Host(make_recorded_host(tmp_path / "host", *faults), tmp_path)
    start = host.manifest()
    run = host.tune()
    assert run.returncode == 0, run.output
    rows = {row["target"]: row for row in run.rows(APPLY) if row["kind"] == "pcie_mrrs"}
    for state, gpu in zip(states, GPUS):
        expected = "ok" if state == "mrrs4096" else "changed"
        assert (rows[gpu]["status"], rows[gpu]["after"]) == (expected, 4096), state
    end = host.manifest()
    configs = [path for path in changed_paths(start, end) if path.endswith("/config")]
    assert len(configs) == len(GPUS) - 1
    for path in configs:
        ((offset, mask),) = changed_bits(start[path].content, end[path].content)
        assert offset == DEVICE_CONTROL_HIGH
        assert mask & ~MAX_READ_REQUEST == 0
    assert host.play("playbooks/rollback.yml").returncode == 0
    assert changed_paths(start, host.manifest()) == []


@pytest.mark.parametrize(
    ("tag", "part"), [("sysctl", "proc/sys/"), ("pcie", "/config"), ("cpuidle", "/cpuidle/")]
)
def test_a_tag_chooses_one_kind(host: Host, start: dict[str, Entry], tag: str, part: str) -> None:
    run = host.play("tune.yml", "--tags", tag)
    assert run.returncode == 0, run.output
    changed = changed_paths(start, host.manifest())
    assert changed
    assert [path for path in changed if part not in path] == []


def test_a_skipped_tag_leaves_one_kind_alone(host: Host, start: dict[str, Entry]) -> None:
    run = host.tune("--skip-tags", "cpuidle")
    assert run.returncode == 0, run.output
    changed = changed_paths(start, host.manifest())
    assert len(changed) == len(SYSCTLS) + len(GPUS)
    assert run.summary[0] == "8 of 9 fixes applied, 1 not applicable: nvidia_peermem (no RDMA device)"


def test_verify_alone_writes_nothing_and_fails_on_an_untuned_host(
    host: Host, start: dict[str, Entry]
) -> None:
    run = host.play("tune.yml", "--tags", "verify")
    assert run.returncode != 0
    assert "0 of 10 fixes applied" in run.summary[0]
    assert host.manifest() == start
    assert not (host.scratch / "state").exists()


def test_overrides_change_drop_and_add(host: Host) -> None:
    overrides = {
        "host_tuning_overrides": {
            "swappiness": {"sysctl_snapshot": {"vm.swappiness": 1}},
            "max_read_request": None,
            "busy_polling": {"sysctl_snapshot": {"net.core.busy_poll": 50}, "why": "Our gateway polls."},
        }
    }
    start = host.manifest()
    run = host.tune("--extra-vars", json.dumps(overrides))
    assert run.returncode == 0, run.output
    tuned = host.manifest()
    assert tuned["proc/sys/vm/swappiness"].content == b"1\n"
    assert tuned["proc/sys/net/core/busy_poll"].content == b"50\n"
    assert not any(path.endswith("/config") for path in changed_paths(start, tuned))
    assert run.summary[0].startswith("9 of 10 fixes applied")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"swappiness": {"sysctl": {"vm.swappiness": 1}}}, "which is none of"),
        ({"mine": {"sysctl_snapshot": {"vm.swappiness": 1}}}, "set by both swappiness and mine"),
        ({"mine": {"sysctl_snapshot": {"vm..x": 1}}}, "is not a sysctl name"),
        (
            {"max_read_request": {"pcie_maxreadreq": {"value": 3000}}},
            "allowed are 128, 256, 512, 1024, 2048, 4096",
        ),
        ({"max_read_request": {"pcie_maxreadreq": {"vendor": 4318}}}, "in quotes"),
        (
            {"deep_idle_states": {"cpuidle_state": {"names": ["C1"], "max_exit_latency_us": None}}},
            "never disabled",
        ),
        ({"deep_idle_states": {"cpuidle_state": {"names": ["C2"]}}}, "mutually exclusive"),
    ],
)
def test_bad_input_is_refused_before_the_first_write(
    host: Host, start: dict[str, Entry], overrides: dict, words: str
) -> None:
    run = host.tune("--extra-vars", json.dumps({"host_tuning_overrides": overrides}))
    assert run.returncode != 0
    assert words in re.sub(r"\s+", " ", run.output)
    assert host.manifest() == start
    assert not (host.scratch / "state").exists()


def test_a_reboot_makes_the_rollback_refuse_until_told(tmp_path: Path) -> None:
    first, second = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
    host = Host(make_recorded_host(tmp_path / "host", "--boot-id", first), tmp_path)
    assert host.tune().returncode == 0
    tuned = host.manifest()
    (host.root / "proc/sys/kernel/random/boot_id").write_text(second + "\n", encoding="ascii")
    refused = host.play("playbooks/rollback.yml")
    assert refused.returncode != 0
    assert "from another boot" in refused.output
    assert len(changed_paths(tuned, host.manifest())) == 1
    told = host.play("playbooks/rollback.yml", "--extra-vars", "rollback_across_boot=true")
    assert told.returncode == 0, told.output
    assert (host.root / "proc/sys/vm/swappiness").read_text() == "60\n"


def test_an_unknown_kind_to_be_lenient_with_is_refused(host: Host, start: dict[str, Entry]) -> None:
    run = host.tune("--extra-vars", json.dumps({"host_tuning_lenient": ["sysctls"]}))
    assert run.returncode != 0
    assert "sysctls is no kind of row" in " ".join(run.output.split())
    assert host.manifest() == start


@pytest.mark.parametrize("kind", ["pcie_mrrs", "all"])
def test_a_lenient_kind_is_reported_and_does_not_fail(tmp_path: Path, kind: str) -> None:
    host = Host(make_recorded_host(tmp_path / "host", "--fault", f"ff={GPUS[2]}"), tmp_path)
    run = host.tune("--extra-vars", json.dumps({"host_tuning_lenient": [kind]}))
    assert run.returncode == 0, run.output
    assert "1 failed: max_read_request" in run.summary[0]


def test_roots_may_be_relative_to_where_the_play_is_started(
    host: Host, start: dict[str, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(host.root))
    roots = {
        "procfs_root": "proc",
        "sysfs_root": "sys",
        "state_root": "../state",
        "reports_root": str(host.scratch),
    }
    run = run_playbook(host.scratch, "tune.yml", "--tags=sysctl", *(f"-e{n}={p}" for n, p in roots.items()))
    assert run.returncode == 0, run.output
    assert len(changed_paths(start, host.manifest())) == len(SYSCTLS)
