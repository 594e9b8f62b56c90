# SPDX-License-Identifier: GPL-3.0-or-later
"""From rows to words: each fix's outcome, the headline, the result document. Runs on the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Optional

from .drift import drifted as drifted
from .policy import ALL, TEXTS, Fix, belongs
from .rows import (
    CHANGED,
    CLAMPED,
    FAILED,
    FAILURES,
    NOT_APPLICABLE,
    OK,
    OVERRIDDEN,
    READ_ONLY,
    REJECTED,
    UNSUPPORTED,
    WOULD_CHANGE,
    Row,
)

SCHEMA_VERSION = 1

#: A fix of many rows is as its worst row; what does not apply on some CPUs does not hide the others.
_WORST_FIRST = (
    FAILED,
    REJECTED,
    CLAMPED,
    OVERRIDDEN,
    READ_ONLY,
    WOULD_CHANGE,
    CHANGED,
    OK,
    UNSUPPORTED,
    NOT_APPLICABLE,
)
_HEADLINE = (
    (NOT_APPLICABLE, "not applicable"),
    (UNSUPPORTED, "not supported by this kernel"),
    (READ_ONLY, "read-only"),
    (REJECTED, "rejected"),
    (CLAMPED, "clamped"),
    (OVERRIDDEN, "overridden"),
    (FAILED, "failed"),
)


def rows_from(documents: Iterable[dict[str, Any]]) -> list[Row]:
    """Return rows from a module's result."""
    return [Row(**document) for document in documents]


def verified(rows: list[Row], fresh: list[Row]) -> list[Row]:
    """Return the rows of a run with ``after`` from a separate, later pass over the same settings."""
    later = {row.id: row for row in fresh}
    return [_verified(row, later.get(row.id)) for row in rows]


def _verified(row: Row, fresh: Optional[Row]) -> Row:
    if fresh is None or row.before is None or row.status not in (OK, CHANGED):
        return row
    if fresh.status == OK:
        return row.with_status(row.status, row.reason, after=fresh.before)
    if fresh.before is None:
        return row.with_status(fresh.status, fresh.reason, after=None)
    reason = (
        f"set and read back as {row.after}, but a moment later it reads {fresh.before}: "
        "another program sets it; look for tuned, a cron job or a container"
    )
    return row.with_status(OVERRIDDEN, reason, after=fresh.before)


def outcomes(fixes: dict[str, Fix], rows: list[Row]) -> list[dict[str, Any]]:
    """Return one document per fix: status, summary for people, reason, texts, ids of its rows."""
    return [_outcome(name, fix, [row for row in rows if belongs(fix, row)]) for name, fix in fixes.items()]


def _outcome(name: str, fix: Fix, rows: list[Row]) -> dict[str, Any]:
    status = next((s for s in _WORST_FIRST if any(row.status == s for row in rows)), NOT_APPLICABLE)
    reasons = [row.reason for row in rows if row.status == status and row.reason]
    return {
        "name": name,
        "status": status,
        "summary": summary(rows),
        "reason": reasons[0] if reasons else None,
        **{text: fix.get(text) for text in TEXTS},
        "rows": [row.id for row in rows],
    }


def summary(rows: list[Row]) -> str:
    """Say in one line what rows of one fix hold: "C2 disabled on 128 of 128 CPUs"."""
    settled = [row for row in rows if row.before is not None]
    if not settled:
        return "; ".join(dict.fromkeys(cause(row.reason) for row in rows))
    if settled[0].kind == "cpuidle":
        return _idle_summary(settled)
    if settled[0].kind == "pcie_mrrs":
        return _max_read_request_summary(settled, rows)
    steps = Counter(f"{_common_target(row)} {_step(row)}" for row in settled)
    return ", ".join(f"{step} on {count}" if count > 1 else step for step, count in steps.items())


def _common_target(row: Row) -> str:
    """Return what a row sets, without the one of many CPUs, functions or links it sets it on."""
    if row.kind in ("pcie_acs", "gpu_persistence"):
        return {"pcie_acs": "redirects of bridges", "gpu_persistence": "GPUs"}[row.kind]
    return row.target.partition("/")[2] or row.target if row.kind in ("cpufreq", "pcie_aspm") else row.target


def _idle_summary(rows: list[Row]) -> str:
    cpus = Counter(row.target.partition("/")[2] for row in rows)
    done = Counter(row.target.partition("/")[2] for row in rows if _as_desired(row))
    verb = "to be disabled" if any(row.status == WOULD_CHANGE for row in rows) else "disabled"
    counted = cpus if verb == "to be disabled" else done
    return ", ".join(f"{state} {verb} on {counted[state]} of {cpus[state]} CPUs" for state in cpus)


def _max_read_request_summary(settled: list[Row], rows: list[Row]) -> str:
    before = ", ".join(sorted({str(row.before) for row in settled}, key=int))
    desired = str(settled[0].desired)
    done = sum(1 for row in settled if _as_desired(row) or row.status == WOULD_CHANGE)
    step = f"is {desired}" if before == desired else f"{before} -> {desired}"
    return f"MaxReadReq {step} on {done} of {len(rows)} functions"


def _as_desired(row: Row) -> bool:
    return row.status in (OK, CHANGED)


def _step(row: Row) -> str:
    if row.status == OK:
        return f"is {row.before}"
    if row.status == WOULD_CHANGE:
        return f"{row.before} -> {row.desired}"
    if row.status == CHANGED:
        return f"{row.before} -> {row.after}"
    if row.after in (None, row.before):
        return f"stays {row.before}"
    return f"{row.before} -> {row.after} instead of {row.desired}"


