# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs that tune a host as well: running or enabled, and what they are set to."""

from __future__ import annotations

import os
import re
from typing import Union

from .reader import Facts, Host, Unknown, absent, link_name, names_in, read_text

#: Unit -> the name its process shows (the kernel keeps 15 characters).
TUNERS = {
    "tuned": "tuned",
    "irqbalance": "irqbalance",
    "numad": "numad",
    "power-profiles-daemon": "power-profiles-",
    "tlp": "tlp",
    "auto-cpufreq": "auto-cpufreq",
    "cpufrequtils": "",
    "cpupower": "",
    "ksmtuned": "ksmtuned",
    "nvidia-persistenced": "nvidia-persiste",
    "nvidia-fabricmanager": "nv-fabricmanage",
}


def collect(host: Host, commands: Union[dict[str, int], Unknown]) -> Facts:
    """Return {unit: {"running", "enabled"}}, and TuneD's profile and settings."""
    enabled = _enabled_units(host)
    units = {
        unit: {"running": _runs(process, commands), "enabled": f"{unit}.service" in enabled}
        for unit, process in TUNERS.items()
    }
    return {"units": units, "tuned": _tuned(host)}


def _runs(process: str, commands: Union[dict[str, int], Unknown]) -> Union[bool, Unknown]:
    """Tell whether a daemon runs; a unit that starts none ("") never does."""
    if not process:
        return False
    return commands if isinstance(commands, Unknown) else process in commands


def _enabled_units(host: Host) -> set[str]:
    """Return the units linked into a target; a unit that is masked (a link to /dev/null) is not enabled."""
    base = os.path.join(host.etc, "systemd/system")
    wanted = {
        unit
        for folder in names_in(base)
        if folder.endswith((".wants", ".requires"))
        for unit in names_in(os.path.join(base, folder))
    }
    return {unit for unit in wanted if link_name(os.path.join(base, unit)) != "null"}


def _tuned(host: Host) -> Facts:
    profile = read_text(os.path.join(host.etc, "tuned/active_profile"))
    settings = read_text(os.path.join(host.etc, "tuned/tuned-main.conf"))
    match = (
        None
        if isinstance(settings, Unknown)
        else re.search(r"^\s*reapply_sysctl\s*=\s*(\S+)", settings, re.M)
    )
    return {
        "profile": profile or absent("TuneD has no active profile"),
        # On by default: TuneD then sets sysctl.d's values again after its profile's.
        "reapply_sysctl": match.group(1).lower() in ("1", "true", "yes", "y") if match else True,
    }
