#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run over N hosts beside the by-hand script with xargs -P, on this machine alone.

    benchmarks/fleet.py [--hosts 1,10,50,100] [--repeat 1] [--parallel 20] [--stub]

Hosts are the addresses 127.0.1.N of one sshd in a network namespace of its own, each with a connection,
over recorded machines in memory. Targets share this machine's CPUs with the controller, which a real fleet
does not: --stub has a canned answer in place of the targets' Python, to measure the controller. Needs
root, unshare, ip and openssh-server. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "recorded"))
INSIDE = "GPU_TUNING_FLEET_INSIDE"
PORT = 2222
MACHINES = 30  # more than --parallel


class Cost(NamedTuple):
    """One run: wall seconds, CPU seconds of the controller's processes, largest process in MiB."""

    wall: float
    cpu: float
    memory: float


def measured(command: list[str], environment: dict[str, str]) -> Cost:
    """Run a command that must succeed. Targets' CPU is not in it: sshd's children are not ours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wall = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command[0]} failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu, after.ru_maxrss / 1024)


@contextmanager
def sshd(folder: Path) -> Iterator[list[str]]:
    """Start a server for throw-away keys; yield ssh's options."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "known").write_text(f"[127.0.1.*]:{PORT} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nMaxStartups 500\nMaxSessions 200\n"
        "Subsystem sftp internal-sftp\n"
    )
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    server = subprocess.Popen(
        [
            shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd",
            "-D",
            "-e",
            "-f",
            f"{folder}/sshd_config",
        ],
        stderr=subprocess.DEVNULL,
    )
    options = ["-i", f"{folder}/user", "-o", f"UserKnownHostsFile={folder}/known", "-o", f"Port={PORT}"]
    options += ["-o", "IdentitiesOnly=yes", "-o", "ConnectionAttempts=20"]
    try:
        yield options
    finally:
        server.terminate()
        server.wait()


def inventory(folder: Path, hosts: list[str], options: list[str], python: str) -> Path:
    """Write the hosts, each with a journal of its own."""
    common = {
        "ansible_user": "root",
        "ansible_python_interpreter": python,
        "ansible_ssh_common_args": " ".join(options),
        "reports_root": f"{folder}/reports",
    }
    each = {
        host: {
            "state_root": f"{folder}/state/{host}",
            "procfs_root": f"{machine_of(folder, host)}/proc",
            "sysfs_root": f"{machine_of(folder, host)}/sys",
        }
        for host in hosts
    }
    path = folder / "hosts.json"
    path.write_text(json.dumps({"all": {"vars": common, "children": {"gpu_hosts": {"hosts": each}}}}))
    return path


def machines(folder: Path) -> None:
    """Copy what tuning reads and writes, so that runs at the same time do not meet in one file."""
    whole = folder / "whole"
    parts = ["proc/sys", "proc/cmdline", "sys/bus", "sys/module/nvidia"]
    for pattern in (
        "sys/devices/pci*",
        "sys/devices/system/cpu/cpu*/cpuidle",
        "sys/devices/system/cpu/cpu*/online",
    ):
        parts += [str(path.relative_to(whole)) for path in whole.glob(pattern)]
    for number in range(MACHINES):
        (folder / f"machine{number}").mkdir()
        subprocess.run(["cp", "-a", "--parents", *parts, f"{folder}/machine{number}"], cwd=whole, check=True)


def machine_of(folder: Path, host: str) -> str:
    """Return a host's machine; hosts so far apart in order share one."""
    return f"{folder}/machine{int(host.rpartition('.')[2]) % MACHINES}"


def stub(folder: Path) -> str:
    """Write a stand-in for the targets' Python that answers as a finished run does."""
    row = {
        "id": "sysctl:vm.swappiness",
        "kind": "sysctl",
        "target": "vm.swappiness",
        "status": "ok",
        "reason": None,
    }
    row.update(before="10", desired="10", after="10", fix="runtime")
    result = {"changed": False, "failed": False, "rows": [row], "diff": [], "recorded": {}}
    result.update(boot_id="b", kernel_release="k", journal="/j")
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{json.dumps(result)}'\n")
    path.chmod(0o755)
    return str(path)


def play(folder: Path, hosts: list[str], options: list[str], arguments: argparse.Namespace) -> Cost:
    """Run tune.yml over the hosts."""
    python = stub(folder) if arguments.stub else "/usr/bin/python3"
    environment = {
        **os.environ,
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cp"),
        # Every run pays for its own connections.
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=10s",
    }
    command = [arguments.ansible_playbook, "tune.yml", "--tags", "runtime", f"--forks={arguments.parallel}"]
    cost = measured([*command, "-i", str(inventory(folder, hosts, options, python))], environment)
    shutil.rmtree(folder / "cp", ignore_errors=True)
    return cost


def by_hand(folder: Path, hosts: list[str], options: list[str], arguments: argparse.Namespace) -> Cost:
    """Run the script over the hosts."""
    ssh = f"ssh {' '.join(options)} -o ControlMaster=no -o ControlPath=none root@$1"
    each = f"{ssh} bash -s $2 {folder}/by-hand/$1 <{REPO}/benchmarks/by_hand.sh"
    pairs = " ".join(f"{host} {machine_of(folder, host)}" for host in hosts)
    command = f"printf '%s %s\\n' {pairs} | xargs -P {arguments.parallel} -L 1 sh -c '{each}' sh"
    return measured(["sh", "-c", command], dict(os.environ))


def run(arguments: argparse.Namespace) -> None:
    """Measure both for each number of hosts and print a table."""
    import make_host

    memory = "/dev/shm" if os.path.ismount("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="gpu-tuning-fleet-", dir=memory))
    try:
        make_host.main([str(folder / "whole")])
        machines(folder)
        with sshd(folder) as options:
            table(folder, options, arguments)
    finally:
        shutil.rmtree(folder)


def table(folder: Path, options: list[str], arguments: argparse.Namespace) -> None:
    """Print a line per number of hosts: medians."""
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {arguments.repeat} runs, median")
    print("\n| hosts | by hand, s | play, s | times | CPU per host by hand, s | play, s | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count in arguments.hosts:
        hosts = [f"127.0.1.{number}" for number in range(1, count + 1)]
        pairs = [
            (by_hand(folder, hosts, options, arguments), play(folder, hosts, options, arguments))
            for _ in range(arguments.repeat)
        ]
        hand = statistics.median(pair[0].wall for pair in pairs)
        wall = statistics.median(pair[1].wall for pair in pairs)
        cpus = [statistics.median(pair[each].cpu for pair in pairs) / count for each in (0, 1)]
        memory = max(pair[1].memory for pair in pairs)
        print(
            f"| {count} | {hand:.1f} | {wall:.1f} | {wall / hand:.1f} | {cpus[0]:.2f} | {cpus[1]:.2f} "
            f"| {memory:.0f} |",
            flush=True,
        )


def main() -> None:
    """Enter a network namespace, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [1, 10, 50, 100]
    parser.add_argument("--hosts", type=lambda text: [int(each) for each in text.split(",")], default=numbers)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=20)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--ansible-playbook", default=str(Path(sys.executable).parent / "ansible-playbook"))
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        environment = {**os.environ, INSIDE: "1"}
        os.execvpe("unshare", ["unshare", "--net", sys.executable, *sys.argv], environment)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    run(arguments)


if __name__ == "__main__":
    main()
