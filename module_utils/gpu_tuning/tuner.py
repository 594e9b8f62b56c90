# SPDX-License-Identifier: GPL-3.0-or-later
"""From a module's arguments to its result: what sysctl_snapshot, ... and host_settings share.

``SECTIONS`` holds, per module, its own arguments (an argument_spec as plain data) and how they become a
Kind. Common arguments (state, roots) are in ``COMMON_ARGUMENTS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from . import cpuidle, kernel_module, pcie_mrrs, sysctl
from .engine import Kind, applied, captured, diff, restored
from .journal import CannotStart, Journal, boot_id
from .kernel_files import read_line
from .rows import CHANGED, CLAMPED, WOULD_CHANGE, Row, failures
from .typed import Any, NamedTuple, Optional

CAPTURED, APPLIED, RESTORED = "captured", "applied", "restored"
STATES = (CAPTURED, APPLIED, RESTORED)
STATE_ROOT = "/var/lib/gpu-tuning"

ArgumentSpec = dict[str, dict[str, Any]]
Arguments = dict[str, Any]


class BadInput(CannotStart):
    """The arguments or the host make the request impossible."""


COMMON_ARGUMENTS: ArgumentSpec = {
    "state": {"type": "str", "choices": list(STATES), "default": APPLIED},
    "procfs_root": {"type": "path", "default": "/proc"},
    "sysfs_root": {"type": "path", "default": "/sys"},
    "state_root": {"type": "path", "default": STATE_ROOT},
    "across_boot": {"type": "bool", "default": False},
    "verify": {"type": "bool", "default": False},
}


class Section(NamedTuple):
    """One module's own arguments, and the function that turns them into a Kind (ValueError: bad input)."""

    arguments: ArgumentSpec
    build: Callable[[Arguments], Kind]
    exclusive: tuple[tuple[str, ...], ...] = ()
    #: For ``applied``, one of each group must be given.
    needed: tuple[tuple[str, ...], ...] = ()


def _sysctls(arguments: Arguments) -> Kind:
    wanted = [sysctl.setting(s["name"], s["value"], s["match"]) for s in arguments["settings"] or ()]
    wanted += [sysctl.setting(name) for name in arguments["names"] or ()]
    return sysctl.Sysctls(sysctl.checked_settings(wanted), arguments["procfs_root"])


def _max_read_requests(arguments: Arguments) -> Kind:
    chosen = pcie_mrrs.selector(
        arguments["devices"],
        arguments["vendor"],
        arguments["device"],
        arguments["class"],
        arguments["driver"],
    )
    value = arguments["value"]
    return pcie_mrrs.MaxReadRequests(
        chosen,
        None if value is None else pcie_mrrs.checked_size(value),
        arguments["allow_above_max_payload"],
        arguments["procfs_root"],
        arguments["sysfs_root"],
    )


def _idle_states(arguments: Arguments) -> Kind:
    limit, names = arguments["max_exit_latency_us"], arguments["names"] or None
    if limit is not None and limit < 0:
        raise ValueError(f"max_exit_latency_us cannot be {limit}: give microseconds, 0 or more")
    return cpuidle.IdleStates(
        limit, None if names is None else cpuidle.checked_names(names), arguments["sysfs_root"]
    )


def _kernel_modules(arguments: Arguments) -> Kind:
    wanted = [kernel_module.wanted_module(m["name"], m["requires"]) for m in arguments["modules"] or ()]
    return kernel_module.KernelModules(
        kernel_module.checked_modules(wanted),
        arguments["procfs_root"],
        arguments["sysfs_root"],
        arguments["modprobe"],
    )


# The levers below are opt-in, and each is imported when a policy has it: a check every few minutes pays for
# what it uses.


def _access_control(arguments: Arguments) -> Kind:
    from . import acs

    return acs.AccessControl(bool(arguments["clear_redirects"]), arguments["sysfs_root"])


def _cpu_frequencies(arguments: Arguments) -> Kind:
    from . import cpufreq

    return cpufreq.CpuFrequencies(arguments["governor"], arguments["boost"], arguments["sysfs_root"])


