# SPDX-License-Identifier: GPL-3.0-or-later
"""Power management: frequency drivers, governors, boost and idle states, over all CPUs."""

from __future__ import annotations

import os
from typing import Union

from .reader import (
    Facts,
    Host,
    Unknown,
    absent,
    format_ranges,
    names_in,
    numbered,
    parse_ranges,
    read_flag,
    read_int,
    read_text,
)

#: Per-policy file -> fact. Frequencies in kHz, as the kernel gives them.
_POLICY_FILES = {
    "driver": "scaling_driver",
    "governor": "scaling_governor",
    "epp": "energy_performance_preference",
}
_POLICY_NUMBERS = {
    "min_khz": "scaling_min_freq",
    "max_khz": "scaling_max_freq",
    "hardware_max_khz": "cpuinfo_max_freq",
    "bios_limit_khz": "bios_limit",
}


def collect(host: Host) -> Facts:
    """Return ``cpufreq`` (None without a driver), ``boost``, ``amd_pstate``, ``cppc`` and ``cpuidle``."""
    base = host.sys("devices/system/cpu")
    return {
        "cpufreq": _cpufreq(base),
        "boost": _boost(base),
        "amd_pstate": {"status": read_text(f"{base}/amd_pstate/status")},
        "intel_pstate": {"status": read_text(f"{base}/intel_pstate/status")},
        "cppc_in_sysfs": os.path.isdir(f"{base}/cpu0/acpi_cppc"),
        "cpuidle": _cpuidle(base),
    }


def _cpufreq(base: str) -> Union[Facts, Unknown]:
    """Return each setting's distinct values over all policies, with the CPUs of each value.

    {"driver": {"acpi-cpufreq": "0-127"}, "governor": {...}, "max_khz": {"3000000": "0-127"}, ...}
    """
    policies = _policies(base)
    if not policies:
        return absent(f"{base}/cpufreq has no policy: no frequency driver is loaded (usual in a VM)")
    found: dict[str, dict[str, list[int]]] = {}
    for policy in policies:
        cpus = _policy_cpus(policy)
        for fact, name in {**_POLICY_FILES, **_POLICY_NUMBERS}.items():
            text = read_text(f"{policy}/{name}")
            if not isinstance(text, Unknown):
                found.setdefault(fact, {}).setdefault(text, []).extend(cpus)
    facts: Facts = {
        fact: {text: format_ranges(cpus) for text, cpus in found[fact].items()}
        if fact in found
        else absent(f"no policy has {name}")
        for fact, name in {**_POLICY_FILES, **_POLICY_NUMBERS}.items()
    }
    facts["capped_cpus"] = format_ranges(cpu for policy in policies for cpu in _capped(policy))
    return facts


def _policies(base: str) -> list[str]:
    found = [f"{base}/cpufreq/policy{number}" for number in numbered(f"{base}/cpufreq", "policy")]
    if found:
        return found
    # Before 4.3 each CPU has its own directory.
    return [
        f"{base}/cpu{number}/cpufreq"
        for number in numbered(base, "cpu")
        if os.path.isfile(f"{base}/cpu{number}/cpufreq/scaling_driver")
    ]


def _policy_cpus(policy: str) -> list[int]:
    text = read_text(f"{policy}/affected_cpus")
    if not isinstance(text, Unknown):
        return parse_ranges(text.replace(" ", ","))
    digits = "".join(c for c in policy.replace("/cpufreq", "").rsplit("/", 1)[-1] if c.isdecimal())
    return [int(digits)] if digits else []


def _capped(policy: str) -> list[int]:
    """Return the policy's CPUs when someone set its ceiling below what the hardware offers."""
    ceiling = read_int(f"{policy}/scaling_max_freq")
    hardware = read_int(f"{policy}/cpuinfo_max_freq")
    if isinstance(ceiling, Unknown) or isinstance(hardware, Unknown) or ceiling >= hardware:
        return []
    return _policy_cpus(policy)


def _boost(base: str) -> Union[bool, Unknown]:
    """Tell whether boost is on: the global switch, intel_pstate's, else every policy's own."""
    boost = read_flag(f"{base}/cpufreq/boost")
    if not isinstance(boost, Unknown):
        return boost
    no_turbo = read_flag(f"{base}/intel_pstate/no_turbo")
    if not isinstance(no_turbo, Unknown):
        return not no_turbo
    for name in ("boost", "cpb"):
        flags = [read_flag(f"{policy}/{name}") for policy in _policies(base)]
        known = [flag for flag in flags if not isinstance(flag, Unknown)]
        if known:
            return all(known)
    return absent(f"{base}/cpufreq/boost does not exist, and no policy has a switch of its own")


def _cpuidle(base: str) -> Facts:
    return {
        "driver": read_text(f"{base}/cpuidle/current_driver"),
        "governor": _first_text(f"{base}/cpuidle/current_governor", f"{base}/cpuidle/current_governor_ro"),
        "states": _idle_states(base),
    }


def _first_text(*paths: str) -> Union[str, Unknown]:
    found: Union[str, Unknown] = absent(f"{paths[0]} does not exist")
    for path in paths:
        found = read_text(path)
        if not isinstance(found, Unknown):
            return found
    return found


def _idle_states(base: str) -> Union[list[Facts], Unknown]:
    """Group the CPUs' idle states by name and latency: numbers differ between CPUs, names need not."""
    groups: dict[tuple[str, str, int], dict[str, list[int]]] = {}
    for cpu in numbered(base, "cpu"):
        folder = f"{base}/cpu{cpu}/cpuidle"
        for name in names_in(folder):
            if name.startswith("state"):
                _add_state(groups, f"{folder}/{name}", cpu)
    if not groups:
        return absent(f"{base}/cpu*/cpuidle does not exist: this kernel manages no idle states")
    ordered = sorted(groups.items(), key=lambda item: item[0][2])
    return [_idle_state(key, cpus) for key, cpus in ordered]


def _add_state(groups: dict[tuple[str, str, int], dict[str, list[int]]], folder: str, cpu: int) -> None:
    name, desc = read_text(f"{folder}/name"), read_text(f"{folder}/desc")
    latency, disabled = read_int(f"{folder}/latency"), read_flag(f"{folder}/disable")
    if isinstance(name, Unknown) or isinstance(latency, Unknown):
        return
    group = groups.setdefault((name, "" if isinstance(desc, Unknown) else desc, latency), {})
    group.setdefault("all", []).append(cpu)
    if disabled is True:
        group.setdefault("disabled", []).append(cpu)


def _idle_state(key: tuple[str, str, int], cpus: dict[str, list[int]]) -> Facts:
    disabled = cpus.get("disabled", [])
    return {
        "name": key[0],
        "desc": key[1],
        "exit_latency_us": key[2],
        "cpu_count": len(cpus["all"]),
        "disabled_count": len(disabled),
        "enabled_cpus": format_ranges(set(cpus["all"]) - set(disabled)),
    }
