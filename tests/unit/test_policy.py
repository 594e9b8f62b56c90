# SPDX-License-Identifier: GPL-3.0-or-later
"""The policy: overrides, what is refused, and what a run's tags select."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from gpu_tuning import policy, sysctl, tuner
from gpu_tuning.policy import PolicyError
from gpu_tuning.rows import Row
from support.modules import REPO

BASE: dict[str, Any] = {
    "swappiness": {"title": "Swap late", "sysctl_snapshot": {"vm.swappiness": 10}, "why": "weights stay"},
    "buffers": {"sysctl_snapshot": {"net.core.rmem_max": {"minimum": 16777216}, "net.core.wmem_max": 5}},
    "mrrs": {"pcie_maxreadreq": {"value": 4096, "vendor": "0x10de", "class": ["0x0300"]}},
    "idle": {"cpuidle_state": {"max_exit_latency_us": 2}},
    "peermem": {"kernel_module": {"nvidia-peermem": {"requires": ["rdma_device"]}}},
}


def role_policy(name: str = "host_tuning_policy") -> dict[str, Any]:
    defaults = yaml.safe_load((REPO / "roles/host_tuning/defaults/main.yml").read_text())
    return dict(defaults[name])


# Overrides


def test_one_value_is_changed_without_copying_the_rest() -> None:
    fixes = policy.merged(BASE, {"swappiness": {"sysctl_snapshot": {"vm.swappiness": 1}}})
    assert fixes["swappiness"] == {**BASE["swappiness"], "sysctl_snapshot": {"vm.swappiness": 1}}
    assert list(fixes) == list(BASE)
    assert BASE["swappiness"]["sysctl_snapshot"] == {"vm.swappiness": 10}


def test_a_fix_is_dropped_with_null() -> None:
    assert list(policy.merged(BASE, {"idle": None, "mrrs": None})) == ["swappiness", "buffers", "peermem"]


def test_one_key_of_a_fix_is_dropped_with_null() -> None:
    fixes = policy.merged(BASE, {"buffers": {"sysctl_snapshot": {"net.core.wmem_max": None}}})
    assert list(fixes["buffers"]["sysctl_snapshot"]) == ["net.core.rmem_max"]


def test_a_minimum_becomes_exact() -> None:
    fixes = policy.merged(BASE, {"buffers": {"sysctl_snapshot": {"net.core.rmem_max": 7}}})
    assert policy.sections(fixes)["sysctl_snapshot"]["settings"][1:2] == [
        {"name": "net.core.rmem_max", "value": "7", "match": "exact"}
    ]


def test_a_fix_of_ones_own_comes_last() -> None:
    fixes = policy.merged(BASE, {"mine": {"sysctl_snapshot": {"vm.stat_interval": 10}}})
    assert list(fixes)[-1] == "mine"
    assert policy.sections(fixes)["sysctl_snapshot"]["settings"][-1]["name"] == "vm.stat_interval"


def test_names_instead_of_a_limit() -> None:
    fixes = policy.merged(BASE, {"idle": {"cpuidle_state": {"max_exit_latency_us": None, "names": ["C6"]}}})
    assert policy.sections(fixes)["cpuidle_state"] == {"names": ["C6"]}


@pytest.mark.parametrize("overrides", [None, {}])
def test_no_overrides(overrides: Any) -> None:
    assert policy.merged(BASE, overrides) == BASE


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"mine": 5}, "fix mine must be a dict"),
        ({"mine": {}}, "fix mine must set exactly one of"),
        ({"mine": {"why": "because"}}, "fix mine must set exactly one of"),
        ({"mine": {"sysctl": {"vm.x": 1}}}, "fix mine has sysctl, which is none of"),
        ({"mine": {"sysctl_snapshot": {"vm.x": 1}, "cpuidle_state": {}}}, "fix mine must set exactly one of"),
        ({"mine": {"sysctl_snapshot": ["vm.x"]}}, "fix mine must set exactly one of"),
        ({"mine": {"sysctl_snapshot": {}}}, "fix mine sets nothing"),
        ({"mine": {"kernel_module": {}}}, "fix mine sets nothing"),
        (
            {"buffers": {"sysctl_snapshot": {"net.core.rmem_max": None, "net.core.wmem_max": None}}},
            "buffers sets nothing",
        ),
        (
            {"mine": {"sysctl_snapshot": {"vm.x": None}}},
            "vm.x must be a number or a text in quotes, not None",
        ),
        ({"mine": {"sysctl_snapshot": {"vm.x": {"minimum": None}}}}, "vm.x must be a number or a text"),
        (
            {"mine": {"sysctl_snapshot": {"vm.x": True}}},
            "vm.x must be a number or a text in quotes, not True",
        ),
        ({"mine": {"sysctl_snapshot": {"vm.x": [1, 2]}}}, "vm.x must be a number or a text"),
        (
            {"mine": {"sysctl_snapshot": {"vm.x": {"about": 5}}}},
            "vm.x must have a value or one of exact, minimum",
        ),
        (
            {"buffers": {"sysctl_snapshot": {"net.core.rmem_max": {"exact": 5}}}},
            "must have a value or one of",
        ),
        ({"mine": {"sysctl_snapshot": {"swappiness": 1}}}, "'swappiness' is not a sysctl name"),
        (
            {"mine": {"sysctl_snapshot": {"vm.swappiness": 1}}},
            "vm.swappiness is set by both swappiness and mine",
        ),
        (
            {"mine": {"sysctl_snapshot": {"vm/swappiness": 1}}},
            "vm.swappiness is set by both swappiness and mine",
        ),
        ({"mine": {"pcie_maxreadreq": {"value": 512}}}, "pcie_maxreadreq is set by both mrrs and mine"),
        (
            {"mine": {"kernel_module": {"nvidia_peermem": {}}}},
            "nvidia_peermem is set by both peermem and mine",
        ),
        ({"mine": {"kernel_module": {"x": None}}}, "x must be a dict with requires"),
        ({"mine": {"kernel_module": {"x": {"needs": []}}}}, "x must be a dict with requires"),
        (["swappiness"], "overrides must be a dict of fixes"),
        ("swappiness", "overrides must be a dict of fixes"),
    ],
)
def test_what_is_refused(overrides: Any, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        policy.merged(BASE, overrides)


# Tags

ALL_STEPS = ["apply", "verify", "record"]


@pytest.mark.parametrize(
    ("run", "skip", "steps", "fixes"),
    [
        (["all"], [], ALL_STEPS, list(BASE)),
        (["runtime"], [], ALL_STEPS, list(BASE)),
        (["tagged"], [], ALL_STEPS, list(BASE)),
        (["runtime", "pcie"], [], ALL_STEPS, ["mrrs"]),
        (["pcie"], [], ["apply"], ["mrrs"]),
        (["sysctl", "modules"], [], ["apply"], ["swappiness", "buffers", "peermem"]),
        (["cpuidle", "verify"], [], ["verify"], ["idle"]),
        (["snapshot"], [], ["snapshot"], list(BASE)),
        (["verify", "record"], [], ["verify", "record"], list(BASE)),
        (["all"], ["pcie"], ALL_STEPS, ["swappiness", "buffers", "idle", "peermem"]),
        (["all"], ["record"], ["apply", "verify"], list(BASE)),
        (["all"], ["runtime"], [], list(BASE)),
        (["untagged"], [], [], list(BASE)),
        (["all"], ["sysctl", "pcie", "cpuidle", "modules"], [], []),
    ],
)
def test_tags(run: list[str], skip: list[str], steps: list[str], fixes: list[str]) -> None:
    plan = policy.plan(BASE, None, run, skip)
    assert (plan["steps"], list(plan["fixes"])) == (steps, fixes)


def test_only_the_selected_kinds_have_sections() -> None:
    assert set(policy.plan(BASE, None, ["cpuidle", "pcie"])["sections"]) == {
        "cpuidle_state",
        "pcie_maxreadreq",
    }


# What belongs to what


@pytest.mark.parametrize(
    ("fix", "kind", "target", "belongs"),
    [
        ("swappiness", "sysctl", "vm.swappiness", True),
        ("swappiness", "sysctl", "vm.dirty_bytes", False),
        ("swappiness", "cpuidle", "vm.swappiness", False),
        ("peermem", "module", "nvidia_peermem", True),
        ("idle", "cpuidle", "cpu7", True),
        ("mrrs", "pcie_mrrs", "none", True),
    ],
)
def test_belongs(fix: str, kind: str, target: str, belongs: bool) -> None:
    assert policy.belongs(BASE[fix], Row(f"{kind}:{target}", kind, target)) is belongs


# The policy that the role has


def test_the_ten_fixes_are_whole() -> None:
    fixes = policy.merged(role_policy())
    assert len(fixes) == 10
    for name, fix in fixes.items():
        assert all(fix.get(text) for text in policy.TEXTS), name


def test_the_levers_are_whole_off_and_what_the_modules_take() -> None:
    levers = role_policy("host_tuning_levers")
    everything = {**role_policy(), **levers}
    assert policy.plan(everything) == policy.plan(role_policy())
    sections = policy.plan(everything, {name: {"enabled": True} for name in levers})["sections"]
    assert set(sections) == set(tuner.SECTIONS)
    for name, arguments in sections.items():
        assert set(arguments) <= set(tuner.SECTIONS[name].arguments), name
    assert all(lever.get(text) for lever in levers.values() for text in policy.TEXTS)


def test_the_ten_fixes_are_what_the_modules_take() -> None:
    sections = policy.plan(role_policy())["sections"]
    for name, arguments in sections.items():
        assert set(arguments) <= set(tuner.SECTIONS[name].arguments), name
    settings = {s["name"]: (s["match"], s["value"]) for s in sections["sysctl_snapshot"]["settings"]}
    assert settings == {
        "kernel.numa_balancing": ("exact", "0"),
        "kernel.nmi_watchdog": ("exact", "0"),
        "kernel.sched_autogroup_enabled": ("exact", "0"),
        "vm.swappiness": ("exact", "10"),
        "vm.dirty_ratio": ("exact", "5"),
        "vm.dirty_background_ratio": ("exact", "2"),
        "net.core.rmem_max": ("minimum", "16777216"),
        "net.core.wmem_max": ("minimum", "16777216"),
        "kernel.perf_event_paranoid": ("maximum", "1"),
    }
    sysctl.checked_settings([sysctl.setting(**s) for s in sections["sysctl_snapshot"]["settings"]])


def test_dropping_a_fix_that_is_not_there_is_refused() -> None:
    with pytest.raises(policy.PolicyError, match="overrides drop swapiness, which is no fix"):
        policy.merged({"swappiness": {"sysctl_snapshot": {"vm.swappiness": 10}}}, {"swapiness": None})
