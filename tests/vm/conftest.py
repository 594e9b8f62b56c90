# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of the virtual machine: what it is made of is cached, machines and images are not shared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from vm import acpi, image, modules, packages
from vm.machine import Machine

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache/vm"
_TOOLS = (
    "qemu-system-x86_64",
    "qemu-img",
    "mmdebstrap",
    "mcopy",
    "sfdisk",
    "iasl",
    "apt-ftparchive",
    "gcc-12",
)


class Ingredients(NamedTuple):
    """Everything that is fetched or compiled once."""

    parts: image.Parts
    new_release: str
    modules: dict[str, Path]
    busybox: Path
    key: Path


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep other runs of these tests out while something is made that all of them use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "making", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def ingredients() -> Ingredients:
    """Fetch, unpack and compile."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    with alone():
        packages.refresh()
        return _prepared()


def _prepared() -> Ingredients:
    key = CACHE / "key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vm", "-f", key], check=True)
    old, new = packages.image_behind(packages.OLD_KERNEL), packages.image_behind(packages.NEW_KERNEL)
    debs = packages.download(CACHE / "debs", [old, new, packages.NEW_KERNEL, "busybox-static"])
    busybox = CACHE / "busybox"
    if not busybox.exists():
        shutil.copy(packages.unpack(debs[3:], CACHE / "busybox-static") / "bin/busybox", busybox)
    releases = [packages.release_of(name) for name in (old, new)]
    built = {release: _modules(release) for release in releases}
    parts = image.Parts(
        packages.root_tar(CACHE),
        debs[0],
        releases[0],
        debs[1:3],
        key.with_suffix(".pub"),
        packages.download(CACHE / "debs", packages.SYSTEMD_BOOT),
    )
    return Ingredients(parts, releases[1], built, busybox, key)


def _modules(release: str) -> Path:
    """Return the folder with a kernel's modules, built when a source is newer."""
    directory = CACHE / "modules" / release
    newest = max(each.stat().st_mtime for each in modules.SOURCE.iterdir())
    if not all(each.stat().st_mtime > newest for each in directory.glob("*.ko")) or not directory.exists():
        debs = packages.download(CACHE / "debs", packages.headers_of(release))
        modules.build(packages.unpack(debs, CACHE / "headers"), release, directory)
    return directory


@pytest.fixture
def machine(ingredients: Ingredients, tmp_path: Path) -> Iterator[Callable[[bool], Machine]]:
    """Return a function that boots and returns a machine; ``efi``: with systemd-boot and a watchdog."""
    started: list[Machine] = []

    def boot(efi: bool) -> Machine:
        with alone():
            disk = image.cached(ingredients.parts, CACHE, efi)
        tables = acpi.write(tmp_path / "acpi", cpus=2, watchdog=efi)
        vm = Machine(tmp_path / "vm", disk, ingredients.key, tables, efi)
        started.append(vm)
        vm.start()
        vm.wait()
        return vm

    yield boot
    for vm in started:
        if sys.exc_info()[0] is not None:
            print(vm.console())
        vm.stop()


class Controller:
    """ansible-playbook against one machine."""

    def __init__(self, vm: Machine, directory: Path) -> None:
        self.vm, self.directory = vm, directory
        self.reports = directory / "reports"
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        options += f" -o ControlPath={vm.sockets}/play"
        (directory / "inventory.yml").write_text(
            "gpu_hosts:\n  hosts:\n    vm:\n      ansible_host: 127.0.0.1\n      ansible_user: root\n"
            f"      ansible_port: {vm.port}\n      ansible_ssh_private_key_file: {vm.key}\n"
            f"      ansible_ssh_common_args: {options}\n      ansible_python_interpreter: /usr/bin/python3\n"
        )

    def play(self, playbook: str, *arguments: str, fails: bool = False) -> str:
        """Run a playbook; return what it printed."""
        command = os.environ.get("GPU_TUNING_ANSIBLE_PLAYBOOK", "ansible-playbook")
        argv = [command, "-i", self.directory / "inventory.yml", playbook, *arguments]
        argv += ["-e", f"reports_root={self.reports}"]
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
        begun = time.monotonic()
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False, env=environment)
        self.vm.disconnect()  # it may have rebooted
        said = done.stdout + done.stderr
        print(f"{time.monotonic() - begun:4.0f} s: {playbook} {' '.join(arguments)}")
        assert (done.returncode != 0) == fails, f"{said}\n{self.vm.console()}"
        return said


@pytest.fixture
def controller(tmp_path: Path) -> Callable[[Machine], Controller]:
    """Return a function that makes a controller for a machine."""
    return lambda vm: Controller(vm, tmp_path)
