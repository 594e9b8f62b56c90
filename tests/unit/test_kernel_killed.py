# SPDX-License-Identifier: GPL-3.0-or-later
"""Killed with SIGKILL at every write of a file, before and after: old or new, and the next run finishes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_tuning import grub, kernel_cmdline
from gpu_tuning.grub_defaults import assignments
from support.boot import Host, grub_host, systemd_boot_host

ROOT = Path(__file__).resolve().parents[2]
TOKENS = ("amd_pstate=active", "processor.max_cstate=1")

#: Runs the module's logic and kills itself at the given rename, or at the given start of a command.
VICTIM = """
import json, os, signal, subprocess, sys
from gpu_tuning import kernel_cmdline
arguments, where, at = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
count = 0
def killing(function):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if where == "before" and count == at: os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if where == "after" and count == at: os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped
os.replace = killing(os.replace)
subprocess.run = killing(subprocess.run)
kernel_cmdline.run(kernel_cmdline.request(arguments), False)
"""


def killed(host: Host, where: str, at: int) -> bool:
    """Run the victim; tell whether it was killed (it ends well where there are fewer writes)."""
    import json

    argv = [sys.executable, "-c", VICTIM, json.dumps(host.arguments(*TOKENS)), where, str(at)]
    done = subprocess.run(
        argv, env={"PYTHONPATH": str(ROOT / "module_utils"), "PATH": "/usr/bin:/bin"}, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("make", [grub_host, systemd_boot_host])
def test_killed_at_any_write(tmp_path: Path, make, where: str) -> None:
    at = 0
    while True:
        at += 1
        host = make(tmp_path / f"host{at}")
        was_killed = killed(host, where, at)
        if make is grub_host:
            menu = (host.root / "boot/grub/grub.cfg").read_text()
            assert menu.endswith("### END /etc/grub.d/30_os-prober ###\n")
            path = host.root / "etc" / grub.DROP_IN
            assert not path.exists() or assignments([(str(path), path.read_text())])
        kernel_cmdline.run(kernel_cmdline.request(host.arguments(*TOKENS)), False)
        result = kernel_cmdline.run(kernel_cmdline.request(host.arguments(*TOKENS)), False)
        assert not result["changed"]
        assert all(token in entry["cmdline"] for entry in result["entries"] for token in TOKENS)
        leftovers = [p for p in host.root.rglob(".gpu-tuning-*") if "state" not in p.parts]
        assert leftovers == []
        if not was_killed:
            break
    assert at > 2
