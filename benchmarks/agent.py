#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one check of the timer costs on the recorded 128-CPU host: CPU and wall.

    benchmarks/agent.py [--repeat 20] [--python /usr/bin/python3]

Prints Markdown; exits with 1 when the median of CPU is 50 ms or more.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "recorded"), str(REPO / "module_utils"), str(REPO / "tests")]
LIMIT_MS = 50


def cost(command: list[str]) -> tuple[float, float]:
    """Return (CPU, wall) of a command in milliseconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1000 * cpu, 1000 * wall


def main() -> None:
    """Persist a recorded host and check it over and over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--python", default="/usr/bin/python3")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.ismount("/dev/shm") else None))
    try:
        command = persisted(folder, arguments.python)
        python = [arguments.python, "-IS", "-c"]
        commands = {
            "this Python with nothing to do": [*python, ""],
            "this Python importing re and json": [*python, "import re, json"],
            "one check": command,
        }
        print(
            f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {arguments.repeat} runs each\n"
        )
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.repeat):
            for name, each in commands.items():
                costs[name].append(cost(each))
        print("| | CPU median, ms | CPU least, ms | wall median, ms |\n| --- | --- | --- | --- |")
        median = 0.0
        for name, each in costs.items():
            cpu, wall = zip(*each)
            median = statistics.median(cpu)
            print(f"| {name} | {median:.1f} | {min(cpu):.1f} | {statistics.median(wall):.1f} |")
    finally:
        shutil.rmtree(folder)
    sys.exit(median >= LIMIT_MS)


def persisted(folder: Path, python: str) -> list[str]:
    """Return the command of a check on a recorded host that is persisted with four sorts of settings."""
    import make_host
    from gpu_tuning import persist
    from support.persisted import PersistedHost, policy

    make_host.main([str(folder / "host")])
    host = PersistedHost(folder / "host")
    (host.root / "var/lib/prometheus/node-exporter").mkdir(parents=True)
    persist.run(policy(), {**host.options(persist.PERSISTED), "python": python}, False)
    archive = host.root / "usr/local/lib/gpu-tuning/gpu-tuning.pyz"
    return [python, "-IS", str(archive), "--policy", str(host.root / "etc/gpu-tuning/policy.json"), "check"]


if __name__ == "__main__":
    main()
