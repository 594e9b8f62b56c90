#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Time one call of lxc_cgroup_devices over 200 stale container configs: the playbook, and the logic alone.

Run from the repo with ansible-playbook on PATH; ``--containers N`` for another number. Everything
happens in a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "module_utils"))
from gpu_tuning.lxc_repair import Request, run  # noqa: E402

OLD = "Character devices:\n195 nvidia\n504 nvidia-uvm\n507 nvidia-caps\n"
NOW = "Character devices:\n195 nvidia\n509 nvidia-uvm\n237 nvidia-caps\n"
CONFIG = "".join(
    [
        "arch: amd64\ncores: 8\nhostname: gpu\nmemory: 16384\nostype: debian\nswap: 512\n",
        *(f"lxc.cgroup2.devices.allow: c {major}:* rwm\n" for major in (195, 504, 507)),
        *(
            f"lxc.mount.entry: /dev/{node} dev/{node} none bind,optional,create=file\n"
            for node in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
        ),
    ]
)
PLAY = [
    {
        "hosts": "localhost",
        "gather_facts": False,
        "tasks": [{"name": "Repair", "lxc_cgroup_devices": "{{ arguments }}", "register": "result"}],
    }
]


def make_host(root: Path, containers: int) -> dict[str, str]:
    """Write a recorded host with so many stale containers; return the module's arguments for it."""
    for name in ("proc", "dev", "pve/lxc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "proc" / "devices").write_text(NOW)
    (root / "devices.old").write_text(OLD)
    for number in range(100, 100 + containers):
        (root / "pve" / "lxc" / f"{number}.conf").write_text(CONFIG)
    roots = {f"{name}_root": str(root / name) for name in ("dev", "pve", "lxc", "lock", "state")}
    recorded = {"procfs_root": str(root / "proc"), "recorded_devices": str(root / "devices.old")}
    return {"state": "repaired", **roots, **recorded}


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call took."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def play(root: Path, arguments: dict[str, str]) -> None:
    """Run one playbook of one task, from the repo."""
    playbook = root / "play.yml"
    task = {"name": "Repair", "lxc_cgroup_devices": arguments}
    playbook.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]))
    command = ["ansible-playbook", "-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    subprocess.run([*command, str(playbook)], cwd=REPO, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure a repair and a second run without change, each alone and as a playbook."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--containers", type=int, default=200)
    containers = parser.parse_args().containers
    print(f"{containers} containers, all stale, in one call")
    for name in ("logic alone", "as a playbook"):
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            arguments = make_host(root, containers)
            request = Request(**arguments)  # type: ignore[arg-type]
            work = (lambda: run(request)) if name == "logic alone" else (lambda: play(root, arguments))
            repair, again = seconds(work), seconds(work)
            left = sum("504" in path.read_text() for path in (root / "pve" / "lxc").iterdir())
            print(f"{name:14} repair {repair:6.2f} s, second run {again:6.2f} s, left stale: {left}")


if __name__ == "__main__":
    main()
