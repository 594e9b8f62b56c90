# SPDX-License-Identifier: GPL-3.0-or-later
"""What one boot of a host looks like: compared before and after, and judged against what was promised."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Optional

from .boot_loader import Roots
from .cmdline import CommandLine, Token, parse
from .journal import boot_id
from .kernel_files import read_line, read_text
from .rows import FAILED, NOT_APPLICABLE, OK, Row

#: Everything below is JSON-ready.
Facts = dict[str, Any]
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def collect(roots: Roots) -> Facts:
    """Return the facts of the running boot."""
    return {
        "boot_id": boot_id(roots.procfs),
        "release": read_line(os.path.join(roots.procfs, "sys/kernel/osrelease")),
        "cmdline": read_line(os.path.join(roots.procfs, "cmdline")) or "",
        "device_majors": device_majors(roots),
        "gpus": gpus(roots),
        "modules": modules(roots),
        "amd_pstate": read_line(_cpu(roots, "amd_pstate/status")),
        "scaling_driver": read_line(_cpu(roots, "cpu0/cpufreq/scaling_driver")),
        "cpuidle_driver": read_line(_cpu(roots, "cpuidle/current_driver")),
        "idle_states": idle_states(roots),
    }


def _cpu(roots: Roots, name: str) -> str:
    return os.path.join(roots.sysfs, "devices/system/cpu", name)


def device_majors(roots: Roots) -> dict[str, list[int]]:
    """Return each name in /proc/devices' character section and its majors."""
    try:
        text = read_text(os.path.join(roots.procfs, "devices"))
    except OSError:
        return {}
    found: dict[str, list[int]] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found.setdefault(name, []).append(int(number))
    return found


def gpus(roots: Roots) -> list[dict[str, Any]]:
    """Return address, driver and link width (lanes now, lanes possible) of each NVIDIA display function."""
    top = os.path.join(roots.sysfs, "bus/pci/devices")
    found = []
    for address in sorted(_listed(top)):
        device = os.path.join(top, address)
        if read_line(f"{device}/vendor") != _NVIDIA:
            continue
        if not (read_line(f"{device}/class") or "").startswith(_DISPLAY):
            continue
        driver = os.path.join(device, "driver")
        found.append(
            {
                "address": address,
                "driver": os.path.basename(os.readlink(driver)) if os.path.islink(driver) else None,
                "link_width": _number(read_line(f"{device}/current_link_width")),
                "max_link_width": _number(read_line(f"{device}/max_link_width")),
            }
        )
    return found


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text and text.isdigit() else None


def modules(roots: Roots) -> list[str]:
    """Return the loaded modules' names."""
    try:
        return sorted(
            line.split()[0] for line in read_text(os.path.join(roots.procfs, "modules")).split("\n") if line
        )
    except OSError:
        return []


def idle_states(roots: Roots) -> list[str]:
    """Return the names of CPU 0's idle states, lightest first."""
    top = _cpu(roots, "cpu0/cpuidle")
    names = sorted((n for n in _listed(top) if n.startswith("state")), key=lambda n: int(n[5:] or 0))
    return [read_line(f"{top}/{name}/name") or "?" for name in names]


# Whether a parameter means anything to this CPU, before it is set.


def inapplicable(token: Token, roots: Roots, release: str) -> Optional[str]:
    """Return why a parameter can do nothing on this host with this kernel, None when it may."""
    if token.name == "amd_pstate" and token.value != "disable":
        return _without_amd_pstate(token, roots, release)
    if token.name == "processor.max_cstate":
        driver = read_line(_cpu(roots, "cpuidle/current_driver"))
        if driver == "acpi_idle":
            return None
        return f"the idle driver is {driver or 'none'}: only acpi_idle reads processor.max_cstate"
    return None


def _without_amd_pstate(token: Token, roots: Roots, release: str) -> Optional[str]:
    try:
        cpu = read_text(os.path.join(roots.procfs, "cpuinfo"))
    except OSError:
        cpu = ""
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", cpu, re.M)
    if not vendor or vendor.group(1) not in ("AuthenticAMD", "HygonGenuine"):
        return f"no AMD CPU: vendor_id is {vendor.group(1) if vendor else 'unknown'}"
    flags = re.search(r"^flags\s*:(.*)", cpu, re.M)
    if "cppc" not in (flags.group(1).split() if flags else ()) and not os.path.isdir(
        _cpu(roots, "cpu0/acpi_cppc")
    ):
        return "no CPPC: neither the CPU's flag cppc nor cpu0/acpi_cppc is there; enable CPPC in the firmware"
    needed = {"passive": (5, 17), "active": (6, 3), "guided": (6, 4)}.get(token.value or "", (5, 17))
    version = re.match(r"(\d+)\.(\d+)", release)
    if version and (int(version.group(1)), int(version.group(2))) < needed:
        return f"kernel {release} has no amd_pstate={token.value}: that came with {needed[0]}.{needed[1]}"
    return None


