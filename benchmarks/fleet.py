#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run over N hosts beside the by-hand script with xargs -P, on this machine alone.

    benchmarks/fleet.py [--hosts 1,10,50,100] [--repeat 1] [--parallel 20] [--no-shared]

Hosts are the addresses 127.0.1.N of one sshd in a network namespace of its own, each with a connection,
over recorded machines in memory. The script does its work there; the play's targets have a stand-in for
Python that gives the answer of a real run, so that the controller is what is measured: a fleet's hosts have
CPUs of their own. The columns "shared" have real targets on the controller's CPUs, and beside them a module
that does nothing (ping), since that is where Ansible's own start on a target shows. Needs root, unshare, ip
and openssh-server. Prints Markdown.
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
PYTHON = Path("/usr/bin/python3")
TUNE = ["ansible-playbook", "tune.yml", "--tags", "runtime"]
NOTHING = ["ansible", "gpu_hosts", "-m", "ansible.builtin.ping", "--one-line"]


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
        # A login that starts no one's tools: what ~/.bashrc costs is paid by both, and is not theirs.
        f"SetEnv HOME={folder}/home\n"
    )
    (folder / "home").mkdir()
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


def stub(folder: Path, hosts: list[str], options: list[str], arguments: argparse.Namespace) -> Path:
    """Write a stand-in for the targets' Python that gives the answer which a run on one host gave."""
    answer, keeper, player = folder / "answer", folder / "keeper", folder / "player"
    keeper.write_text(f"#!/bin/sh\n{PYTHON} | tee {answer}\n")
    player.write_text(f"#!/bin/sh\ncat >/dev/null\ncat {answer}\n")
    for script in (keeper, player):
        script.chmod(0o755)
    ansible(TUNE, folder, hosts[:1], options, arguments, keeper)
    return player


def ansible(
    job: list[str],
    folder: Path,
    hosts: list[str],
    options: list[str],
    arguments: argparse.Namespace,
    python: Path = PYTHON,
) -> Cost:
    """Run one of Ansible's programs over the hosts, with this as their Python."""
    environment = {
        **os.environ,
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cp"),
        # Every run pays for its own connections.
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=10s",
    }
    program = str(Path(arguments.ansible).parent / job[0])
    hosts_file = str(inventory(folder, hosts, options, str(python)))
    command = [program, *job[1:], f"--forks={arguments.parallel}", "-i", hosts_file]
    cost = measured(command, environment)
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
    columns = ["hosts", "by hand, s", "play, s", "times", "CPU per host by hand, s", "play, s", "MiB"]
    columns += ["play, shared, s", "ping, shared, s"] if arguments.shared else []
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for count in arguments.hosts:
        hosts = [f"127.0.1.{number}" for number in range(1, count + 1)]
        place = (folder, hosts, options, arguments)
        player = stub(*place)
        runs = [(by_hand(*place), ansible(TUNE, *place, player)) for _ in range(arguments.repeat)]
        hand, play = (statistics.median(costs[each].wall for costs in runs) for each in (0, 1))
        cpus = [statistics.median(costs[each].cpu for costs in runs) / count for each in (0, 1)]
        memory = max(costs[1].memory for costs in runs)
        cells = [f"{count}", f"{hand:.1f}", f"{play:.1f}", f"{play / hand:.1f}"]
        cells += [*(f"{cpu:.2f}" for cpu in cpus), f"{memory:.0f}"]
        if arguments.shared:
            cells += [f"{ansible(job, *place).wall:.1f}" for job in (TUNE, NOTHING)]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Enter a network namespace, then measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [1, 10, 50, 100]
    parser.add_argument("--hosts", type=lambda text: [int(each) for each in text.split(",")], default=numbers)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=20)
    parser.add_argument("--no-shared", dest="shared", action="store_false")
    parser.add_argument("--ansible", default=str(Path(sys.executable).parent / "ansible"))
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        environment = {**os.environ, INSIDE: "1"}
        os.execvpe("unshare", ["unshare", "--net", sys.executable, *sys.argv], environment)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    run(arguments)


if __name__ == "__main__":
    main()