def cause(reason: Optional[str]) -> str:
    """Return the short cause that a reason begins with, before its evidence."""
    return (reason or "").partition(": ")[0]


def headline(fixes: list[dict[str, Any]]) -> str:
    """Say how a run went: "9 of 10 fixes applied, 1 not applicable: nvidia_peermem (no RDMA device)"."""
    counts = Counter(fix["status"] for fix in fixes)
    parts = []
    if counts[WOULD_CHANGE]:
        parts.append(f"{counts[WOULD_CHANGE]} of {len(fixes)} fixes would be applied")
        parts += [f"{counts[OK]} in place already"] if counts[OK] else []
    else:
        parts.append(f"{counts[OK] + counts[CHANGED]} of {len(fixes)} fixes applied")
    for status, words in _HEADLINE:
        named = ", ".join(
            f"{fix['name']} ({cause(fix['reason'])})" for fix in fixes if fix["status"] == status
        )
        parts += [f"{counts[status]} {words}: {named}"] if named else []
    return ", ".join(parts)


def failing(rows: list[Row], strict: Iterable[str] = (), lenient: Iterable[str] = ()) -> list[Row]:
    """Return the rows that fail the play: per row kind stricter (read-only too) or more lenient (none)."""
    strict, lenient = set(strict), set(lenient)
    return [
        row
        for row in rows
        if (row.status in FAILURES and lenient.isdisjoint((ALL, row.kind)))
        or (row.status == READ_ONLY and not strict.isdisjoint((ALL, row.kind)))
    ]


def result_document(
    host: str, recorded: str, machine: dict[str, Any], fixes: dict[str, Fix], rows: list[Row]
) -> dict[str, Any]:
    """Return result.json. ``recorded``: the time, UTC; ``machine``: boot_id and kernel_release."""
    documents = outcomes(fixes, rows)
    return {
        "schema_version": SCHEMA_VERSION,
        "host": host,
        "recorded": recorded,
        **machine,
        "headline": headline(documents),
        "fixes": documents,
        "rows": [row.as_dict() for row in rows],
    }


def lines(document: dict[str, Any], explain: bool) -> list[str]:
    """Return a run's summary for people: the headline, a line per fix, and why if ``explain``."""
    words = [document["headline"]]
    for fix in document["fixes"]:
        words.append(f"{fix['status']:<14} {fix['name']}: {fix['summary']}")
        if explain and fix["status"] == WOULD_CHANGE and fix["why"]:
            words.append(f"{'':<14} why: {fix['why']}")
    return words


def table(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the one table of all settings: a fix's rows that are alike in everything but the target folded.

    Each line has setting, before, desired, after, status, reason and, as fix, the fix's document.
    """
    by_id = {row["id"]: row for row in document["rows"]}
    return [line for fix in document["fixes"] for line in _table_lines(fix, [by_id[i] for i in fix["rows"]])]


def _table_lines(fix: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    columns = ("before", "desired", "after", "status", "reason")
    for row in rows:
        alike.setdefault((_setting(row), *(row[column] for column in columns)), []).append(row)
    return [
        {"setting": _counted(key[0], group), **dict(zip(columns, key[1:])), "fix": fix}
        for key, group in alike.items()
    ]


def _setting(row: dict[str, Any]) -> str:
    """Return what a row sets, without the CPU or PCI address it sets it on."""
    if row["kind"] == "cpuidle" and "/" in row["target"]:
        return f"idle state {row['target'].partition('/')[2]}"
    if row["kind"] in ("cpufreq", "pcie_aspm", "pcie_acs", "gpu_persistence"):
        return _common_target(Row(**row))
    return "MaxReadReq" if row["kind"] == "pcie_mrrs" else str(row["target"])


def _counted(setting: str, rows: list[dict[str, Any]]) -> str:
    if rows[0]["kind"] == "cpuidle" and rows[0]["before"] is not None:
        return f"{setting} on {len(rows)} CPUs"
    if rows[0]["kind"] == "pcie_mrrs" and rows[0]["before"] is not None:
        return f"{setting} of {len(rows)} functions ({', '.join(row['target'] for row in rows)})"
    return f"{setting} on {len(rows)}" if len(rows) > 1 else setting


def rollback_lines(rows: list[Row]) -> list[str]:
    """Return a rollback's summary for people: how many values are back, and which are not, and why."""
    if not rows:
        return ["nothing to roll back: no values are recorded on this host"]
    counts = Counter(row.status for row in rows)
    if counts[WOULD_CHANGE]:
        return [f"{counts[WOULD_CHANGE]} of {len(rows)} recorded values would be restored"]
    back = counts[OK] + counts[CHANGED]
    return [
        f"{back} of {len(rows)} recorded values are in place again, {counts[CHANGED]} of them by this run"
    ]


def snapshot_document(document: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return before.json or after.json: the rows under the head of result.json."""
    keep = ("schema_version", "host", "recorded", "boot_id", "kernel_release")
    return {**{key: document[key] for key in keep}, "rows": [row.as_dict() for row in rows]}


def found_first(rows: list[Row], journalled: dict[str, Any]) -> list[Row]:
    """Return the rows as they were before this tool's first run on this boot, as its journal has them."""
    return [
        row.replaced(before=journalled.get(row.id, row.before), after=None, status=OK, reason=None)
        if row.before is not None
        else row
        for row in rows
    ]


def as_left(rows: list[Row]) -> list[Row]:
    """Return the rows as the run left them."""
    return [row.replaced(before=None) for row in rows]