# After the boot.


def judged(
    before: Facts, after: Facts, release: str, wanted: Iterable[Token], needed: Iterable[str]
) -> list[Row]:
    """Return a row per promise: kernel, parameters, their drivers, GPUs, modules (``needed`` by name)."""
    line = parse(after["cmdline"])
    rows = [_row("release", release, after["release"], "booted another kernel")]
    for token in wanted:
        rows += _parameter_rows(token, line, after)
    return [*rows, *_gpu_rows(before, after), *_module_rows(before, after, needed)]


def _row(target: str, desired: Any, found: Any, wrong: str) -> Row:
    row = Row(f"boot:{target}", "boot", target, desired=desired, after=found, fix="reboot")
    return row if desired == found else row.with_status(FAILED, wrong)


def _parameter_rows(token: Token, line: CommandLine, after: Facts) -> list[Row]:
    there = token.text if line.has(token) else None
    rows = [_row(f"cmdline {token.text}", token.text, there, "not on the running kernel's command line")]
    if token.name == "amd_pstate" and token.value in ("active", "passive", "guided"):
        rows.append(
            _row(
                "amd_pstate", token.value, after["amd_pstate"], "the driver has another mode or is not there"
            )
        )
        driver = "amd-pstate-epp" if token.value == "active" else "amd-pstate"
        rows.append(
            _row("scaling_driver", driver, after["scaling_driver"], "another frequency driver took over")
        )
    if token.name == "processor.max_cstate" and (token.value or "").isdigit():
        rows.append(_idle_row(int(token.value or 0), after))
    return rows


def _idle_row(limit: int, after: Facts) -> Row:
    """The deepest state named C<n> may be C<limit>; POLL is none of them."""
    numbers = [int(m.group(1)) for m in (re.match(r"C(\d+)", name) for name in after["idle_states"]) if m]
    row = Row("boot:idle_states", "boot", "idle_states", None, f"C{int(limit)} or lighter", fix="reboot")
    row.after = " ".join(after["idle_states"])
    if not numbers:
        return row.with_status(NOT_APPLICABLE, "no idle state has a number here")
    return (
        row if max(numbers) <= limit else row.with_status(FAILED, "deeper idle states are there all the same")
    )


def _gpu_rows(before: Facts, after: Facts) -> list[Row]:
    now = {gpu["address"]: gpu for gpu in after["gpus"]}
    rows = []
    for old in before["gpus"]:
        target = f"gpu {old['address']}"
        row = Row(f"boot:{target}", "boot", target, old["link_width"], old["max_link_width"], fix="reboot")
        gpu = now.get(old["address"])
        if gpu is None:
            rows.append(row.with_status(FAILED, "was there before the reboot and is gone"))
            continue
        row.after, row.desired = gpu["link_width"], gpu["max_link_width"]
        rows.append(_link_judged(row, old, gpu))
    return rows


def _link_judged(row: Row, old: dict[str, Any], new: dict[str, Any]) -> Row:
    width, full, was = new["link_width"], new["max_link_width"], old["link_width"]
    if old["driver"] and new["driver"] != old["driver"]:
        return row.with_status(FAILED, f"the driver was {old['driver']} and is {new['driver'] or 'none'}")
    if width is None or full is None or width >= full:
        return row
    if was is not None and width >= was:
        return row.with_status(OK, f"x{int(width)} of x{int(full)} lanes, as before the reboot")
    return row.with_status(FAILED, f"the link came up with x{int(width)} of x{int(full)} lanes")


def _module_rows(before: Facts, after: Facts, needed: Iterable[str]) -> list[Row]:
    """The modules asked for, and NVIDIA's if they were loaded before."""
    names = [name.replace("-", "_") for name in needed]
    names += [name for name in before["modules"] if name.startswith("nvidia") and name not in names]
    return [
        _row(f"module {name}", "loaded", "loaded" if name in after["modules"] else "absent", "not loaded")
        for name in names
    ]
