# SPDX-License-Identifier: GPL-3.0-or-later
"""Which file and line wins: sysctl.d as systemd-sysctl reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_tuning import sysctl_d


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        homes = (str(root / name) for name in ("etc", "run", "usr", "lib"))
        self.folders = sysctl_d.directories(*homes)

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def winner(self, key: str) -> tuple[str, int, str] | None:
        found = sysctl_d.winner(sysctl_d.read(self.folders)[0], key)
        return found and (str(Path(found.file).relative_to(self.root)), found.line, found.value)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_files_are_ordered_by_name_over_all_directories(tree: Tree) -> None:
    tree.put("etc/sysctl.d/10-a.conf", "vm.swappiness=1\n")
    tree.put("usr/lib/sysctl.d/90-vendor.conf", "\n# text\nvm.swappiness = 60\n")
    assert tree.winner("vm.swappiness") == ("usr/lib/sysctl.d/90-vendor.conf", 3, "60")


def test_a_file_masks_those_of_its_name_further_down(tree: Tree) -> None:
    tree.put("etc/sysctl.d/50-x.conf", "kernel.sysrq=1\n")
    tree.put("usr/lib/sysctl.d/50-x.conf", "vm.swappiness=60\n")
    assert tree.winner("vm.swappiness") is None
    assert tree.winner("kernel.sysrq") == ("etc/sysctl.d/50-x.conf", 1, "1")


def test_a_link_to_dev_null_masks_and_a_dangling_one_does_not(tree: Tree) -> None:
    tree.put("usr/lib/sysctl.d/50-x.conf", "vm.swappiness=60\n")
    tree.put("etc/sysctl.d/.keep", "")
    link = tree.root / "etc/sysctl.d/50-x.conf"
    link.symlink_to("nowhere")
    assert tree.winner("vm.swappiness") == ("usr/lib/sysctl.d/50-x.conf", 1, "60")
    link.unlink()
    link.symlink_to("/dev/null")
    assert tree.winner("vm.swappiness") is None


def test_run_masks_usr_and_local_comes_before_usr_lib(tree: Tree) -> None:
    tree.put("usr/lib/sysctl.d/a.conf", "vm.swappiness=3\n")
    tree.put("usr/local/lib/sysctl.d/a.conf", "vm.swappiness=2\n")
    assert tree.winner("vm.swappiness") == ("usr/local/lib/sysctl.d/a.conf", 1, "2")
    tree.put("run/sysctl.d/a.conf", "vm.swappiness=1\n")
    assert tree.winner("vm.swappiness") == ("run/sysctl.d/a.conf", 1, "1")


def test_sysctl_conf_counts_through_a_link_only(tree: Tree) -> None:
    tree.put("etc/sysctl.conf", "vm.swappiness=7\n")
    assert tree.winner("vm.swappiness") is None
    tree.put("etc/sysctl.d/.keep", "")
    (tree.root / "etc/sysctl.d/99-sysctl.conf").symlink_to("../sysctl.conf")
    assert tree.winner("vm.swappiness") == ("etc/sysctl.d/99-sysctl.conf", 1, "7")


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("vm/swappiness", "vm.swappiness"),
        ("-vm.swappiness", "vm/swappiness"),
        ("  - vm.swappiness ", "vm.swappiness"),
        ("net.ipv4.conf.eth0/100.rp_filter", "net/ipv4/conf/eth0.100/rp_filter"),
    ],
)
def test_the_forms_of_a_key_are_one_key(tree: Tree, written: str, asked: str) -> None:
    tree.put("etc/sysctl.d/a.conf", f"{written}= 5 \n")
    assert tree.winner(asked) == ("etc/sysctl.d/a.conf", 1, "5")


def test_a_plain_key_beats_every_pattern_wherever_it_stands(tree: Tree) -> None:
    tree.put("etc/sysctl.d/10-plain.conf", "net.ipv4.conf.all.rp_filter=1\n")
    tree.put("etc/sysctl.d/90-glob.conf", "net.ipv4.conf.*.rp_filter=2\n")
    assert tree.winner("net.ipv4.conf.all.rp_filter") == ("etc/sysctl.d/10-plain.conf", 1, "1")
    assert tree.winner("net.ipv4.conf.eth0.rp_filter") == ("etc/sysctl.d/90-glob.conf", 1, "2")
    assert tree.winner("net.ipv4.conf.a.b.rp_filter") is None


def test_an_excluded_key_is_set_by_no_pattern(tree: Tree) -> None:
    tree.put("etc/sysctl.d/a.conf", "net.ipv4.conf.*.rp_filter=2\n-net.ipv4.conf.hub0.rp_filter\n")
    assert tree.winner("net.ipv4.conf.hub0.rp_filter") is None


def test_lines_that_mean_nothing_set_nothing(tree: Tree) -> None:
    tree.put("etc/sysctl.d/a.conf", "; vm.swappiness=1\n#vm.swappiness=1\nvm.swappiness\n=3\n\n")
    assert tree.winner("vm.swappiness") is None
    tree.put("etc/sysctl.d/b.txt", "vm.swappiness=1\n")
    assert tree.winner("vm.swappiness") is None


def test_an_unreadable_file_is_named(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.put("etc/sysctl.d/a.conf", "vm.swappiness=1\n")

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert sysctl_d.read(tree.folders) == ([], [str(tree.root / "etc/sysctl.d/a.conf")])


def test_systemd_reads_the_same_files_in_the_same_order(tree: Tree) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    tree.put("etc/sysctl.d/90-b.conf", "vm.swappiness=1\n")
    tree.put("etc/sysctl.d/50-x.conf", "vm.swappiness=2\n")
    tree.put("usr/lib/sysctl.d/50-x.conf", "vm.swappiness=3\n")
    tree.put("usr/lib/sysctl.d/60-y.conf", "vm.swappiness=4\n")
    tree.put("run/sysctl.d/70-z.conf", "vm.swappiness=5\n")
    command = [analyze, f"--root={tree.root}", "cat-config", "sysctl.d"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"systemd-analyze cat-config does not work here: {done.stderr.strip()}")
    named = [line[2:] for line in done.stdout.splitlines() if line.startswith("# /")]
    assert named == sysctl_d.config_files(tree.folders)
