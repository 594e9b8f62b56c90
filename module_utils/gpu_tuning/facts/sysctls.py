# SPDX-License-Identifier: GPL-3.0-or-later
"""The policy's sysctls: the value now, and the file and line that sets it at the next boot."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .. import sysctl_d
from .reader import Facts, Host, Unknown, read_text

#: The keys of the tuning policy, and those whose values the rules ask about.
DEFAULT_NAMES = (
    "kernel.numa_balancing",
    "kernel.nmi_watchdog",
    "kernel.sched_autogroup_enabled",
    "kernel.perf_event_paranoid",
    "kernel.timer_migration",
    "vm.swappiness",
    "vm.dirty_ratio",
    "vm.dirty_background_ratio",
    "vm.dirty_bytes",
    "vm.dirty_background_bytes",
    "vm.zone_reclaim_mode",
    "vm.compaction_proactiveness",
    "vm.max_map_count",
    "vm.nr_hugepages",
    "vm.overcommit_memory",
    "vm.stat_interval",
    "net.core.rmem_max",
    "net.core.wmem_max",
)


def collect(host: Host, names: Iterable[str]) -> Facts:
    """Return ``settings`` (one dict per key) and the sysctl.d files that could not be read."""
    folders = sysctl_d.directories(host.etc, host.run, host.usr, host.lib)
    assignments, unreadable = sysctl_d.read(folders)
    settings = {name: _setting(host, name, assignments) for name in names}
    return {"settings": settings, "files": sysctl_d.config_files(folders), "unreadable_files": unreadable}


def _setting(host: Host, name: str, assignments: list[sysctl_d.Assignment]) -> Facts:
    text = read_text(host.proc("sys", sysctl_d.key_path(name)))
    value: Any = text if isinstance(text, Unknown) else _value(text)
    setters = sysctl_d.setters(assignments, name)
    lines = [{"file": one.file, "line": one.line, "value": _value(one.value or "")} for one in setters]
    return {
        "name": name,
        "value": value,
        "set_by": lines,
        "boot_value": lines[-1]["value"] if lines else None,
        "boot_file": f"{lines[-1]['file']}:{lines[-1]['line']}" if lines else None,
        "changes_at_boot": bool(lines) and not isinstance(value, Unknown) and lines[-1]["value"] != value,
        "disputed": len({one["value"] for one in lines}) > 1,
    }


def _value(text: str) -> Any:
    """Return a whole number as such, anything else as its words parted by one blank."""
    words = text.split()
    if len(words) == 1 and re.fullmatch(r"-?[0-9]{1,20}", words[0]):
        return int(words[0])
    return " ".join(words)
