# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel modules that have to be loaded, and what must be there before they make sense."""

from __future__ import annotations

import os
import re

from .engine import Kind, Refused, not_applicable
from .journal import Entry
from .kernel_files import read_line
from .rows import FAILED, REJECTED, WOULD_CHANGE, Row, Value
from .typed import NamedTuple, Optional

LOADED, ABSENT = "loaded", "absent"
RDMA_DEVICE, NVIDIA_DRIVER = "rdma_device", "nvidia_driver"
REQUIREMENTS = (RDMA_DEVICE, NVIDIA_DRIVER)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")


class WantedModule(NamedTuple):
    """A module to load, and the requirements (REQUIREMENTS) without which it is not applicable."""

    name: str
    requires: tuple[str, ...] = ()


def wanted_module(name: str, requires: Optional[list[str]] = None) -> WantedModule:
    """Return a checked WantedModule; dashes and underscores are the same to the kernel. Raises ValueError."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is not a kernel module's name: letters, digits, dashes and underscores")
    return WantedModule(name.replace("-", "_"), tuple(requires or ()))


def checked_modules(modules: list[WantedModule]) -> list[WantedModule]:
    """Refuse a module that is named twice. Raises ValueError."""
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice: keep one of the two")
    return modules


class KernelModules(Kind):
    """Modules of one machine; a recorded machine has no kernel to load into unless ``modprobe`` is given."""

    kind = "module"
    restores_only_own = True

    def __init__(
        self,
        modules: list[WantedModule],
        procfs_root: str = "/proc",
        sysfs_root: str = "/sys",
        modprobe: Optional[str] = None,
    ) -> None:
        """Take checked modules; ``modprobe`` is the command's name or path, rmmod is beside it."""
        self.modules = modules
        self.procfs_root, self.sysfs_root = procfs_root, sysfs_root
        self.live = os.path.realpath(sysfs_root) == "/sys"
        self.modprobe = modprobe or ("modprobe" if self.live else None)

    def capture(self) -> list[Row]:
        """Return a row per module."""
        return [self._captured(wanted) for wanted in self.modules]

    def _captured(self, wanted: WantedModule) -> Row:
        row = Row(f"module:{wanted.name}", self.kind, wanted.name, desired=LOADED)
        row.before = self.read(row)
        if row.before == LOADED:
            return row
        missing = self._missing(wanted)
        if missing:
            return not_applicable(self.kind, wanted.name, missing, desired=LOADED)
        try:
            self._run("modprobe", "--dry-run", wanted.name)
        except Refused as refused:
            return row.with_status(refused.status, refused.reason)
        return row.with_status(WOULD_CHANGE, "not loaded")

    def _missing(self, wanted: WantedModule) -> Optional[str]:
        """Return what is not there on this host: short cause, colon, evidence."""
        if RDMA_DEVICE in wanted.requires and not self._has_entries("class/infiniband"):
            return f"no RDMA device: {os.path.join(self.sysfs_root, 'class/infiniband')} has no entry"
        if NVIDIA_DRIVER in wanted.requires and not os.path.isdir(
            os.path.join(self.sysfs_root, "module/nvidia")
        ):
            return f"no NVIDIA driver: {os.path.join(self.sysfs_root, 'module/nvidia')} is not there"
        if self.modprobe is None:
            return (
                f"recorded machine: {self.sysfs_root} belongs to no running kernel that could load a module"
            )
        return None

    def _has_entries(self, directory: str) -> bool:
        try:
            return bool(os.listdir(os.path.join(self.sysfs_root, directory)))
        except OSError:
            return False

    def read(self, row: Row) -> Value:
        """Return "loaded" for a live or built-in module, else "absent"."""
        directory = os.path.join(self.sysfs_root, "module", row.target)
        if os.path.isdir(directory):
            # A built-in module has no initstate; a loadable one is "live" once its init has succeeded.
            return LOADED if read_line(f"{directory}/initstate") in (None, "live") else ABSENT
        return LOADED if row.target in self._built_in() else ABSENT

    def _built_in(self) -> set[str]:
        """Return the built-in modules' names; only the running kernel's list is on the disk."""
        release = read_line(os.path.join(self.procfs_root, "sys/kernel/osrelease"))
        if not self.live or release is None:
            return set()
        try:
            lines = _lines(f"/lib/modules/{release}/modules.builtin")
        except OSError:
            return set()
        return {os.path.basename(line).partition(".ko")[0].replace("-", "_") for line in lines}

    def write(self, row: Row) -> None:
        """Load with modprobe(8), which knows dependencies, aliases and blacklists; unload with rmmod(8)."""
        if row.desired == LOADED:
            self._run("modprobe", row.target)
        else:
            # modprobe --remove takes along what nothing else uses: the GPU's driver, which was loaded before.
            self._run("rmmod", row.target)

    def _run(self, tool: str, *arguments: str) -> None:
        if self.modprobe is None:
            raise Refused(FAILED, "a recorded machine has no kernel to change modules of")
        import subprocess  # a check seldom gets here, and this would be a tenth of its time

        command = self.modprobe if tool == "modprobe" else os.path.join(os.path.dirname(self.modprobe), tool)
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
        try:
            done = subprocess.run(
                [command, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C", "PATH": path},
                check=False,
            )
        except OSError as error:
            raise Refused(FAILED, f"cannot run {command}: {error}: install kmod") from error
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode} and no word"
            raise Refused(REJECTED, f"{command} {' '.join(arguments)} failed: {said}")

    def recorded_row(self, entry: Entry) -> Row:
        """Return the row of a recorded module."""
        return Row(f"module:{entry['target']}", self.kind, entry["target"])


def _lines(path: str) -> list[str]:
    """Return the lines of a file of any size. Raises OSError."""
    with open(path, encoding="ascii", errors="replace") as stream:
        return stream.read().splitlines()
