# SPDX-License-Identifier: GPL-3.0-or-later
"""Where on a host everything lies that outlives a reboot: its trees, and our own files in them."""

from __future__ import annotations

import os

from .typed import Any, NamedTuple

#: Below 99, so that an administrator's own files still have the last word, and are then named.
DROP_IN = "90-gpu-tuning.conf"
APPLY_UNIT = "gpu-tuning-apply.service"
DEVICE_UNIT = "gpu-tuning-device@.service"
CHECK_UNIT = "gpu-tuning-check.service"
CHECK_TIMER = "gpu-tuning-check.timer"
UDEV_RULE = "90-gpu-tuning.rules"

#: Sections that the agent leaves alone at boot: sysctls and modules have files of their own, read earlier.
BY_FILE = ("sysctl_snapshot", "kernel_module")

POLICY = "/etc/gpu-tuning/policy.json"

_ROOTS = ("etc_root", "run_root", "usr_root", "lib_root", "var_root")


class Places(NamedTuple):
    """The trees of one host: the live one, or a recorded machine in a directory."""

    procfs: str
    sysfs: str
    etc: str
    run: str
    usr: str
    lib: str
    var: str
    state: str

    @classmethod
    def of(cls, options: dict[str, Any]) -> Places:
        """Take ``procfs_root`` and its like; a root that is not given lies beside sysfs's.

        A recorded machine at T so never mixes with the live /etc.
        """
        beside = os.path.dirname(os.path.normpath(options["sysfs_root"]))
        etc, run, usr, lib, var = (
            options.get(name) or os.path.join(beside, name.partition("_")[0]) for name in _ROOTS
        )
        return cls(
            options["procfs_root"], options["sysfs_root"], etc, run, usr, lib, var, options["state_root"]
        )

    def as_options(self) -> dict[str, str]:
        """Return what ``of`` takes."""
        names = {"procfs": "procfs_root", "sysfs": "sysfs_root", "state": "state_root"}
        return {names.get(key, f"{key}_root"): value for key, value in self._asdict().items()}

    @property
    def live(self) -> bool:
        """Tell whether these are the trees of the running system, so that its daemons are to be told."""
        return os.path.realpath(self.etc) == "/etc" and os.path.isdir("/run/systemd/system")

    @property
    def policy(self) -> str:
        """The recorded policy."""
        return os.path.join(self.etc, "gpu-tuning/policy.json")

    @property
    def agent(self) -> str:
        """The archive that applies and checks it."""
        return os.path.join(self.usr, "local/lib/gpu-tuning/gpu-tuning.pyz")

    @property
    def own_directories(self) -> tuple[str, str]:
        """Directories that bear our name: the policy's and the agent's."""
        return os.path.dirname(self.policy), os.path.dirname(self.agent)

    @property
    def drop_in(self) -> str:
        """The sysctls."""
        return os.path.join(self.etc, "sysctl.d", DROP_IN)

    @property
    def modules(self) -> str:
        """The kernel modules."""
        return os.path.join(self.etc, "modules-load.d/gpu-tuning.conf")

    @property
    def udev_rule(self) -> str:
        """What starts the device unit when a driver is bound."""
        return os.path.join(self.etc, "udev/rules.d", UDEV_RULE)

    def unit(self, name: str) -> str:
        """A systemd unit."""
        return os.path.join(self.etc, "systemd/system", name)

    def enabled(self, name: str, target: str) -> str:
        """The link that makes a target want a unit."""
        return os.path.join(self.etc, "systemd/system", f"{target}.wants", name)

    @property
    def default_textfile(self) -> str:
        """Where Debian's prometheus-node-exporter looks for other programs' metrics."""
        return os.path.join(self.var, "lib/prometheus/node-exporter/gpu_tuning.prom")

    def sysctl_directories(self) -> list[str]:
        """sysctl.d, first in precedence first."""
        from . import sysctl_d  # a check never gets here

        return sysctl_d.directories(self.etc, self.run, self.usr, self.lib)

    def config_directories(self, name: str) -> list[str]:
        """Directories of the same precedence for modules-load.d, modprobe.d or udev/rules.d."""
        return [each.replace("/sysctl.d", f"/{name}") for each in self.sysctl_directories()]
