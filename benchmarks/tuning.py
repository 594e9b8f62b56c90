#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long tuning one host takes: by hand, from stock modules, and with this repo, side by side.

All three do the same job on the same recorded machine over ssh to an sshd of this benchmark's own on
loopback: snapshot, 9 sysctls, 128 idle states, 8 GPUs, read-back. Runs are interleaved; medians and ratios
are printed. Needs sshd; needs no root.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests"), str(REPO / "recorded"), str(REPO / "module_utils")]

from support.play import CONTROLLER_ACTIONS, run_playbook
from support.small_host import small_host
from support.tree import changed_paths, make_recorded_host, manifest

LIMIT_BY_HAND, LIMIT_STOCK, LIMIT_INVOCATIONS = 5.0, 25.0, 3


class Target:
    """An sshd on loopback with a key of its own, and what it takes to log in there."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.port = scratch, _free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", scratch / name], check=True)
        shutil.copy(scratch / "user_key.pub", scratch / "authorized_keys")
        config = (
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {scratch}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {scratch}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\n"
        )
        (scratch / "sshd_config").write_text(config, encoding="ascii")

    @property
    def options(self) -> list[str]:
        """What ssh needs to know; as for anyone's script, nothing is shared between calls."""
        return [
            f"-p{self.port}",
            f"-i{self.scratch}/user_key",
            "-oStrictHostKeyChecking=no",
            f"-oUserKnownHostsFile={self.scratch}/known_hosts",
            "-oLogLevel=ERROR",
        ]

    @property
    def inventory(self) -> Path:
        """An inventory with this one host."""
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.port,
            "ansible_user": getpass.getuser(),
            "ansible_ssh_private_key_file": f"{self.scratch}/user_key",
            "ansible_ssh_common_args": " ".join(self.options[2:]),
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        path = self.scratch / "hosts.json"
        path.write_text(json.dumps({"all": {"hosts": {"target": host}}}), encoding="utf-8")
        return path

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Run sshd, and wait until it answers."""
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", self.scratch / "sshd_config"]
        with (
            open(self.scratch / "sshd.log", "wb") as log,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log) as server,
        ):
            try:
                self._wait()
                yield
            finally:
                server.terminate()

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if time.monotonic() > deadline:
                sys.exit(f"sshd does not answer: {(self.scratch / 'sshd.log').read_text()}")
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """The job on one recorded machine, in each way; every way starts from the same bytes."""

    def __init__(self, scratch: Path, target: Target) -> None:
        self.scratch, self.target = scratch, target
        self.root = make_recorded_host(scratch / "machine")
        self.pristine = manifest(self.root)
        self.touched: list[str] = []
        self.invocations: dict[str, int] = {}

    def reset(self) -> None:
        """Give every changed file its first bytes again, and forget the journal."""
        paths = self.touched or changed_paths(self.pristine, manifest(self.root))
        self.touched = paths
        for path in paths:
            content = self.pristine[path].content
            assert isinstance(content, bytes)
            (self.root / path).write_bytes(content)
        shutil.rmtree(self.scratch / "state", ignore_errors=True)

    def by_hand(self) -> None:
        """One ssh call."""
        command = ["ssh", *self.target.options, f"{getpass.getuser()}@127.0.0.1"]
        with open(REPO / "benchmarks/by_hand.sh", "rb") as script:
            subprocess.run(
                [*command, "bash", "-s", str(self.root), f"{self.scratch}/by-hand"],
                stdin=script,
                stdout=subprocess.DEVNULL,
                check=True,
            )

    def ours(self) -> None:
        """tune.yml --tags runtime."""
        roots = {
            "procfs_root": self.root / "proc",
            "sysfs_root": self.root / "sys",
            "state_root": self.scratch / "state",
            "reports_root": self.scratch / "reports",
        }
        self._play(
            "ours", "tune.yml", "--tags=runtime", *(f"-e{name}={path}" for name, path in roots.items())
        )

    def stock(self) -> None:
        """The playbook from stock modules, with this repo's pipelining."""
        self._play("stock", "benchmarks/stock/tune.yml", f"-eroot={self.root}")

    def _play(self, name: str, playbook: str, *arguments: str) -> None:
        run = run_playbook(self.scratch, playbook, f"-i{self.target.inventory}", *arguments)
        if run.returncode:
            sys.exit(run.output)
        self.invocations[name] = sum(_modules_run(task) for task in run.tasks)


def _modules_run(task: dict) -> int:
    if task["outcome"] == "skipped" or task["action"] in CONTROLLER_ACTIONS:
        return 0
    return len(task["result"].get("results", [None]))


def timed(action: Callable[[], None], reset: Callable[[], None]) -> float:
    """Return an action's wall seconds, from the same start each time."""
    reset()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cpus_matter(scratch: Path, target: Target, repeats: int) -> None:
    """Print what more CPUs cost: the time of one machine with few and one with many."""
    print("\nCPUs   ours, s")
    for cpus in (4, 128, 512):
        host = small_host(scratch / f"cpus-{cpus}", cpus=cpus)
        arguments = [f"-e{name}={path}" for name, path in host.roots.items()]
        arguments += [f"-ereports_root={scratch}/reports", f"-i{target.inventory}"]
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run_playbook(scratch, "tune.yml", "--tags=runtime", *arguments)
            seconds.append(time.perf_counter() - start)
            run_playbook(scratch, "playbooks/rollback.yml", *arguments)
        print(f"{cpus:>4}   {statistics.median(seconds):.2f}")


def report(seconds: dict[str, list[float]], invocations: dict[str, int]) -> None:
    """Print medians, ratios and module invocations, and how they stand to what is required."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{'way':<22} {'median s':>9} {'min':>7} {'max':>7}  runs  modules per host")
    for name, values in seconds.items():
        ran = invocations.get(name, 0)
        spread = f"{min(values):>7.2f} {max(values):>7.2f}"
        print(f"{name:<22} {median[name]:>9.2f} {spread}  {len(values):>4}  {ran or '-'}")
    print(f"\nours / by hand  {median['ours'] / median['by hand']:.1f}  (at most {LIMIT_BY_HAND:.0f})")
    if "stock" in median:
        print(f"stock / ours    {median['stock'] / median['ours']:.1f}  (at least {LIMIT_STOCK:.0f})")
    print(f"modules per host  {invocations['ours']}  (at most {LIMIT_INVOCATIONS})")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="of our way and by hand (default: %(default)s)"
    )
    parser.add_argument(
        "--stock-repeats", type=int, default=2, help="each takes a minute (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-tuning-bench-") as name:
        scratch = Path(name)
        target = Target(scratch)
        print(f"one host over ssh to 127.0.0.1, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        with target.serving():
            job = Job(scratch, target)
            job.ours()  # warms caches, and tells which files the job touches
            ways = {"by hand": job.by_hand, "ours": job.ours, "stock": job.stock}
            seconds: dict[str, list[float]] = {}
            for turn in range(max(arguments.repeats, arguments.stock_repeats)):
                for way, action in ways.items():
                    if turn < (arguments.stock_repeats if way == "stock" else arguments.repeats):
                        seconds.setdefault(way, []).append(timed(action, job.reset))
            job.reset()
            report(seconds, job.invocations)
            cpus_matter(scratch, target, min(arguments.repeats, 3))


if __name__ == "__main__":
    main()