def _link_power_management(arguments: Arguments) -> Kind:
    from . import aspm

    return aspm.LinkPowerManagement(arguments["policy"], arguments["gpu_links"], arguments["sysfs_root"])


def _transparent_huge_pages(arguments: Arguments) -> Kind:
    from . import thp

    return thp.TransparentHugePages(arguments["enabled"], arguments["defrag"], arguments["sysfs_root"])


def _gpu_persistence(arguments: Arguments) -> Kind:
    from . import gpu_persistence

    return gpu_persistence.GpuPersistence(arguments["mode"], arguments["sysfs_root"], arguments["nvidia_smi"])


_ON_OFF = {"type": "str", "choices": ["on", "off"]}

SECTIONS: dict[str, Section] = {
    "sysctl_snapshot": Section(
        {
            "settings": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "name": {"type": "str", "required": True},
                    "value": {"type": "str", "required": True},
                    "match": {"type": "str", "choices": list(sysctl.MATCHES), "default": sysctl.EXACT},
                },
            },
            "names": {"type": "list", "elements": "str"},
        },
        _sysctls,
        exclusive=(("settings", "names"),),
        needed=(("settings",),),
    ),
    "pcie_maxreadreq": Section(
        {
            "value": {"type": "int"},
            "devices": {"type": "list", "elements": "str"},
            "vendor": {"type": "str"},
            "device": {"type": "str"},
            "class": {"type": "list", "elements": "str"},
            "driver": {"type": "str"},
            "allow_above_max_payload": {"type": "bool", "default": False},
        },
        _max_read_requests,
        exclusive=tuple(("devices", other) for other in ("vendor", "device", "class", "driver")),
        needed=(("value",), ("devices", "vendor", "device", "class", "driver")),
    ),
    "cpuidle_state": Section(
        {
            "max_exit_latency_us": {"type": "int"},
            "names": {"type": "list", "elements": "str"},
        },
        _idle_states,
        exclusive=(("max_exit_latency_us", "names"),),
        needed=(("max_exit_latency_us", "names"),),
    ),
    "kernel_module": Section(
        {
            "modules": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "name": {"type": "str", "required": True},
                    "requires": {
                        "type": "list",
                        "elements": "str",
                        "choices": list(kernel_module.REQUIREMENTS),
                    },
                },
            },
            "modprobe": {"type": "path"},
        },
        _kernel_modules,
        needed=(("modules",),),
    ),
    "pcie_acs": Section(
        {"clear_redirects": {"type": "bool"}}, _access_control, needed=(("clear_redirects",),)
    ),
    "cpu_frequency": Section(
        {"governor": {"type": "str"}, "boost": _ON_OFF}, _cpu_frequencies, needed=(("governor", "boost"),)
    ),
    "pcie_aspm": Section(
        {
            "policy": {"type": "str", "choices": ["default", "performance", "powersave", "powersupersave"]},
            "gpu_links": _ON_OFF,
        },
        _link_power_management,
        needed=(("policy", "gpu_links"),),
    ),
    "transparent_hugepages": Section(
        {
            "enabled": {"type": "str", "choices": ["always", "madvise", "never"]},
            "defrag": {"type": "str", "choices": ["always", "defer", "defer+madvise", "madvise", "never"]},
        },
        _transparent_huge_pages,
        needed=(("enabled", "defrag"),),
    ),
    "gpu_persistence_mode": Section(
        {"mode": _ON_OFF, "nvidia_smi": {"type": "path"}}, _gpu_persistence, needed=(("mode",),)
    ),
}


def argument_spec(name: str) -> ArgumentSpec:
    """Return one module's whole argument_spec."""
    return {**SECTIONS[name].arguments, **COMMON_ARGUMENTS}


