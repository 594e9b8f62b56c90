# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdict, comparison, table, documents and drawing of an audit; and rule files that cannot be used."""

from __future__ import annotations

import copy
import html.parser
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.audit_hosts import (
    RULES_DIR,
    AuditHosts,
    audit_hosts,
    document,
    drawing,
    evaluate,
    reports,
    rules,
)
from support.play import REPO

TEMPLATES = str(REPO / "roles/host_audit/templates")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def hosts() -> AuditHosts:
    return audit_hosts()


def audit_of(hosts: AuditHosts, variant: str, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    return document.build("box", hosts.facts(variant), hosts.rows(variant), earlier)


def test_the_verdict_says_what_there_is_what_is_wrong_and_what_comes_first(hosts: AuditHosts) -> None:
    verdict = audit_of(hosts, "base")["verdict"]
    assert verdict.startswith("8 GPUs: 2 P0, 1 P1, 6 P2. First: A root port redirects")
    assert verdict.endswith(f"27 of {len(rules.load([str(RULES_DIR)]))} rules could not be checked.")


def test_a_host_without_a_gpu_is_said_to_have_none(hosts: AuditHosts) -> None:
    facts = copy.deepcopy(hosts.facts("base"))
    facts.facts.update(gpus=[], gpu_count=0)
    assert document.verdict(facts.facts, []) == "No GPU on this host: nothing to do."


def test_a_comparison_tells_gone_from_unclear(hosts: AuditHosts) -> None:
    before, after = hosts.rows("base"), hosts.rows("policy_applied")
    changes = document.changes(before, after)
    assert "finding:swappiness" in changes["gone"]
    assert "finding:sysctl_not_persisted:kernel.numa_balancing" in changes["appeared"]
    assert changes["changed"] == changes["unclear"] == []
    lost = [dict(row) for row in after if row["rule"] != "iommu_translated"]
    lost.append({**before[0], "rule": "iommu_translated", "outcome": "unknown"})
    assert document.changes(before, lost)["unclear"] == ["finding:iommu_translated"]
    other = [{**row, "before": "x"} if row["rule"] == "swappiness" else row for row in before]
    assert document.changes(before, other)["changed"] == ["finding:swappiness"]


def test_the_table_has_the_verdict_first_and_the_worst_finding_next(hosts: AuditHosts) -> None:
    lines = document.table(audit_of(hosts, "base")).splitlines()
    assert lines[0].startswith("box: 8 GPUs")
    assert [line.split()[0] for line in lines[1:4]] == ["P0", "P0", "P1"]
    assert lines[1].endswith("0000:00:01.1 and 7 more")


def test_the_limit_for_failing(hosts: AuditHosts) -> None:
    rows = [row for row in hosts.rows("base") if row["severity"] != "P0"]
    assert not document.worst_at_least(rows, "P0")
    assert document.worst_at_least(rows, "P1")
    assert document.worst_at_least(rows, "info")


class Page(html.parser.HTMLParser):
    """Collects what a page would load from elsewhere, and whether its tags are closed."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "iframe") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("variant", ["base", "faults", "nps4", "switch_acs", "server_far", "dimms_half"])
def test_the_page_stands_alone_and_is_whole(hosts: AuditHosts, variant: str) -> None:
    page = Page()
    page.feed(reports.render(audit_of(hosts, variant), TEMPLATES, "audit.html.j2"))
    assert page.loads == []
    assert page.open == []
    for gpu in hosts.facts(variant).facts["gpus"]:
        assert gpu["address"] in page.text


def test_what_a_host_says_cannot_become_markup(hosts: AuditHosts) -> None:
    audit = audit_of(hosts, "base")
    audit["host"] = "<script>alert(1)</script>"
    audit["rows"][0]["reason"] = "a | b <img src=x> `c`\n# d"
    page = reports.render(audit, TEMPLATES, "audit.html.j2")
    assert "<script" not in page
    assert "<img" not in page
    text = reports.render(audit, TEMPLATES, "system-improve.md.j2")
    assert "- a \\| b &lt;img src=x> \\`c\\` # d\n" in text
    assert evaluate.clean("a\x1b[31mb\nc\u202ed") == "a [31mb c d"


def test_the_document_says_effect_limits_and_cost_of_each_finding(hosts: AuditHosts) -> None:
    audit = audit_of(hosts, "base")
    text = reports.render(audit, TEMPLATES, "system-improve.md.j2")
    groups = document.groups(audit["rows"])
    for heading in ("what it will do", "what it will not do", "what it costs", "source", "takes effect"):
        assert text.count(f"\n| {heading} |") == len(groups)
    assert "## What could not be checked" in text


def boxes(svg: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return the rectangles of a drawing by class: x, y, right, bottom."""
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for rect in ElementTree.fromstring(svg).iter(SVG + "rect"):
        x, y, width, height = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        found.setdefault(rect.get("class", "").split()[0], []).append((x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("variant", ["base", "nps4", "switch", "card_switch", "faults"])
def test_boxes_lie_inside_their_node_and_do_not_overlap(hosts: AuditHosts, variant: str) -> None:
    facts = hosts.facts(variant).facts
    found = boxes(drawing.topology(facts, hosts.rows(variant)))
    assert len(found["gpu"]) == facts["gpu_count"]
    assert len(found["node"]) == len(facts["numa"]["nodes"])
    inner = found["gpu"] + found.get("port", []) + found.get("nic", [])
    for x, y, right, bottom in inner:
        assert any(a <= x and b <= y and right <= c and bottom <= d for a, b, c, d in found["node"])
    for number, (x, y, right, bottom) in enumerate(inner):
        for a, b, c, d in inner[number + 1 :]:
            assert right <= a or c <= x or bottom <= b or d <= y


def test_a_reduced_link_and_a_finding_are_told_in_words(hosts: AuditHosts) -> None:
    svg = ElementTree.fromstring(drawing.topology(hosts.facts("faults").facts, hosts.rows("faults")))
    texts = [element.text or "" for element in svg.iter(SVG + "text")]
    assert "x8 of x16 32 GT/s" in texts
    assert sum(line.get("class") == "link reduced" for line in svg.iter(SVG + "line")) == 1
    assert "P0" in texts
    assert any(title.text and "8 GPU(s)" in title.text for title in svg.iter(SVG + "title"))


# ---------------------------------------------------------------- files
def test_two_reports_of_one_second_get_two_directories(hosts: AuditHosts, tmp_path: Path) -> None:
    audit = audit_of(hosts, "base")
    folders = {reports.write(audit, str(tmp_path), TEMPLATES) for _ in range(3)}
    assert len(folders) == 3
    assert reports.earlier(str(tmp_path), "box") == json.loads(json.dumps(audit))


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".hidden"])
def test_a_host_name_cannot_lead_out_of_the_reports(name: str, tmp_path: Path) -> None:
    folder = Path(reports.host_folder(str(tmp_path), name))
    assert folder.resolve().parent == tmp_path.resolve()


def test_an_earlier_audit_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(reports.ReportError, match=r"x\.json cannot be used"):
        reports.earlier(str(tmp_path), "box", str(tmp_path / "x.json"))
    assert reports.earlier(str(tmp_path), "box") is None


def test_a_directory_that_cannot_be_written_is_one_sentence(hosts: AuditHosts, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(reports.ReportError, match="the report cannot be written below"):
        reports.write(audit_of(hosts, "base"), str(tmp_path / "file"), TEMPLATES)


# ---------------------------------------------------------------- rule files
GOOD = """
topic: own
rules:
  - {id: mine, title: Mine, severity: P2, when: gpu_count > 4, evidence: "{{ gpu_count }} GPUs", remedy: none,
     fix: runtime, effect: none, will_not: none, cost: none, source: me}
"""


def rule_dir(folder: Path, text: str) -> list[str]:
    (folder / "own.yml").write_text(text, encoding="utf-8")
    return [str(folder)]


def test_a_rule_of_ones_own_needs_no_python(hosts: AuditHosts, tmp_path: Path) -> None:
    own = rules.load(rule_dir(tmp_path, GOOD))
    row = hosts.evaluator.rows(own, hosts.facts("base"))[0]
    assert (row["id"], row["reason"], row["topic"]) == ("finding:mine", "8 GPUs", "own")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("topic: own", "", "needs a topic"),
        ("severity: P2", "severity: P9", "the rule mine needs a severity"),
        ("fix: runtime", "fix: magic", "needs a severity of .* and a fix"),
        ("cost: none,", "", "the rule mine lacks cost"),
        ("cost: none,", "cost: none, color: red,", "unknown field color"),
        ("rules:", "rules: [", "not readable YAML"),
        ("{id: mine", "{id: swappiness", "also in"),
    ],
)
def test_a_rule_file_that_cannot_be_used_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    folders = [str(RULES_DIR), *rule_dir(tmp_path, GOOD.replace(old, new))]
    with pytest.raises(rules.RuleError, match=message):
        rules.load(folders)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("gpu_cuont > 4", "'gpu_cuont' is undefined"),
        ("gpus[0].no_such_fact", "has no attribute"),
        ("gpu_count >", "cannot be evaluated"),
        ("gpu_count > 'x'", "not supported"),
        ("gpus.__class__.__mro__", "cannot be evaluated"),
        ("gpus.append(1)", "cannot be evaluated"),
    ],
)
def test_a_condition_that_cannot_be_evaluated_names_its_rule(
    hosts: AuditHosts, tmp_path: Path, expression: str, message: str
) -> None:
    own = rules.load(rule_dir(tmp_path, GOOD.replace("gpu_count > 4", f'"{expression}"')))
    with pytest.raises(
        rules.RuleError, match=f"the rule mine cannot be evaluated: .*{message}|mine {message}"
    ):
        hosts.evaluator.rows(own, hosts.facts("base"))


