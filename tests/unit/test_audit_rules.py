# SPDX-License-Identifier: GPL-3.0-or-later
"""Each rule fires on a recorded host that has its fault and stays silent on one that has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.audit_hosts import RULES, RULES_DIR, VARIANTS, AuditHosts
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
