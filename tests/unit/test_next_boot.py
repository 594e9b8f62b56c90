# SPDX-License-Identifier: GPL-3.0-or-later
"""What the next boot makes of our files and everybody else's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_tuning import next_boot, persist
from gpu_tuning.persist_places import Places
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.persisted import PersistedHost, policy, section

SWAPPINESS = "at_boot:sysctl:vm.swappiness"
BUFFER = "at_boot:sysctl:net.core.rmem_max"


@pytest.fixture
def host(memory_path: Path) -> PersistedHost:
    """A host with no more than the files that the facts are made of."""
    host = PersistedHost(memory_path)
    host.write("proc/sys/vm/swappiness", "60\n")
    host.write("proc/sys/net/core/rmem_max", "212992\n")
    for tree in ("sys", "etc"):
        (memory_path / tree).mkdir()
    return host


def persisted(host: PersistedHost, **changed: object) -> dict[str, dict[str, object]]:
    only_files = {"pcie_maxreadreq": None, "cpuidle_state": None, "kernel_module": None, **changed}
    return host.rows(persist.PERSISTED, policy(**only_files))


@pytest.mark.parametrize(
    ("files", "winner"),
    [
        ({"etc/sysctl.d/99-local.conf": "# x\nvm.swappiness = 60\n"}, "etc/sysctl.d/99-local.conf:2"),
        ({"etc/sysctl.d/99-local.conf": "vm/swappiness=60\n"}, "etc/sysctl.d/99-local.conf:1"),
        ({"usr/lib/sysctl.d/95-vendor.conf": "-vm.swappiness = 60\n"}, "usr/lib/sysctl.d/95-vendor.conf:1"),
        ({"run/sysctl.d/91-a.conf": "vm.swappiness = 10\nvm.swappiness = 60\n"}, "run/sysctl.d/91-a.conf:2"),
    ],
)
def test_another_file_that_wins_is_named_with_its_line(
    host: PersistedHost, files: dict[str, str], winner: str
) -> None:
    for path, text in files.items():
        host.write(path, text)
    row = persisted(host)[SWAPPINESS]
    assert (row["status"], row["after"]) == ("overridden", "60")
    assert str(host.root / winner) in str(row["reason"])


@pytest.mark.parametrize(
    "files",
    [
        {"etc/sysctl.d/10-early.conf": "vm.swappiness = 60\n"},
        {"etc/sysctl.d/99-note.txt": "vm.swappiness = 60\n"},
        {"usr/lib/sysctl.d/90-gpu-tuning.conf": "vm.swappiness = 60\n"},
        {"etc/sysctl.d/99-glob.conf": "vm.swap* = 60\n"},
        {"etc/sysctl.conf": "vm.swappiness = 60\n"},
        {"usr/lib/sysctl.d/99-x.conf": "vm.swappiness = 60\n", "etc/sysctl.d/99-x.conf": "\n"},
        {"etc/sysctl.d/99-same.conf": "vm.swappiness = 10\n"},
    ],
    ids=["earlier", "no conf", "masked by ours", "glob", "sysctl.conf unread", "masked", "same value"],
)
def test_a_file_that_does_not_win_is_no_conflict(host: PersistedHost, files: dict[str, str]) -> None:
    for path, text in files.items():
        host.write(path, text)
    assert persisted(host)[SWAPPINESS]["status"] == "ok"


def test_a_minimum_that_another_file_exceeds_is_left_to_it(host: PersistedHost) -> None:
    host.write("etc/sysctl.d/50-site.conf", "net.core.rmem_max = 33554432\n")
    row = persisted(host)[BUFFER]
    assert (row["status"], row["after"]) == ("ok", "33554432")
    assert "rmem_max" not in host.read("etc/sysctl.d/90-gpu-tuning.conf")


def test_a_minimum_that_another_file_misses_is_overridden(host: PersistedHost) -> None:
    host.write("etc/sysctl.d/95-site.conf", "net.core.rmem_max = 4096\n")
    assert persisted(host)[BUFFER]["status"] == "overridden"


def tuned(host: PersistedHost, main: str, starts: bool = True) -> None:
    host.write("etc/tuned/active_profile", "site\n")
    host.write("etc/tuned/tuned-main.conf", main)
    host.write("etc/tuned/site/tuned.conf", "[main]\ninclude=base\n[vm]\ntransparent_hugepages=never\n")
    host.write("usr/lib/tuned/base/tuned.conf", "# ours\n[sysctl]\nvm.swappiness = 1\n")
    if starts:
        host.write("etc/systemd/system/multi-user.target.wants/tuned.service", "")


def test_tuned_without_reapply_overrides_by_an_included_profile(host: PersistedHost) -> None:
    tuned(host, "reapply_sysctl = 0\n")
    row = persisted(host)[SWAPPINESS]
    assert row["status"] == "overridden"
    assert f"{host.root}/usr/lib/tuned/base/tuned.conf:3" in str(row["reason"])


@pytest.mark.parametrize(
    ("main", "starts"), [("reapply_sysctl = 1\n", True), ("", True), ("reapply_sysctl = no\n", False)]
)
def test_tuned_that_lets_sysctl_d_win_or_does_not_start_is_named_only(
    host: PersistedHost, main: str, starts: bool
) -> None:
    tuned(host, main, starts)
    result = host.run(persist.PERSISTED, policy(pcie_maxreadreq=None, cpuidle_state=None, kernel_module=None))
    assert {row["id"]: row["status"] for row in result["rows"]}[SWAPPINESS] == "ok"
    assert any(
        sentence.startswith("tuned ") and "profile site" in sentence for sentence in result["other_tuners"]
    )


def test_files_of_proxmox_and_of_cloud_images_are_named(host: PersistedHost) -> None:
    host.write("usr/lib/sysctl.d/10-pve.conf", "fs.aio-max-nr = 1048576\n")
    host.write("etc/sysctl.d/99-cloudimg-ipv6.conf", "net.ipv6.conf.all.use_tempaddr = 0\n")
    host.write("etc/sysctl.d/20-site.conf", "vm.swappiness = 30\n")
    result = host.run(persist.PERSISTED, policy(pcie_maxreadreq=None, cpuidle_state=None, kernel_module=None))
    named = "\n".join(result["other_tuners"])
    assert "10-pve.conf of Proxmox" in named
    assert "99-cloudimg-ipv6.conf of a cloud image" in named
    assert "20-site.conf sets vm.swappiness = 30 (line 1)" in named


def test_a_blacklisted_module_is_overridden(host: PersistedHost) -> None:
    host.write("sys/module/nvidia_peermem/initstate", "live\n")
    host.write("usr/lib/modprobe.d/site.conf", "# no\nblacklist nvidia-peermem\n")
    module = section("kernel_module", modules=[{"name": "nvidia-peermem", "requires": []}])
    rows = persisted(host, kernel_module=module)
    assert "nvidia_peermem\n" in host.read("etc/modules-load.d/gpu-tuning.conf")
    assert rows["in_file:module:nvidia_peermem"]["status"] == "ok"
    assert rows["at_boot:module:nvidia_peermem"]["status"] == "overridden"
    assert "site.conf:2 blacklists nvidia_peermem" in str(rows["at_boot:module:nvidia_peermem"]["reason"])


NAMES = st.sampled_from(["10-a.conf", "90-gpu-tuning.conf", "90-h.conf", "99-z.conf", "99-sysctl.conf"])
FOLDERS = st.sampled_from(["etc", "run", "usr/local/lib", "usr/lib"])
LINES = st.lists(
    st.sampled_from(
        ["vm.swappiness = 1", "vm/swappiness=2", "-vm.swappiness = 3", "# vm.swappiness = 4", "", "vm.x = 5"]
    ),
    max_size=4,
)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this machine")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(st.tuples(FOLDERS, NAMES), LINES, max_size=5))
def test_systemd_reads_the_same_files_in_the_same_order(
    memory_path: Path, files: dict[tuple[str, str], list[str]]
) -> None:
    shutil.rmtree(memory_path / "host", ignore_errors=True)
    host = PersistedHost(memory_path / "host")
    host.root.mkdir()
    for (folder, name), lines in files.items():
        host.write(f"{folder}/sysctl.d/{name}", "\n".join(lines) + "\n")
    command = ["systemd-analyze", f"--root={host.root}", "cat-config", "sysctl.d"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = None
    for line in said.splitlines():
        key, equals, value = line.partition("=")
        if equals and line[0] not in "#;" and key.strip().lstrip("-").replace("/", ".") == "vm.swappiness":
            theirs = value.strip()
    places = Places.of(host.options("verified"))
    found = [each for each in next_boot._assignments(places, None) if each.path == "vm/swappiness"]
    assert (found[-1].value if found else None) == theirs
