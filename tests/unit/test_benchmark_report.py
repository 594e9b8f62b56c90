# SPDX-License-Identifier: GPL-3.0-or-later
"""The record, the page and the JSON that a benchmark leaves."""

from __future__ import annotations

import copy
import html.parser
import json
import pathlib
import re
from typing import Any

import pytest
from benchmark_samples import ROOT, measurement

pytest.importorskip("scipy", reason="SciPy is missing: pip install -r requirements/benchmark.txt")
pytest.importorskip("matplotlib", reason="Matplotlib is missing: pip install -r requirements/benchmark.txt")
import jsonschema

from benchmark_report import conclude, page

SCHEMAS = {
    name: json.loads((ROOT / f"benchmark_report/{name}.schema.json").read_text())
    for name in ("measurement", "report")
}
EVIL = "</title><script>alert(1)</script> | **x**\nnext"


def compared(**changes: Any) -> dict[str, Any]:
    before = measurement("before", 1, settings={"sysctl:vm.swappiness": "60"})
    after = measurement("after", 2, settings={"sysctl:vm.swappiness": "10"}, **changes)
    return conclude.conclude(before, after, ["settings"])


class Page(html.parser.HTMLParser):
    """Collects what a browser would fetch and run, and checks that elements are closed."""

    VOID = {"meta", "br", "img", "link", "input", "hr", "path", "use", "rect", "image", "g"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            local = value is None or value.startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href") and not local:
                self.fetched.append(value or "")


def test_the_page_is_self_contained_and_has_all_four_plots() -> None:
    text = page.html(compared())
    found = Page(text)
    assert found.fetched == []
    assert "script" not in found.tags
    assert found.tags.count("svg") == 4
    assert not re.search(r"url\((?!#|'?#)", text)
    for word in ("payload ceiling", "time to first token", "P2P push, GB/s: before", "not explained"):
        assert word in text


def test_the_same_figures_give_the_same_page() -> None:
    report = compared()
    assert page.html(report) == page.html(copy.deepcopy(report))


def test_without_a_baseline_the_page_shows_figures_and_no_verdict() -> None:
    text = page.html(conclude.conclude(None, measurement("run", 1), []))
    assert "verdict improved" not in text
    assert "87.0 % of the ceiling" in text or "of the ceiling" in text


@pytest.mark.parametrize("part", ["fabric", "inference"])
def test_a_measurement_of_one_part_only(part: str) -> None:
    half = measurement("half", 1)
    half[part] = None
    text = page.html(conclude.conclude(None, half, []))
    assert Page(text).tags.count("svg") == 2


def test_a_refused_comparison_says_what_differs() -> None:
    after = measurement("after", 2)
    after["fingerprint"]["driver"] = "600.1"
    report = conclude.conclude(measurement("before", 1), after, ["settings"])
    assert "Not compared with before" in page.html(report)
    assert "driver: 595.45 -&gt; 600.1" in page.html(report)
    assert "- driver: 595.45 -> 600.1" in page.markdown(report)


def test_text_from_hosts_cannot_break_out() -> None:
    after = measurement(EVIL, 2)
    after["host"] = EVIL
    report = conclude.conclude(
        measurement("before", 1), after, ["settings"], findings=[{"title": EVIL, "remedy": EVIL}]
    )
    assert "<script>" not in page.html(report)
    record = page.markdown(report)
    assert "<script>" not in record
    assert all(line.count("|") in (0, 6) or "\\|" in line for line in record.splitlines())


def test_the_record_holds_before_after_verdicts_explanations_and_what_next() -> None:
    record = page.markdown(compared())
    assert "| P2P push, same NUMA node | 50.0 GB/s |" in record
    assert "**no change**" in record
    assert (
        "swappiness changed 60 -> 10; nothing is swapped while memory suffices: no effect expected" in record
    )
    assert "### What to try next" in record
    assert "checkpoint's own formats: 10." in record


def test_documents_follow_their_schemas() -> None:
    jsonschema.validate(measurement("x", 1), SCHEMAS["measurement"])
    for name in ("known-figures", "known-figures-later"):
        known = conclude.load(str(ROOT / f"roles/gpu_benchmark/files/baselines/{name}.json"))
        jsonschema.validate(known, SCHEMAS["measurement"])
    report = json.loads(json.dumps(compared(), allow_nan=False))
    jsonschema.validate(report, SCHEMAS["report"])
    broken = measurement("x", 1)
    broken["inference"]["runs"][0]["figures"]["completed"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMAS["measurement"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "no complete JSON"), ("[]", "no measurement"), ('{"schema": "x"}', "no measurement")],
)
def test_a_broken_baseline_is_one_sentence(tmp_path: pathlib.Path, text: str, sentence: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        conclude.load(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        conclude.load(str(tmp_path / "missing.json"))
