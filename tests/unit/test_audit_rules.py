# SPDX-License-Identifier: GPL-3.0-or-later
"""Each rule fires on a recorded host that has its fault and stays silent on one that has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.audit_hosts import RULES, RULES_DIR, VARIANTS, AuditHosts, finding_ids
from support.play import REPO

SCHEMA = json.loads((REPO / "roles/host_audit/files/rules.schema.json").read_text(encoding="utf-8"))
by_id = pytest.mark.parametrize("rule", RULES, ids=[rule["id"] for rule in RULES])


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> AuditHosts:
    return AuditHosts(tmp_path_factory.mktemp("audit_hosts"))


def outcomes(hosts: AuditHosts, rule: dict[str, Any], variant: str) -> set[str]:
    return {row["outcome"] for row in hosts.evaluator.rule_rows(rule, hosts.facts(variant))}


@pytest.mark.parametrize("path", sorted(RULES_DIR.glob("*.yml")), ids=lambda path: path.stem)
def test_a_rule_file_fits_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), SCHEMA)


def test_there_are_enough_rules_over_all_topics() -> None:
    assert len(RULES) >= 40
    assert {rule["topic"] for rule in RULES} == {path.stem for path in RULES_DIR.glob("*.yml")}


@by_id
def test_a_rule_fires_where_it_should(rule: dict[str, Any], hosts: AuditHosts) -> None:
    for variant in rule["proof"]["fires"]:
        assert "finding" in outcomes(hosts, rule, variant), variant


@by_id
def test_a_rule_is_silent_where_it_should_be(rule: dict[str, Any], hosts: AuditHosts) -> None:
    for variant in rule["proof"]["silent"]:
        found = outcomes(hosts, rule, variant)
        assert not found & {"finding", "unknown"}, (variant, found)


def test_every_variant_is_used() -> None:
    used = {name for rule in RULES for names in rule["proof"].values() for name in names}
    assert set(VARIANTS) - used == set()


def test_every_rule_can_be_asked_on_every_host(hosts: AuditHosts) -> None:
    """No rule breaks on any host: a fact that is missing there is 'unknown' or 'not applicable'."""
    for variant in VARIANTS:
        rows = hosts.rows(variant)
        assert {row["rule"] for row in rows} == {rule["id"] for rule in RULES}
        for row in rows:
            assert row["outcome"] == "clear" or row["reason"], row


# ---------------------------------------------------------------- exactly the findings a host implies
GPUS = [f"0000:{bus}:00.0" for bus in ("01", "11", "61", "71", "81", "91", "e1", "f1")]
PORTS = [f"0000:{bus}:01.1" for bus in ("00", "10", "60", "70", "80", "90", "e0", "f0")]


def each(rule: str, targets: list[str]) -> set[str]:
    return {f"{rule}:{target}" for target in targets}


#: What VALUES.md says of the recorded host: ACSCtl 0x1d on its root ports, IOMMU groups of type DMA-FQ, the
#: default sysctls, acpi-cpufreq, C2 of 100 us, MaxReadReq 512, two sockets, a BMC's VGA, no RDMA device.
AS_FOUND = (
    each("acs_redirect_root_port", PORTS)
    | each("pcie_read_request_default", GPUS)
    | {
        "iommu_translated",
        "numa_balancing_on",
        "swappiness",
        "acpi_cpufreq_on_amd",
        "deep_idle_states:C2",
        "nmi_watchdog_on",
        "autogroup_on",
        "dirty_ratio_high",
        "peermem_not_applicable",
        "cross_socket_pairs",
        "bmc_display:0000:22:00.0",
        "perf_closed",
        "socket_buffers_small",
    }
)


def findings(hosts: AuditHosts, variant: str) -> set[str]:
    return finding_ids(hosts.rows(variant))


def test_the_recorded_host_has_exactly_the_findings_its_values_imply(hosts: AuditHosts) -> None:
    assert findings(hosts, "base") == AS_FOUND


@pytest.mark.parametrize(
    ("variant", "appeared", "gone"),
    [
        ("idle", each("pcie_idle_speed", GPUS), set()),
        ("no_rebar", each("rebar_small", GPUS), set()),
        ("governor", {"governor_not_performance"}, set()),
        ("amd_pstate_active", set(), {"acpi_cpufreq_on_amd"}),
        ("amd_pstate_passive", {"amd_pstate_not_active"}, {"acpi_cpufreq_on_amd"}),
        ("nps2", {"several_nodes_per_socket"}, set()),
        ("nps4", {"several_nodes_per_socket", "gpus_unbalanced"}, set()),
        ("cpus_offline", {"cpus_offline"}, set()),
        ("rdma", {"peermem_missing"}, {"peermem_not_applicable"}),
        ("mrrs4096", each("read_request_volatile", GPUS), each("pcie_read_request_default", GPUS)),
        (
            "faults",
            {
                "gpu_off_the_bus:0000:01:00.0",
                "gpu_suspended:0000:11:00.0",
                "pcie_width_reduced:0000:61:00.0",
                "pcie_speed_between:0000:71:00.0",
                "pcie_payload_small:0000:81:00.0",
                "pcie_read_request_small:0000:91:00.0",
                "read_request_volatile:0000:e1:00.0",
            },
            # The GPU off the bus and the one with 64 readable bytes say nothing of MaxReadReq.
            each("pcie_read_request_default", [GPUS[0], GPUS[5], GPUS[6], GPUS[7]]),
        ),
        (
            "policy_applied",
            {
                "sysctl_not_persisted:kernel." + name
                for name in ("numa_balancing", "nmi_watchdog", "sched_autogroup_enabled")
            },
            {
                "numa_balancing_on",
                "swappiness",
                "nmi_watchdog_on",
                "autogroup_on",
                "dirty_ratio_high",
                "perf_closed",
                "socket_buffers_small",
            },
        ),
    ],
)
def test_an_option_of_the_generator_changes_exactly_the_findings_it_implies(
    hosts: AuditHosts, variant: str, appeared: set[str], gone: set[str]
) -> None:
    found = findings(hosts, variant)
    assert found - AS_FOUND == appeared
    assert AS_FOUND - found == gone


def test_what_cannot_be_read_is_said_and_is_no_finding(hosts: AuditHosts) -> None:
    """The GPU of which 64 bytes can be read: unknown with the reason, not 'has no capability'."""
    facts = hosts.facts("faults")
    number = GPUS.index("0000:f1:00.0")
    assert "64 bytes" in facts.unknown[f"gpus.{number}.max_payload_size"]
    unknown = {row["rule"]: row["reason"] for row in hosts.rows("faults") if row["outcome"] == "unknown"}
    assert unknown["pcie_payload_unsafe"].startswith("2 of 8: ")


def test_known_wrong_advice_is_never_more_than_a_note(hosts: AuditHosts) -> None:
    """Idle speed, peermem without RDMA, MaxReadReq for P2P, a BMC's VGA, an Arc's own link."""
    by_rule = {rule["id"]: rule for rule in RULES}
    notes = {
        "pcie_idle_speed",
        "peermem_not_applicable",
        "pcie_read_request_default",
        "bmc_display",
        "gpu_own_link_unreal",
    }
    assert {by_rule[name]["severity"] for name in notes} == {"info"}
    assert hosts.facts("base").facts["gpu_count"] == 8
    card = hosts.facts("card_switch").facts["gpus"][0]
    assert (card["link_width"], card["slot"]["width"], card["slot"]["speed_gts"]) == (1, 16, 32.0)
    assert not any(ident.startswith(("pcie_width", "pcie_slot")) for ident in findings(hosts, "card_switch"))


def test_a_server_is_seen_in_its_container_without_its_secrets(hosts: AuditHosts) -> None:
    facts = hosts.facts("server")
    server = facts.facts["gpu_processes"][0]
    assert server["container"] == "lxc:101"
    assert server["packages"] == {"torch": "2.8.0", "nvidia_nccl_cu12": "2.27.3", "sglang": "0.5.2"}
    assert server["environment"] == {"NCCL_DEBUG": "WARN"}
    assert server["gpus"] == ["0000:01:00.0", "0000:f1:00.0"]
    assert "hidden" not in json.dumps(facts.facts)


def test_the_winning_sysctl_line_is_named(hosts: AuditHosts) -> None:
    wanted = "finding:sysctl_changes_at_boot:vm.swappiness"
    row = next(row for row in hosts.rows("sysctl_files") if row["id"] == wanted)
    assert row["status"] == "overridden"
    assert "99-last.conf:2 sets 30" in row["reason"]