def run(sections: dict[str, Arguments], common: Arguments, check: bool) -> dict[str, Any]:
    """Capture, apply or restore the given sections and return the module's result.

    ``sections`` maps a module's name to its arguments. Raises CannotStart; then nothing has been changed,
    unless its own words say otherwise. A setting that fails is a row, and makes the result ``failed`` after
    all were tried.
    """
    _check_roots(common)
    kinds = _kinds(sections, common)
    journal = Journal(common["state_root"], boot_id(common["procfs_root"]), _kernel_release(common))
    if common["state"] != CAPTURED and not check:
        _check_privilege(common)
    rows = _rows(kinds, common, journal, check)
    changed = common["state"] != CAPTURED and any(_changes(row) for row in rows)
    return {
        "changed": changed,
        "rows": [row.as_dict() for row in rows],
        "diff": diff(rows) if common["state"] != CAPTURED else [],
        "boot_id": journal.boot,
        "kernel_release": journal.kernel_release,
        "journal": journal.path,
        "recorded": {identity: entry["before"] for identity, entry in journal.entries.items()},
        **_failure(rows, common["state"]),
        **(_verified(sections, common) if common.get("verify") and not check else {}),
    }


def _verified(sections: dict[str, Arguments], common: Arguments) -> dict[str, Any]:
    """Look everything up anew and read it once more, a pass that knows nothing of the one before."""
    if common["state"] != APPLIED:
        return {}
    return {"verified_rows": [row.as_dict() for row in captured(_kinds(sections, common))]}


def _kinds(sections: dict[str, Arguments], common: Arguments) -> list[Kind]:
    return [_kind(name, {**common, **arguments}, common["state"]) for name, arguments in sections.items()]


def _changes(row: Row) -> bool:
    """Tell whether the host is, or would be, another than before: also by a value that was clamped."""
    return row.status in (CHANGED, WOULD_CHANGE) or (row.status == CLAMPED and row.after != row.before)


def _kind(name: str, arguments: Arguments, state: str) -> Kind:
    section = SECTIONS[name]
    if state == APPLIED:
        for group in section.needed:
            if all(arguments.get(option) in (None, []) for option in group):
                raise BadInput(f"{name}: state applied needs {' or '.join(group)}")
    try:
        return section.build(arguments)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from error


def _check_roots(common: Arguments) -> None:
    for option in ("procfs_root", "sysfs_root", "state_root"):
        if not os.path.isabs(common[option]):
            raise BadInput(f"{option} must be an absolute path on the managed host, not {common[option]!r}")


def _kernel_release(common: Arguments) -> Optional[str]:
    return read_line(os.path.join(common["procfs_root"], "sys/kernel/osrelease"))


def _check_privilege(common: Arguments) -> None:
    live = (
        os.path.realpath(common["procfs_root"]) == "/proc" or os.path.realpath(common["sysfs_root"]) == "/sys"
    )
    if live and os.geteuid() != 0:
        raise BadInput("changing this host's settings needs root: run the play with --become")


def _rows(kinds: list[Kind], common: Arguments, journal: Journal, check: bool) -> list[Row]:
    state = common["state"]
    if state == RESTORED:
        _choose_boot(journal, common["across_boot"])
        if not os.path.exists(journal.path):
            return []
    if check and state == RESTORED:
        journal.load()
        return restored(kinds, journal, check=True)
    if check:
        return captured(kinds)
    with journal.locked():
        journal.load()
        if state == RESTORED:
            return restored(kinds, journal, check=False)
        return applied(kinds, journal) if state == APPLIED else captured(kinds, journal)


def _choose_boot(journal: Journal, across_boot: bool) -> None:
    """Turn to the newest recorded boot when this one has no record: only when told, else BadInput."""
    others = journal.other_boots()
    if os.path.exists(journal.path) or not others:
        return
    if not across_boot:
        raise BadInput(
            f"the recorded values are from another boot ({others[-1]}, this is {journal.boot}): a reboot has "
            "undone the runtime values already; to write them all the same, allow it with across_boot"
        )
    journal.boot = others[-1]


def _failure(rows: list[Row], state: str) -> dict[str, Any]:
    failing = failures(rows)
    if not failing or state == CAPTURED:
        return {"failed": False}
    listed = "; ".join(f"{row.id}: {row.status}: {row.reason}" for row in failing[:5])
    more = f" and {int(len(failing) - 5)} more" if len(failing) > 5 else ""
    return {"failed": True, "msg": f"{len(failing)} of {len(rows)} settings failed: {listed}{more}"}
