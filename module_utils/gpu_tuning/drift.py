# SPDX-License-Identifier: GPL-3.0-or-later
"""What a pass that only looks says of settings that are not as the policy asks."""

from __future__ import annotations

from collections.abc import Iterable

from .rows import FAILURES, OVERRIDDEN, WOULD_CHANGE, Row


def drifted(fresh: list[Row]) -> list[Row]:
    """Return the rows of a pass that only looks: what is not as desired has been undone, or never done."""
    return [_drifted(row) for row in fresh]


def _drifted(row: Row) -> Row:
    row = row.with_status(row.status, row.reason, after=row.before)
    if row.status != WOULD_CHANGE:
        return row
    reason = (
        f"reads {row.before}, the policy asks for {row.desired}: not applied since the boot, or undone "
        "by a driver reload, another tool or a rollback"
    )
    return row.with_status(OVERRIDDEN, reason)


def lines(rows: Iterable[Row]) -> list[str]:
    """Return one line per group of failures that differ only in the CPU or address: what and by how much."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.status in FAILURES:
            key = (
                row.kind,
                _part(row),
                row.before,
                row.desired,
                row.status,
                None if _many(row) else row.reason,
            )
            groups.setdefault(key, []).append(row)
    return [_line(group) for group in groups.values()]


def _line(group: list[Row]) -> str:
    row = group[0]
    where = (
        row.id if len(group) == 1 else f"{row.kind} {_part(row) or ''} of {_listed(group)}".replace("  ", " ")
    )
    return f"{where}: {row.status}: {difference(row)}{row.reason}"


def difference(row: Row) -> str:
    """Say by how much a number is off: "50 above 10: ", and nothing where there is no number."""
    try:
        distance = int(str(row.before)) - int(str(row.desired))
    except ValueError:
        return ""
    if distance == 0:
        return ""
    return f"{abs(distance)} {'above' if distance > 0 else 'below'} {row.desired}: "


def _many(row: Row) -> bool:
    """Tell rows of which a host has one per CPU or function."""
    return row.kind in ("cpuidle", "pcie_mrrs", "cpufreq", "pcie_acs", "pcie_aspm", "gpu_persistence")


def _part(row: Row) -> str:
    """Return what a target names within a CPU or function, all of it where there is none."""
    if not _many(row):
        return row.target
    return row.target.partition("/")[2]


def _listed(group: list[Row]) -> str:
    names = [row.target.partition("/")[0] for row in group]
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]} ({len(names)})"
