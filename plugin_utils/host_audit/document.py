# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the audit document out of rows and facts: verdict, groups, comparison, the table for a terminal."""

from __future__ import annotations

import difflib
import time
from typing import Any, Optional

from .evaluate import CARRIED, CLEAR, FINDING, NOT_APPLICABLE, UNKNOWN, HostFacts
from .rules import SEVERITIES

SCHEMA = 1
Row = dict[str, Any]
Audit = dict[str, Any]


def build(host: str, facts: HostFacts, rows: list[Row], earlier: Optional[Audit] = None) -> Audit:
    """Return the whole audit of one host, JSON-ready; roles/host_audit/files/audit.schema.json fits it."""
    return {
        "schema": SCHEMA,
        "host": host,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "verdict": verdict(facts.facts, rows),
        "counts": counts(rows),
        "rows": rows,
        "compared_with": None if earlier is None else earlier["created_at"],
        "changes": None if earlier is None else changes(earlier["rows"], rows),
        "facts": facts.facts,
        "unknown": facts.unknown,
        "absent": facts.absent,
    }


def counts(rows: list[Row]) -> dict[str, int]:
    """Return how many rules found something, by severity, and how many have each other outcome."""
    found = {severity: _rules(rows, FINDING, severity) for severity in SEVERITIES}
    return {**found, **{outcome: _rules(rows, outcome) for outcome in (UNKNOWN, CLEAR, NOT_APPLICABLE)}}


def _rules(rows: list[Row], outcome: str, severity: Optional[str] = None) -> int:
    wanted = (row for row in rows if row["outcome"] == outcome and severity in (None, row["severity"]))
    return len({row["rule"] for row in wanted})


def verdict(facts: dict[str, Any], rows: list[Row]) -> str:
    """Return one line: what there is, what is wrong with it, what comes first."""
    number, count = counts(rows), facts["gpu_count"]
    gpus = f"{count} GPU{'s' if count > 1 else ''}" if count else "No GPU on this host"
    wrong = ", ".join(f"{number[severity]} {severity}" for severity in SEVERITIES[:-1] if number[severity])
    first = next((row for row in rows if row["outcome"] == FINDING and row["severity"] != "info"), None)
    parts = [f"{gpus}: {wrong or 'nothing to do'}."]
    if first:
        parts.append(f"First: {first['title']} ({first['fix']}).")
    if number[UNKNOWN]:
        parts.append(f"{number[UNKNOWN]} of {len({row['rule'] for row in rows})} rules could not be checked.")
    return " ".join(parts)


def groups(rows: list[Row], outcome: str = FINDING) -> list[dict[str, Any]]:
    """Return one dict per rule with the outcome: the rule's own texts and its ``rows``, worst first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["outcome"] == outcome:
            group = {name: row[name] for name in (*CARRIED, "rule", "fix")}
            found.setdefault(row["rule"], {**group, "rows": []})["rows"].append(row)
    return list(found.values())


def where(group: dict[str, Any]) -> str:
    """Return a group's targets: all of a few, else the first ones and their number."""
    targets = [row["target"] for row in group["rows"] if row["target"]]
    if len(targets) <= 2:
        return ", ".join(targets)
    return f"{targets[0]} and {len(targets) - 1} more"


def changes(before: list[Row], after: list[Row]) -> dict[str, list[str]]:
    """Return the ids of findings that appeared, are gone, or show another value, and what is unclear now.

    A finding whose rule cannot be checked any more is not gone: it is ``unclear``.
    """
    old, new = _findings(before), _findings(after)
    unknown = {row["rule"] for row in after if row["outcome"] == UNKNOWN}
    missing = [ident for ident in old if ident not in new]
    return {
        "appeared": sorted(ident for ident in new if ident not in old),
        "gone": sorted(ident for ident in missing if old[ident]["rule"] not in unknown),
        "unclear": sorted(ident for ident in missing if old[ident]["rule"] in unknown),
        "changed": sorted(
            ident
            for ident in new
            if ident in old and any(old[ident][name] != new[ident][name] for name in ("before", "severity"))
        ),
    }


def _findings(rows: list[Row]) -> dict[str, Row]:
    return {row["id"]: row for row in rows if row["outcome"] == FINDING}


def lines(rows: list[Row]) -> str:
    """Return one line per finding, for a comparison of two audits as texts."""
    found = [
        f"{row['severity']:4} {row['id'][8:]}: {row['reason']}" for row in rows if row["outcome"] == FINDING
    ]
    return "".join(line + "\n" for line in found)


def difference(before: Optional[Audit], after: Audit) -> str:
    """Return a unified difference of two audits' findings, "" when they are the same."""
    old = lines(before["rows"]) if before else ""
    first = f"findings of {before['created_at']}" if before else "no earlier audit"
    names = (first, f"findings of {after['created_at']}")
    texts = (old.splitlines(keepends=True), lines(after["rows"]).splitlines(keepends=True))
    return "".join(difflib.unified_diff(*texts, *names, n=0))


def table(audit: Audit) -> str:
    """Return the findings as a short table for a terminal, the verdict first."""
    out = [f"{audit['host']}: {audit['verdict']}"]
    for group in groups(audit["rows"]):
        place = where(group)
        what = f"{group['title']}{' - ' + place if place else ''}"
        out.append(f"  {group['severity']:4}  {group['fix']:8}  {what}")
    changed = audit["changes"]
    if changed and any(changed.values()):
        told = [f"{len(ids)} {name}" for name, ids in changed.items() if ids]
        out.append(f"  since {audit['compared_with']}: {', '.join(told)}")
    return "\n".join(out)


def worst_at_least(rows: list[Row], severity: str) -> bool:
    """Tell whether a finding is as bad as ``severity`` or worse."""
    limit = SEVERITIES.index(severity)
    return any(row["outcome"] == FINDING and SEVERITIES.index(row["severity"]) <= limit for row in rows)
