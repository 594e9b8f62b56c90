# SPDX-License-Identifier: GPL-3.0-or-later
"""Persist, reboot, verify and unpersist on the recorded host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu_tuning import journal, owned_files, persist, tuner
from support.persisted import MRRS, SYSCTLS, PersistedHost, policy, section
from support.tree import changed_paths, make_recorded_host, manifest

GPU = "0000:01:00.0"
DROP_IN = "etc/sysctl.d/90-gpu-tuning.conf"


@pytest.fixture
def host(memory_path: Path) -> PersistedHost:
    return PersistedHost(make_recorded_host(memory_path / "host"))


def outside_state(host: PersistedHost) -> dict[str, Any]:
    """Return the tree without the journal, which a rollback needs."""
    return {path: entry for path, entry in manifest(host.root).items() if not path.startswith("state")}


def test_runtime_file_and_next_boot_are_three_facts(host: PersistedHost) -> None:
    rows = host.rows(persist.PERSISTED)
    for kind in ("", "in_file:", "at_boot:"):
        assert rows[f"{kind}sysctl:vm.swappiness"]["after"] == "10"
    assert rows["sysctl:vm.swappiness"]["before"] == "60"
    assert host.sysctl("vm.swappiness") == "10"
    assert "vm.swappiness = 10\n" in host.read(DROP_IN)


def test_second_run_changes_nothing(host: PersistedHost) -> None:
    assert host.run(persist.PERSISTED)["changed"]
    before = manifest(host.root)
    assert not host.run(persist.PERSISTED)["changed"]
    assert changed_paths(before, manifest(host.root)) == []


def test_check_mode_writes_nothing_and_predicts_what_changes(host: PersistedHost) -> None:
    host.write("etc/sysctl.d/99-site.conf", "vm.swappiness = 30\n")
    before = manifest(host.root)
    predicted = host.run(persist.PERSISTED, check=True)
    assert changed_paths(before, manifest(host.root)) == []
    done = host.run(persist.PERSISTED)
    would = {row["id"] for row in predicted["rows"] if row["status"] == "would_change"}
    assert would == {row["id"] for row in done["rows"] if row["status"] == "changed"}
    boot = {row["id"]: row["status"] for row in predicted["rows"] if row["kind"] in ("in_file", "at_boot")}
    assert boot == {row["id"]: row["status"] for row in done["rows"] if row["kind"] in ("in_file", "at_boot")}
    assert boot["at_boot:sysctl:vm.swappiness"] == "overridden"


def test_unpersist_gives_back_every_byte_but_the_journal(host: PersistedHost) -> None:
    host.write("etc/modules-load.d/site.conf", "loop\n")
    host.run(persist.PERSISTED, policy(cpuidle_state=None))
    host.run(persist.PERSISTED)
    values = {path: entry for path, entry in outside_state(host).items() if path.startswith(("sys", "proc"))}
    result = host.run(persist.REMOVED, {})
    assert result["changed"]
    assert not result["failed"]
    after = outside_state(host)
    assert {path: each for path, each in after.items() if path.startswith(("sys", "proc"))} == values
    host.reboot()
    fresh = PersistedHost(make_recorded_host(host.root.parent / "fresh"))
    fresh.write("etc/modules-load.d/site.conf", "loop\n")
    assert changed_paths(manifest(fresh.root), outside_state(host)) == []


def test_unpersist_twice_changes_nothing(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.run(persist.REMOVED, {})
    assert not host.run(persist.REMOVED, {})["changed"]


def test_unpersist_takes_the_textfile_too(host: PersistedHost) -> None:
    textfile = host.root / "var/lib/prometheus/node-exporter/gpu_tuning.prom"
    textfile.parent.mkdir(parents=True)
    host.run(persist.PERSISTED)
    assert host.agent("check").returncode == 0
    assert textfile.exists()
    host.run(persist.REMOVED, {})
    assert not textfile.exists()


def test_the_archive_applies_the_policy_after_a_reboot(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.reboot()
    assert host.max_read_request(GPU) == 512
    applied = host.agent("apply")
    assert (applied.returncode, applied.stderr) == (0, "")
    assert host.max_read_request(GPU) == 4096
    assert host.read("sys/devices/system/cpu/cpu127/cpuidle/state2/disable").strip() == "1"
    # The sysctls are systemd-sysctl's to set, from the drop-in.
    assert host.sysctl("vm.swappiness") == "60"


def test_the_archive_applies_to_one_device_that_was_bound(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.reboot()
    assert host.agent("apply", "--device", GPU).returncode == 0
    assert host.max_read_request(GPU) == 4096
    assert host.max_read_request("0000:11:00.0") == 512
    assert host.read("sys/devices/system/cpu/cpu0/cpuidle/state2/disable").strip() == "0"


def test_what_the_archive_set_at_boot_can_be_rolled_back(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    (host.root / "state/journal/no-boot-id.json").unlink()
    host.reboot()
    assert host.agent("apply").returncode == 0
    common = {**host.options("restored"), "state": tuner.RESTORED}
    restored = tuner.run({"pcie_maxreadreq": section("pcie_maxreadreq")}, common, False)
    assert not restored["failed"]
    assert host.max_read_request(GPU) == 512


def test_the_archive_stays_out_of_a_running_plays_way(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.reboot()
    with journal.Journal(str(host.root / "state"), "no-boot-id").locked():
        busy = host.agent("apply")
    assert busy.returncode == 75
    assert "another run" in busy.stderr
    assert host.max_read_request(GPU) == 512


def test_verify_of_the_archive_says_what_differs_and_by_its_exit_status(host: PersistedHost) -> None:
    host.run(persist.PERSISTED, policy(kernel_module=None))
    assert host.agent("verify").returncode == 0
    host.write("proc/sys/vm/swappiness", "60\n")
    host.write("etc/sysctl.d/99-local.conf", "# ours\nnet.core.rmem_max = 212992\n")
    drifted = host.agent("verify")
    assert drifted.returncode == 1
    assert "sysctl:vm.swappiness: overridden: reads 60, the policy asks for 10" in drifted.stderr
    assert "99-local.conf:2 sets 212992" in drifted.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "usage"),
        (("apply", "--device"), "usage"),
        (("verify", "--device", GPU), "usage"),
        (("undo",), "usage"),
        (("--policy", "/nonexistent", "verify"), "cannot read /nonexistent"),
    ],
)
def test_the_archive_refuses_what_it_cannot_do(
    host: PersistedHost, arguments: tuple[str, ...], said: str
) -> None:
    host.run(persist.PERSISTED)
    refused = host.agent(*arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1}'])
def test_the_archive_refuses_a_damaged_policy(host: PersistedHost, text: str) -> None:
    host.run(persist.PERSISTED)
    host.write("etc/gpu-tuning/policy.json", text)
    refused = host.agent("check")
    assert refused.returncode == 2
    assert "policy.json" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_foreign_file_under_our_name_stays_and_nothing_is_written(host: PersistedHost) -> None:
    host.write(DROP_IN, "vm.swappiness = 1\n")
    before = manifest(host.root)
    with pytest.raises(
        tuner.CannotStart, match=r"90-gpu-tuning\.conf is there and was not made by this tool"
    ):
        host.run(persist.PERSISTED)
    assert changed_paths(before, manifest(host.root)) == []


def test_unpersist_leaves_a_foreign_file_and_takes_the_rest(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.write(DROP_IN, "vm.swappiness = 1\n")
    result = host.run(persist.REMOVED, {})
    assert result["failed"]
    assert host.read(DROP_IN) == "vm.swappiness = 1\n"
    assert not (host.root / "etc/gpu-tuning").exists()


def test_a_masked_unit_is_not_unmasked(host: PersistedHost) -> None:
    unit = host.root / "etc/systemd/system/gpu-tuning-apply.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    with pytest.raises(tuner.CannotStart, match=r"gpu-tuning-apply\.service"):
        host.run(persist.PERSISTED)
    assert os.readlink(unit) == "/dev/null"


def test_what_the_kernel_refuses_is_not_written_to_a_file(host: PersistedHost) -> None:
    gone = [*SYSCTLS, {"name": "kernel.no_such_key", "value": "1", "match": "exact"}]
    rows = host.rows(persist.PERSISTED, policy(sysctl_snapshot=section("sysctl_snapshot", settings=gone)))
    assert "no_such_key" not in host.read(DROP_IN)
    assert rows["at_boot:sysctl:kernel.no_such_key"]["status"] == "not_applicable"
    assert "not persisted: unsupported" in rows["at_boot:sysctl:kernel.no_such_key"]["reason"]


def test_a_module_that_does_not_apply_is_not_loaded_at_boot(host: PersistedHost) -> None:
    rows = host.rows(persist.PERSISTED)
    assert rows["module:nvidia_peermem"]["status"] == "not_applicable"
    assert not (host.root / "etc/modules-load.d").exists()


def test_a_fix_that_left_the_policy_leaves_the_host(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    host.run(persist.PERSISTED, policy(pcie_maxreadreq=None, cpuidle_state=None))
    assert not (host.root / "etc/udev/rules.d/90-gpu-tuning.rules").exists()
    assert not (host.root / "etc/systemd/system/gpu-tuning-apply.service").exists()
    assert (host.root / "etc/systemd/system/gpu-tuning-check.timer").exists()


def test_verify_of_another_policy_says_what_the_host_has(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    newer = policy(pcie_maxreadreq=section("pcie_maxreadreq", **{**MRRS, "value": 2048}))
    rows = host.rows(persist.VERIFIED, newer)
    assert rows[f"pcie_mrrs:{GPU}"]["status"] == "overridden"
    row = rows["in_file:pcie_maxreadreq"]
    assert row["status"] == "overridden"
    assert "value is 4096, not 2048" in row["reason"]


def test_verify_writes_nothing(host: PersistedHost) -> None:
    host.run(persist.PERSISTED)
    before = manifest(host.root)
    host.run(persist.VERIFIED)
    assert changed_paths(before, manifest(host.root)) == []


def test_verify_of_a_host_that_is_not_persisted_says_so(host: PersistedHost) -> None:
    rows = host.rows(persist.VERIFIED)
    assert rows["at_boot:policy"]["status"] == "not_applicable"
    assert rows["sysctl:vm.swappiness"]["status"] == "overridden"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("usr/local/lib/gpu-tuning/gpu-tuning.pyz", "is not there"),
        ("etc/systemd/system/gpu-tuning-apply.service", "is not there"),
        ("etc/systemd/system/multi-user.target.wants/gpu-tuning-apply.service", "is not enabled"),
    ],
)
def test_verify_sees_that_the_next_boot_will_not_apply(host: PersistedHost, gone: str, said: str) -> None:
    host.run(persist.PERSISTED)
    (host.root / gone).unlink()
    row = host.rows(persist.VERIFIED)["at_boot:cpuidle_state"]
    assert row["status"] == "failed"
    assert said in row["reason"]


def test_a_python_that_is_too_old_or_absent_is_refused_before_anything_is_written(
    host: PersistedHost,
) -> None:
    before = manifest(host.root)
    for python in ("/nonexistent/python", "/bin/false"):
        with pytest.raises(tuner.CannotStart, match="does not run"):
            persist.run(policy(), {**host.options(persist.PERSISTED), "python": python}, False)
    old = host.root.parent / "python3.6"
    old.write_text("#!/bin/sh\necho 3 6 cpython-36\n")
    old.chmod(0o755)
    with pytest.raises(tuner.CannotStart, match=r"Python 3\.6; the units need 3\.9"):
        persist.run(policy(), {**host.options(persist.PERSISTED), "python": str(old)}, False)
    assert changed_paths(before, manifest(host.root)) == []


def test_killed_between_any_two_files_a_later_run_completes_and_unpersist_cleans(
    host: PersistedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = manifest(host.root)
    real = owned_files.replace_file
    count = 0

    def killed_at(limit: int) -> None:
        def replace(path: str, content: bytes, mode: int = 0o644) -> None:
            nonlocal count
            count += 1
            if count > limit:
                raise KeyboardInterrupt
            real(path, content, mode)

        monkeypatch.setattr(owned_files, "replace_file", replace)

    for limit in range(0, 8, 2):
        count = 0
        killed_at(limit)
        with pytest.raises(KeyboardInterrupt):
            host.run(persist.PERSISTED)
        monkeypatch.setattr(owned_files, "replace_file", real)
        host.run(persist.REMOVED, {})
        changed = changed_paths(whole, manifest(host.root))
        assert [path for path in changed if path.startswith(("etc", "usr"))] == []
    result = host.run(persist.PERSISTED)
    assert not result["failed"]


def test_a_full_disk_fails_each_file_and_leaves_none_half_written(
    host: PersistedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, content: bytes, mode: int = 0o644) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(owned_files, "replace_file", full)
    result = host.run(persist.PERSISTED)
    assert result["failed"]
    rows = {row["id"]: row for row in result["rows"]}
    drop_in = rows[f"owned_file:{host.root / DROP_IN}"]
    assert drop_in["status"] == "failed"
    assert "ENOSPC (No space left on device): it is absent as before" in drop_in["reason"]
    assert not (host.root / DROP_IN).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"check_minutes": 0}, "check_minutes cannot be 0"),
        ({"textfile": "metrics.prom"}, "textfile 'metrics.prom' cannot stand in a systemd unit"),
        ({"state_root": "/var/lib/a b"}, "state_root '/var/lib/a b'"),
        ({"python": "/usr/bin/python3\nExecStart=/bin/x"}, "python"),
        ({"python": "/usr/bin/%h"}, "python"),
    ],
)
def test_what_would_mean_something_else_in_a_unit_is_refused(
    host: PersistedHost, changed: dict[str, Any], said: str
) -> None:
    before = manifest(host.root)
    with pytest.raises(tuner.CannotStart, match=said):
        persist.run(policy(), {**host.options(persist.PERSISTED), **changed}, False)
    assert changed_paths(before, manifest(host.root)) == []


def test_a_textfile_that_moves_is_not_left_behind(host: PersistedHost) -> None:
    for name in ("one", "two"):
        (host.root / name).mkdir()
        persist.run(
            policy(), {**host.options(persist.PERSISTED), "textfile": f"{host.root}/{name}/g.prom"}, False
        )
        assert host.agent("check").returncode == 0
    assert not (host.root / "one/g.prom").exists()
    assert (host.root / "two/g.prom").exists()
