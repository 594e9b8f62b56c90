# SPDX-License-Identifier: GPL-3.0-or-later
"""The policy: named fixes, their merge with a site's overrides, and the module arguments they become.

Data flows one way: policy -> rows -> report. A fix is a dict with exactly one section of host_settings
(what to set) and the texts that explain it. This runs on the controller, as a filter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from .rows import Row
from .sysctl import EXACT, MATCHES, canonical_name

Fix = dict[str, Any]

#: What a user types after --tags, and the section of host_settings it selects.
SECTION_OF_TAG = {
    "sysctl": "sysctl_snapshot",
    "pcie": "pcie_maxreadreq",
    "cpuidle": "cpuidle_state",
    "modules": "kernel_module",
    "acs": "pcie_acs",
    "cpufreq": "cpu_frequency",
    "aspm": "pcie_aspm",
    "hugepages": "transparent_hugepages",
    "gpu_persistence": "gpu_persistence_mode",
}
KIND_OF_SECTION = {
    "sysctl_snapshot": "sysctl",
    "pcie_maxreadreq": "pcie_mrrs",
    "cpuidle_state": "cpuidle",
    "kernel_module": "module",
    "pcie_acs": "pcie_acs",
    "cpu_frequency": "cpufreq",
    "pcie_aspm": "pcie_aspm",
    "transparent_hugepages": "thp",
    "gpu_persistence_mode": "gpu_persistence",
}
#: In a list of kinds, every one of them.
ALL = "all"
#: Kinds of rows that are about files and the next boot, of whatever section.
FACT_KINDS = ("in_file", "at_boot", "owned_file", "daemon")
#: A fix that has this as false waits for an override that turns it on.
SWITCH = "enabled"
TEXTS = ("title", "why", "effect", "limits", "cost", "source")
STEPS = ("snapshot", "apply", "verify", "record")


class PolicyError(ValueError):
    """The policy or an override cannot mean anything; the sentence names the fix and what to write."""


def merged(policy: dict[str, Any], overrides: Optional[dict[str, Any]] = None) -> dict[str, Fix]:
    """Return the fixes in policy order, overrides merged in; one that is null or not enabled is dropped.

    Dicts merge, anything else replaces; null removes an option. Raises PolicyError.
    """
    for what, given in (("the policy", policy), ("overrides", overrides or {})):
        if not isinstance(given, dict):
            raise PolicyError(f"{what} must be a dict of fixes, each under its name, not {given!r}")
    for name, value in (overrides or {}).items():
        if value is None and name not in policy:
            raise PolicyError(f"overrides drop {name}, which is no fix of the policy: {', '.join(policy)}")
    fixes = _merge(policy, overrides or {})
    for name, fix in fixes.items():
        _check(name, fix)
    fixes = {name: _without_switch(fix) for name, fix in fixes.items() if fix.get(SWITCH, True)}
    _check_conflicts(fixes)
    return fixes


def _without_switch(fix: Fix) -> Fix:
    return {key: value for key, value in fix.items() if key != SWITCH}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merge(result[key], value)
        else:
            result[key] = value
    return result


def _check(name: str, fix: Any) -> None:
    if not isinstance(fix, dict):
        raise PolicyError(
            f"fix {name} must be a dict with one of {', '.join(KIND_OF_SECTION)}, or null to drop it"
        )
    unknown = set(fix) - set(KIND_OF_SECTION) - {SWITCH, *TEXTS}
    if unknown:
        known = ", ".join((*KIND_OF_SECTION, SWITCH, *TEXTS))
        raise PolicyError(f"fix {name} has {', '.join(sorted(unknown))}, which is none of {known}")
    if len(set(fix) & set(KIND_OF_SECTION)) != 1 or not isinstance(fix[section_of(fix)], dict):
        raise PolicyError(
            f"fix {name} must set exactly one of {', '.join(KIND_OF_SECTION)}, with its arguments"
        )
    if not isinstance(fix.get(SWITCH, True), bool):
        raise PolicyError(f"fix {name}: {SWITCH} must be true or false, not {fix[SWITCH]!r}")
    if not fix[section_of(fix)]:
        raise PolicyError(f"fix {name} sets nothing: to drop it, override it with null")


def _check_conflicts(fixes: dict[str, Fix]) -> None:
    """Refuse two fixes that set the same thing."""
    owner: dict[str, str] = {}
    for name, fix in fixes.items():
        for thing in _things(name, fix):
            if thing in owner:
                raise PolicyError(
                    f"{thing} is set by both {owner[thing]} and {name}: drop or change one of them"
                )
            owner[thing] = name


def _things(name: str, fix: Fix) -> list[str]:
    if "sysctl_snapshot" in fix:
        return [str(setting["name"]) for setting in _sysctl_settings(name, fix)]
    if "kernel_module" in fix:
        return [str(module["name"]).replace("-", "_") for module in _modules(name, fix)]
    return [section_of(fix)]


def section_of(fix: Fix) -> str:
    """Return the section of host_settings that a fix sets."""
    return next((section for section in KIND_OF_SECTION if section in fix), "")


def _sysctl_settings(name: str, fix: Fix) -> list[dict[str, str]]:
    """Turn {key: value} or {key: {minimum: value}} into the settings of sysctl_snapshot."""
    settings = []
    for key, wanted in fix["sysctl_snapshot"].items():
        match, value = EXACT, wanted
        if isinstance(wanted, dict):
            if len(wanted) != 1 or set(wanted) - set(MATCHES):
                raise PolicyError(
                    f"fix {name}: {key} must have a value or one of {', '.join(MATCHES)}, not {wanted}"
                )
            ((match, value),) = wanted.items()
        # None would become the text "None", and a kernel takes any text for some keys.
        if value is None or isinstance(value, (bool, list, dict)):
            raise PolicyError(f"fix {name}: {key} must be a number or a text in quotes, not {value!r}")
        try:
            settings.append({"name": canonical_name(key), "value": str(value), "match": match})
        except ValueError as error:
            raise PolicyError(f"fix {name}: {error}") from error
    return settings


def _modules(name: str, fix: Fix) -> list[dict[str, Any]]:
    """Turn {module: {requires: [...]}} into the modules of kernel_module."""
    modules = []
    for module, options in fix["kernel_module"].items():
        if not isinstance(options, dict) or set(options) - {"requires"}:
            raise PolicyError(f"fix {name}: {module} must be a dict with requires, not {options!r}")
        modules.append({"name": module, **options})
    return modules


def sections(fixes: dict[str, Fix]) -> dict[str, dict[str, Any]]:
    """Return the arguments of host_settings, one section per module that a fix needs."""
    result: dict[str, dict[str, Any]] = {}
    for name, fix in fixes.items():
        section = section_of(fix)
        if section == "sysctl_snapshot":
            result.setdefault(section, {"settings": []})["settings"] += _sysctl_settings(name, fix)
        elif section == "kernel_module":
            result.setdefault(section, {"modules": []})["modules"] += _modules(name, fix)
        else:
            result[section] = dict(fix[section])
    return result


def selected(fixes: dict[str, Fix], run_tags: Iterable[str], skip_tags: Iterable[str]) -> dict[str, Fix]:
    """Return the fixes that the tags of a run leave: all, unless tags name some of the kinds."""
    named = {SECTION_OF_TAG[tag] for tag in run_tags if tag in SECTION_OF_TAG} or set(SECTION_OF_TAG.values())
    named -= {SECTION_OF_TAG[tag] for tag in skip_tags if tag in SECTION_OF_TAG}
    return {name: fix for name, fix in fixes.items() if section_of(fix) in named}


def steps(run_tags: Iterable[str], skip_tags: Iterable[str]) -> list[str]:
    """Return which of STEPS the tags of a run ask for."""
    run, skip = set(run_tags), set(skip_tags)
    whole = run & {"all", "tagged", "runtime"}
    # Applying captures and journals by itself: a capture of its own would only cost a module call.
    asked = {"apply", "verify", "record"} if whole else run & set(STEPS)
    if run & set(SECTION_OF_TAG) and not run & {"snapshot", "verify"}:
        asked.add("apply")
    return [step for step in STEPS if step in asked and step not in skip and "runtime" not in skip]


def plan(
    policy: dict[str, Any],
    overrides: Optional[dict[str, Any]] = None,
    run_tags: Iterable[str] = ("all",),
    skip_tags: Iterable[str] = (),
    kinds: Iterable[str] = (),
) -> dict[str, Any]:
    """Return what a run does: steps, fixes, sections (arguments of host_settings). Raises PolicyError.

    ``kinds`` are row kinds that a site named elsewhere (lenient, strict), checked here with the rest.
    """
    unknown = set(kinds) - {ALL, *KIND_OF_SECTION.values(), *FACT_KINDS}
    if unknown:
        known = ", ".join((ALL, *KIND_OF_SECTION.values()))
        raise PolicyError(f"{', '.join(sorted(unknown))} is no kind of row: choose from {known}")
    run_tags, skip_tags = list(run_tags), list(skip_tags)
    fixes = selected(merged(policy, overrides), run_tags, skip_tags)
    asked = steps(run_tags, skip_tags) if fixes else []
    return {"steps": asked, "fixes": fixes, "sections": sections(fixes)}


def belongs(fix: Fix, row: Row) -> bool:
    """Tell whether a row is what a fix asked for (a dirty_* partner that comes along is not)."""
    section = section_of(fix)
    if row.kind != KIND_OF_SECTION[section]:
        return False
    if section == "sysctl_snapshot":
        return row.target in [canonical_name(key) for key in fix[section]]
    if section == "kernel_module":
        return row.target in [name.replace("-", "_") for name in fix[section]]
    return True
