# SPDX-License-Identifier: GPL-3.0-or-later
"""The repair at boot, before containers start: ``python3 -m gpu_tuning.lxc_boot``.

Loads nvidia-uvm, creates nodes and repairs configs with the record of the last run. Run by the systemd
unit of the role lxc_gpu_devices; the exit status is 1 when something needs a person.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Optional

from . import lxc_modes
from . import rows as status
from .lxc_repair import REPAIRED, BadInput, Outcome, Request, run

_POLL_SECONDS = 0.5


def wait_for_quorum(pve_root: str, seconds: float) -> bool:
    """Wait until the configs of this Proxmox node can be written; return whether they can.

    Without quorum pmxcfs shows every file as 0440. True at once where there is no Proxmox.
    """
    end = time.monotonic() + seconds
    while not _writable(os.path.join(pve_root, "lxc")):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _writable(directory: str) -> bool:
    try:
        names = [name for name in os.listdir(directory) if re.fullmatch(r"[0-9]+\.conf", name)]
        return all(os.stat(os.path.join(directory, name)).st_mode & 0o222 for name in names)
    except OSError:
        return True


def describe(outcome: Outcome) -> list[str]:
    """Return one line for each finding that is not ok, for the journal."""
    lines = [
        f"{row.finding}: {row.target}: {row.reason or f'{row.before} is {row.after} now'}"
        for row in outcome.rows
        if row.status != status.OK
    ]
    changed = [container["name"] for container in outcome.containers if container["changed"]]
    return [*lines, f"repaired: {', '.join(changed) or 'nothing'}"]


def parse_arguments(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the command line's options; ``--path`` may be repeated, and none means every container."""
    parser = argparse.ArgumentParser(prog="gpu_tuning.lxc_boot", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--path", action="append", default=[], help="a config, or a container's name or id")
    parser.add_argument("--mode", choices=lxc_modes.MODES, default=lxc_modes.REPAIR)
    parser.add_argument("--format", choices=("auto", "proxmox", "lxc"), default="auto", dest="config_format")
    for name, default in (
        ("procfs", "/proc"),
        ("dev", "/dev"),
        ("state", "/var/lib/gpu-tuning"),
        ("pve", "/etc/pve"),
        ("lxc", "/var/lib/lxc"),
        ("lock", "/run/lock/lxc"),
    ):
        parser.add_argument(f"--{name}-root", default=default)
    parser.add_argument("--no-load", action="store_true", help="load no driver and create no node")
    parser.add_argument("--wait-quorum", type=float, default=60.0, metavar="SECONDS")
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Repair, say what was found, and return the exit status."""
    options = vars(parse_arguments(arguments))
    wait_for_quorum(options["pve_root"], options.pop("wait_quorum"))
    load = not options.pop("no_load")
    try:
        outcome = run(Request(state=REPAIRED, load=load, paths=options.pop("path"), **options))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(describe(outcome)))
    print("\n".join(outcome.errors), file=sys.stderr)
    failed = any(row.status in status.FAILURES for row in outcome.rows)
    return 1 if outcome.errors or failed else 0


if __name__ == "__main__":
    sys.exit(main())
