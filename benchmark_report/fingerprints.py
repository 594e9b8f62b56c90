# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between two measurements besides what was meant to differ."""

from __future__ import annotations

import dataclasses
from typing import Any

#: Parts of a fingerprint that identify the host; what a comparison means to vary is named by the user.
IDENTITY = ("machine", "kernel", "cmdline", "driver", "gpus", "environment", "iommu", "governor", "settings")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that differs. ``part`` is settings, kernel, cmdline, ..., or workload."""

    part: str
    name: str
    before: Any
    after: Any

    def sentence(self) -> str:
        """Say it in words."""
        return f"{self.part} {self.name}".strip() + f": {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: Any) -> str:
    return "(absent)" if value is None else f"{value}"


def _text(value: Any) -> Any:
    """Return a value as it is compared: ansible-core 2.16 hands numbers over as text."""
    return str(value) if isinstance(value, (int, float)) else value


def _named(value: Any) -> dict[str, Any]:
    """Return a part as names and values, so that single entries can be told."""
    if isinstance(value, dict):
        return {str(name): entry for name, entry in value.items()}
    if isinstance(value, list):
        if all(isinstance(entry, dict) for entry in value):
            return {f"[{index}]": entry for index, entry in enumerate(value)}
        pairs = [str(entry).partition("=") for entry in value]
        return {name: text if mark else "set" for name, mark, text in pairs}
    return {"": value}


def _part(part: str, before: Any, after: Any) -> list[Difference]:
    one, other = _named(before), _named(after)
    names = [*one, *(name for name in other if name not in one)]
    return [
        Difference(part, name, one.get(name), other.get(name))
        for name in names
        if _text(one.get(name)) != _text(other.get(name))
    ]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Return everything that differs between two measurements' fingerprints and workloads.

    A part that one side did not record (None, or no such key) cannot be compared and is left out: an old or a
    hand-written baseline must not look different in everything.
    """
    found: list[Difference] = []
    one, other = before.get("fingerprint") or {}, after.get("fingerprint") or {}
    for part in IDENTITY:
        if one.get(part) is not None and other.get(part) is not None:
            found += _part(part, one[part], other[part])
    old, new = before.get("workload") or {}, after.get("workload") or {}
    for section in ("fabric", "inference"):
        if old.get(section) and new.get(section):
            found += _part("workload", old[section], new[section])
    return found


def unexpected(found: list[Difference], expected: list[str]) -> list[Difference]:
    """Return the differences that the user did not name; the workload is never one to vary."""
    return [one for one in found if one.part == "workload" or one.part not in expected]


def unrecorded(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the parts of the fingerprint that could not be compared."""
    one, other = before.get("fingerprint") or {}, after.get("fingerprint") or {}
    return [part for part in IDENTITY if one.get(part) is None or other.get(part) is None]
