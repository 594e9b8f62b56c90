# SPDX-License-Identifier: GPL-3.0-or-later
"""CPUs: what they are and how many of them are at work (/proc/cpuinfo, /sys/devices/system/cpu)."""

from __future__ import annotations

from typing import Any, Union

from .reader import (
    Facts,
    Host,
    Unknown,
    absent,
    colon_fields,
    names_in,
    numbered,
    parse_ranges,
    read_bytes,
    read_flag,
    read_int,
    read_text,
)


def collect(host: Host) -> Facts:
    """Return the CPUs' facts; ``sockets``, ``cores`` and ``threads`` count online CPUs."""
    base = host.sys("devices/system/cpu")
    return {**_identity(host), **_counts(base), **_sets(base), "vulnerabilities": _vulnerabilities(base)}


def _identity(host: Host) -> Facts:
    """Read the first CPU's identity, and every CPU's microcode revision."""
    path = host.proc("cpuinfo")
    content = read_bytes(path)
    if isinstance(content, Unknown):
        lost = Unknown(content.reason)
        names = ("vendor", "model", "family", "model_number", "stepping", "microcode", "hypervisor", "cppc")
        return dict.fromkeys(names, lost)
    text = content.decode("utf-8", "replace")
    fields = colon_fields(text)
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    silent = Unknown(f"{path} does not say it")
    revisions = {line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("microcode")}
    return {
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer") or silent,
        "model": fields.get("model name") or fields.get("cpu") or fields.get("CPU part") or silent,
        "family": _number(fields.get("cpu family"), silent),
        "model_number": _number(fields.get("model"), silent),
        "stepping": _number(fields.get("stepping"), silent),
        "microcode": sorted(revisions) or silent,
        "hypervisor": "hypervisor" in flags,
        "cppc": "cppc" in flags,
    }


def _number(text: Any, otherwise: Unknown) -> Union[int, Unknown]:
    return int(text) if isinstance(text, str) and text.isdecimal() else otherwise


def _counts(base: str) -> Facts:
    """Count sockets, cores and threads from the topology of each CPU that has one."""
    cores, threads = set(), 0
    for number in numbered(base, "cpu"):
        package = read_int(f"{base}/cpu{number}/topology/physical_package_id")
        core = read_int(f"{base}/cpu{number}/topology/core_id")
        if isinstance(package, Unknown) or isinstance(core, Unknown):
            continue
        cores.add((package, core, _die(base, number)))
        threads += 1
    if not threads:
        lost = absent(f"{base}/cpu*/topology does not exist")
        return {"sockets": lost, "cores": lost, "threads": lost, "threads_per_core": lost}
    return {
        "sockets": len({package for package, _core, _die_id in cores}),
        "cores": len(cores),
        "threads": threads,
        "threads_per_core": round(threads / len(cores)),
    }


def _die(base: str, number: int) -> int:
    # Core ids may repeat between the dies of one package.
    die = read_int(f"{base}/cpu{number}/topology/die_id")
    return 0 if isinstance(die, Unknown) else die


def _sets(base: str) -> Facts:
    facts: Facts = {
        name: _cpu_list(f"{base}/{name}") for name in ("online", "present", "offline", "isolated")
    }
    online, offline = facts["online"], facts["offline"]
    facts["online_count"] = online if isinstance(online, Unknown) else len(parse_ranges(online))
    facts["offline_count"] = offline if isinstance(offline, Unknown) else len(parse_ranges(offline))
    facts["smt"] = {"active": read_flag(f"{base}/smt/active"), "control": read_text(f"{base}/smt/control")}
    return facts


def _cpu_list(path: str) -> Union[str, Unknown]:
    text = read_text(path)
    return "" if text == "(null)" else text


def _vulnerabilities(base: str) -> Facts:
    folder = f"{base}/vulnerabilities"
    return {name: read_text(f"{folder}/{name}") for name in names_in(folder)}
