# SPDX-License-Identifier: GPL-3.0-or-later
"""The section on a kernel upgrade in system-improve.md: both boots side by side, from kernel_boot's facts."""

from __future__ import annotations

from typing import Any, Optional

from markdown_text import plain

Record = dict[str, Any]


def section(record: Record) -> str:
    """Return Markdown. ``record``: phase done or failed, before and after (boot_facts.Facts), journals."""
    before, after = record["before"], record["after"]
    lines = ["## Kernel upgrade", "", _verdict(record), "", "| | before | after |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {plain(old)} | {plain(new)} |"
        for name, old, new in [*_rows(before, after), *_run_time(record)]
    ]
    return "\n".join(lines)


def _verdict(record: Record) -> str:
    if record["phase"] == "done":
        return f"Kernel {plain(record['release'])} came up as promised and is the default."
    return f"Given up: {plain(record['failure'])}."


def _rows(before: Record, after: Record) -> list[tuple[str, str, str]]:
    rows = [
        ("kernel", before["release"], after["release"]),
        ("command line", before["cmdline"], after["cmdline"]),
        *((name.replace("_", " "), _text(before[name]), _text(after[name])) for name in _PLAIN),
        ("idle states", " ".join(before["idle_states"]), " ".join(after["idle_states"])),
        ("GPUs", _gpus(before["gpus"]), _gpus(after["gpus"])),
    ]
    moved = sorted(
        name
        for name, majors in before["device_majors"].items()
        if after["device_majors"].get(name, majors) != majors
    )
    majors = before["device_majors"], after["device_majors"]
    rows += [
        (f"major of {plain(name)}", _majors(majors[0][name]), _majors(majors[1][name])) for name in moved
    ]
    return rows


_PLAIN = ("amd_pstate", "scaling_driver", "cpuidle_driver")


def _run_time(record: Record) -> list[tuple[str, str, str]]:
    """Return the run-time settings whose values differed when this tool first saw each boot."""
    journals = record.get("journals") or {}
    old, new = (journals.get(record[boot]["boot_id"]) or {} for boot in ("before", "after"))
    return [
        (f"found at first: {plain(identity)}", _text(old[identity]), _text(new[identity]))
        for identity in sorted(old)
        if identity in new and old[identity] != new[identity]
    ]


def _text(value: Optional[str]) -> str:
    return "none" if value is None else str(value)


def _gpus(gpus: list[Record]) -> str:
    if not gpus:
        return "none"
    widths = ", ".join(f"x{gpu['link_width']} of x{gpu['max_link_width']}" for gpu in gpus)
    drivers = ", ".join(sorted({gpu["driver"] or "no driver" for gpu in gpus}))
    return f"{len(gpus)} ({drivers}), links {widths}"


def _majors(majors: list[int]) -> str:
    return ", ".join(str(major) for major in majors)
