# SPDX-License-Identifier: GPL-3.0-or-later
"""Say why a figure moved or did not, from the settings that changed.

A result that does not change is explained, not celebrated.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Optional

from .compare import IMPROVED, INCONCLUSIVE, NO_CHANGE, Comparison
from .fingerprints import Difference


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one kind of setting can do: ``can`` maps a family of metrics to how, ``cannot`` to why not."""

    pattern: str
    name: str
    can: dict[str, str]
    cannot: dict[str, str]
    otherwise: str


_POSTED = "are posted writes, bounded by MaxPayload {max_payload}"
_HOST_ONLY = "GPU copies run on the GPU's own engines from pinned memory"

RULES = [
    Rule(
        r"pcie_mrrs:", "MaxReadReq",
        {"h2d": "the GPU reads host memory: larger requests help if the reads run out of tags",
         "pull": "a pull reads the peer: larger requests help if the reads run out of tags"},
        {"push": f"P2P copies {_POSTED}", "d2h": f"device to host copies {_POSTED}",
         "staged": "half of a staged copy is posted writes and the CPU path bounds the rest"},
        "decoding moves a few KiB per step, far below any link's bandwidth",
    ),
    Rule(
        r"cpuidle:", "deep idle states",
        {"latency": "a launch no longer waits for a core to wake",
         "ttft": "no wake-up before a request is taken", "tpot": "no wake-up between decode steps",
         "throughput": "no wake-up between decode steps"},
        {}, "a 256 MiB copy takes milliseconds and a wake-up microseconds",
    ),
    Rule(
        r"sysctl:kernel\.numa_balancing$", "NUMA balancing",
        {"tpot": "no page scanning in the scheduler's process", "throughput": "no page scanning",
         "ttft": "no page scanning"},
        {}, "pinned pages are never moved",
    ),
    Rule(r"sysctl:kernel\.nmi_watchdog$", "the NMI watchdog", {}, {},
         "it costs one performance counter and an interrupt every few seconds"),
    Rule(r"sysctl:kernel\.sched_autogroup_enabled$", "scheduler autogroups",
         {"ttft": "threads of one session no longer share a slice", "throughput": "on busy CPUs"}, {},
         "it only matters where threads compete for CPUs"),
    Rule(r"sysctl:vm\.swappiness$", "swappiness", {}, {}, "nothing is swapped while memory suffices"),
    Rule(r"sysctl:vm\.dirty_", "dirty page limits", {}, {}, "only writes to disks notice"),
    Rule(r"sysctl:net\.core\.[rw]mem", "socket buffer limits", {}, {},
         "nothing of one host's inference goes over TCP but the requests themselves"),
    Rule(r"sysctl:kernel\.perf_event_paranoid$", "the perf permission", {}, {},
         "it is a permission and no speed"),
    Rule(r"module:nvidia_peermem$", "nvidia_peermem", {}, {}, "it serves RDMA adapters only"),
    Rule(
        r"(cmdline|iommu).*", "the kernel command line",
        {"push": "IOMMU and ACS decide the path of a peer copy", "pull": "IOMMU and ACS decide the path",
         "h2d": "a translating IOMMU costs bandwidth", "d2h": "a translating IOMMU costs bandwidth",
         "staged": "a translating IOMMU costs bandwidth", "latency": "translation and idle settings",
         "tpot": "CPU frequency and idle settings", "ttft": "CPU frequency and idle settings",
         "throughput": "CPU frequency and idle settings"},
        {}, "",
    ),
    Rule(
        r"governor.*", "the CPU frequency governor",
        {"tpot": "launches run at a higher clock", "throughput": "launches run at a higher clock",
         "ttft": "tokenising and launches run at a higher clock",
         "latency": "launches run at a higher clock"},
        {}, _HOST_ONLY,
    ),
    Rule(
        r"environment NCCL_", "NCCL's environment",
        {"tpot": "it decides how all-reduces travel", "throughput": "it decides how all-reduces travel",
         "ttft": "it decides how all-reduces travel"},
        {}, "plain copies do not go through NCCL",
    ),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Change:
    """One kind of setting that changed, with how many targets, and the rule that covers it."""

    name: str
    before: Any
    after: Any
    targets: int
    rule: Optional[Rule]

    def sentence(self) -> str:
        """Say what changed."""
        on = f" on {self.targets} targets" if self.targets > 1 else ""
        return f"{self.name} changed {self.before} -> {self.after}{on}"


def changes(found: list[Difference]) -> list[Change]:
    """Return the changes behind differences, equal ones of one kind (8 GPUs, 128 CPUs) taken together."""
    grouped: dict[tuple[str, str, str], list[Difference]] = {}
    rules: dict[str, Optional[Rule]] = {}
    for one in found:
        if one.part == "workload":
            continue
        key = one.name if one.part == "settings" else f"{one.part} {one.name}".strip()
        rule = next((rule for rule in RULES if re.match(rule.pattern, key)), None)
        name = rule.name if rule and one.part != "cmdline" else key.removeprefix("sysctl:")
        rules[name] = rule
        grouped.setdefault((name, str(one.before), str(one.after)), []).append(one)
    return [
        Change(name, before, after, len(same), rules[name]) for (name, before, after), same in grouped.items()
    ]


def _reason(change: Change, family: str, facts: dict[str, Any]) -> tuple[bool, str]:
    """Return (whether an effect on the family can be expected, why)."""
    rule = change.rule
    if rule is None:
        return True, "no rule here says what it does"
    if family in rule.can:
        return True, rule.can[family]
    return False, rule.cannot.get(family, rule.otherwise).format(**facts)


def explain(found: Comparison, changed: list[Change], facts: dict[str, Any]) -> str:
    """Return one or more sentences for a verdict. ``facts``: max_payload, settings_known."""
    if not changed and not facts.get("settings_known", True):
        return "The settings of both sides are not on record, so nothing can be said about causes."
    if not changed:
        return _without_change(found)
    said, expected = [], False
    for change in changed:
        likely, why = _reason(change, found.metric.family, facts)
        expected = expected or likely
        said.append(
            f"{change.sentence()}; {why}: {'an effect is possible' if likely else 'no effect expected'}"
        )
    return ". ".join(said) + ". " + _conclusion(found, expected)


def _without_change(found: Comparison) -> str:
    if found.verdict in (NO_CHANGE, INCONCLUSIVE):
        return "No recorded setting changed: no effect expected."
    return (
        "No recorded setting changed, so the cause is elsewhere (a warm cache, another load, clocks, "
        "temperature): find it before keeping the number."
    )


def _conclusion(found: Comparison, expected: bool) -> str:
    if found.verdict == NO_CHANGE:
        return "None seen." if not expected else "None seen: what it removes was not what bounds this figure."
    if found.verdict == INCONCLUSIVE:
        return "None shown: the runs do not tell."
    moved = "better" if found.verdict == IMPROVED else "worse"
    if expected:
        return f"It is {moved}."
    return (
        f"Yet it is {moved}: look for another cause (a warm prefix cache, clocks, temperature, another load) "
        "before keeping the number."
    )
