#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long an audit takes, and how many modules it runs on a host.

On the recorded machine, over ssh to an sshd of this benchmark's own on loopback: an empty play, Ansible's own
fact gathering, and the audit, interleaved; then the audit of several hosts at once. The medians are printed.
Needs sshd; needs no root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tuning import REPO, Target  # puts tests/ and recorded/ on the path

from support.play import run_playbook  # isort: skip
from support.tree import make_recorded_host  # isort: skip

LIMIT_INVOCATIONS = 2
EMPTY = [{"hosts": "all", "gather_facts": False, "tasks": []}]
GATHER = [{"hosts": "all", "gather_facts": True, "tasks": []}]


class Audits:
    """Plays against one or several names of the same sshd, with the starts of Python counted."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.target = scratch, Target(scratch)
        self.root = make_recorded_host(scratch / "machine")
        self.starts = scratch / "starts"
        self.python = scratch / "python"
        self.python.write_text(
            f'#!/bin/sh\necho >> "{self.starts}"\nexec /usr/bin/python3 "$@"\n', encoding="utf-8"
        )
        self.python.chmod(0o755)
        for name, play in (("empty", EMPTY), ("gather", GATHER)):
            (scratch / f"{name}.json").write_text(json.dumps(play), encoding="utf-8")

    def inventory(self, count: int) -> Path:
        """Return an inventory in which the target has ``count`` names."""
        one = json.loads(self.target.inventory.read_text(encoding="utf-8"))["all"]["hosts"]["target"]
        one["ansible_python_interpreter"] = str(self.python)
        path = self.scratch / f"hosts-{count}.json"
        hosts = {f"target{number}": one for number in range(count)}
        path.write_text(json.dumps({"all": {"hosts": hosts}}), encoding="utf-8")
        return path

    def play(self, playbook: str, count: int = 1) -> tuple[float, int]:
        """Run a playbook; return wall seconds and how many modules ran on all hosts together."""
        self.starts.write_text("", encoding="utf-8")
        roots = {"sysfs_root": "sys", "procfs_root": "proc", "reports_root": "reports"}
        arguments = [f"-e{name}={self.root / place}" for name, place in roots.items()]
        start = time.perf_counter()
        run = run_playbook(self.scratch, playbook, f"-i{self.inventory(count)}", *arguments)
        seconds = time.perf_counter() - start
        if run.returncode:
            sys.exit(run.output)
        return seconds, len(self.starts.read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=10, help="of the fleet (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-tuning-bench-") as name:
        audits = Audits(Path(name))
        print(f"one host over ssh to 127.0.0.1, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        with audits.target.serving():
            compare(audits, arguments.repeats)
            fleet(audits, arguments.hosts)


def compare(audits: Audits, repeats: int) -> None:
    """Print the medians of the ways on one host, and check the module invocations."""
    audit = str(REPO / "playbooks/audit.yml")
    ways = {
        "empty play": f"{audits.scratch}/empty.json",
        "gather_facts": f"{audits.scratch}/gather.json",
        "audit": audit,
    }
    audits.play(audit)  # warms caches
    taken: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, playbook in ways.items():
            taken[way].append(audits.play(playbook))
    print(f"\n{'way':<14} {'median s':>9} {'min':>7} {'max':>7}  modules")
    for way, results in taken.items():
        seconds = [second for second, _modules in results]
        modules = results[-1][1]
        spread = f"{min(seconds):>7.2f} {max(seconds):>7.2f}"
        print(f"{way:<14} {statistics.median(seconds):>9.2f} {spread}  {modules}")
    invocations = taken["audit"][-1][1]
    print(f"modules per host  {invocations}  (at most {LIMIT_INVOCATIONS})")
    if invocations > LIMIT_INVOCATIONS:
        sys.exit("the audit runs too many modules")


def fleet(audits: Audits, count: int) -> None:
    """Print the time of an audit of several hosts at once."""
    seconds, modules = audits.play(str(REPO / "playbooks/audit.yml"), count)
    print(f"\n{count} hosts at once: {seconds:.2f} s, {modules / count:.0f} module per host")


if __name__ == "__main__":
    main()
