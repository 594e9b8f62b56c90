# SPDX-License-Identifier: GPL-3.0-or-later
"""A real, plain LXC container for the tests: its own loopback, and folders of ours bound into it."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
from typing import Optional

PACKAGES = "python3,procps,libgomp1"
CONFIG = """\
lxc.rootfs.path = dir:{rootfs}
lxc.uts.name = {name}
lxc.net.0.type = empty
lxc.apparmor.profile = unconfined
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed
lxc.init.cmd = /usr/bin/sleep infinity
"""


def missing() -> Optional[str]:
    """Say what keeps this machine from running a container, None when nothing does."""
    if os.geteuid() != 0:
        return "LXC containers need root here"
    for tool in ("lxc-start", "lxc-attach", "mmdebstrap", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is missing: apt-get install lxc mmdebstrap iproute2"
    return None


def root_file_system(cache: pathlib.Path) -> pathlib.Path:
    """Return a small Debian's tar, built once; GPU_TUNING_LXC_ROOTFS names one that is there already."""
    given = os.environ.get("GPU_TUNING_LXC_ROOTFS")
    if given:
        return pathlib.Path(given)
    tar = cache / "inference-rootfs.tar"
    if not tar.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
        partial = tar.with_suffix(".part.tar")  # its ending tells mmdebstrap the format
        subprocess.run([*command, str(partial)], check=True)
        partial.replace(tar)
    return tar


class Container:
    """One container below ``folder``; ``binds`` maps host folders to folders in it."""

    def __init__(self, folder: pathlib.Path, tar: pathlib.Path, binds: dict[pathlib.Path, str]) -> None:
        self.folder, self.name = folder, "bench"
        rootfs = folder / self.name / "rootfs"
        rootfs.mkdir(parents=True)
        subprocess.run(["tar", "-xf", tar, "-C", rootfs, "--exclude=./dev/*"], check=True)
        lines = [
            f"lxc.mount.entry = {source} {target.lstrip('/')} none bind,ro,create=dir 0 0"
            for source, target in binds.items()
        ]
        config = CONFIG.format(rootfs=rootfs, name=self.name) + "\n".join(lines) + "\n"
        (folder / self.name / "config").write_text(config)

    @property
    def enter(self) -> list[str]:
        """The command that runs another one in the container."""
        return ["lxc-attach", "-P", str(self.folder), "--clear-env", "-n", self.name, "--"]

    def start(self) -> None:
        """Start it and bring its loopback up."""
        subprocess.run(["lxc-start", "-P", self.folder, "-n", self.name], check=True)
        deadline = time.monotonic() + 30
        while True:
            info = subprocess.run(
                ["lxc-info", "-P", self.folder, "-n", self.name, "-pH"],
                capture_output=True,
                text=True,
                check=False,
            )
            pid = info.stdout.strip()
            if (
                pid
                and subprocess.run([*self.enter, "true"], capture_output=True, check=False).returncode == 0
            ):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"the container does not come up: {info.stderr}")
            time.sleep(0.2)
        subprocess.run(["nsenter", "-t", pid, "-n", "ip", "link", "set", "lo", "up"], check=True)

    def processes(self) -> str:
        """Return the command lines of what runs in it."""
        return subprocess.run(
            [*self.enter, "ps", "axo", "stat,args"], capture_output=True, text=True, check=True
        ).stdout

    def stop(self) -> None:
        """Stop it; its folder is the caller's."""
        subprocess.run(
            ["lxc-stop", "-P", self.folder, "-n", self.name, "-k"], check=False, capture_output=True
        )