def test_a_rule_that_is_left_out_must_exist() -> None:
    kept = rules.load([str(RULES_DIR)], skip=["swappiness"])
    assert "swappiness" not in {rule["id"] for rule in kept}
    with pytest.raises(rules.RuleError, match="names swapiness"):
        rules.load([str(RULES_DIR)], skip=["swapiness"])


def test_unknown_facts_make_an_answer_unknown_unless_it_stands_without_them(tmp_path: Path) -> None:
    facts = evaluate.HostFacts(
        {"a": None, "b": {"c": None, "d": 1}, "e": None}, {"a": "no a", "b.c": "no c"}, {"e": "none"}
    )
    for expression, outcome in {
        "a == 1": "unknown",
        "b.c == 1": "unknown",
        "b.d == 2 and b.c == 1": "clear",
        "b.d == 1 or b.c == 1": "finding",
        "e == 1": "not_applicable",
        "known('a') or known('b.c') or known('e')": "clear",
        "known('b.d')": "finding",
    }.items():
        text = GOOD.replace("gpu_count > 4", f'"{expression}"').replace("{{ gpu_count }} GPUs", "evidence")
        own = rules.load(rule_dir(tmp_path, text))
        row = evaluate.Evaluator().rule_rows(own[0], facts)[0]
        assert row["outcome"] == outcome, expression
        assert row["reason"] or outcome == "clear"
