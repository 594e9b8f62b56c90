# SPDX-License-Identifier: GPL-3.0-or-later
"""Many hosts' result documents as one: which hosts are alike, and what is odd about the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def newest(reports_root: Path) -> tuple[list[Document], list[str]]:
    """Return the newest result.json of every host, and a sentence for each that cannot be read."""
    documents, lost = [], []
    for host in sorted(path for path in reports_root.glob("*") if path.is_dir()):
        found = sorted(host.glob("*/result.json"))
        if not found:
            continue
        try:
            document = json.loads(found[-1].read_text(encoding="utf-8"))
            documents.append({"host": document["host"], "recorded": document["recorded"], **document})
        except (OSError, ValueError, KeyError, TypeError) as error:
            lost.append(f"{found[-1]} cannot be read: {error}")
    return documents, lost


def groups(documents: Iterable[Document]) -> list[list[Document]]:
    """Return the documents in groups of equal outcome and kernel, the largest first."""
    alike: dict[tuple[Any, ...], list[Document]] = {}
    for document in documents:
        alike.setdefault(tuple(_traits(document).items()), []).append(document)
    return sorted(alike.values(), key=lambda group: (-len(group), group[0]["host"]))


def _traits(document: Document) -> dict[str, str]:
    """Return what makes hosts alike: the state a fix ended in, however it got there, and the kernel."""
    traits = {"kernel": str(document.get("kernel_release"))}
    rows = {row["id"]: row for row in document["rows"]}
    for fix in document["fixes"]:
        status = "in place" if fix["status"] in ("ok", "changed") else fix["status"]
        found = [rows[each] for each in fix["rows"] if each in rows]
        traits[fix["name"]] = f"{status}: {_values(found)}" if status == "in place" else _why(status, fix)
    return traits


def _why(status: str, fix: dict[str, Any]) -> str:
    return f"{status}: {(fix.get('reason') or fix['summary']).partition(': ')[0]}"


def _values(rows: list[dict[str, Any]]) -> str:
    """Return the values read, those that many CPUs or functions share once with their number."""
    counts: dict[str, int] = {}
    for row in rows:
        text = f"{_setting(row)} {row['after']}"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(text if count == 1 else f"{text} on {count}" for text, count in counts.items())


def _setting(row: dict[str, Any]) -> str:
    target = str(row["target"])
    if row["kind"] == "sysctl" or row["kind"] == "module":
        return target
    return target.partition("/")[2] or str(row["kind"])


def lines(documents: list[Document]) -> list[str]:
    """Return the report: the largest group as a whole, of every other what is not as there."""
    found = groups(documents)
    if not found:
        return ["no host has a record yet"]
    usual = _traits(found[0][0])
    words = [f"{len(documents)} hosts in {len(found)} groups"]
    words += [f"{len(found[0])} alike: {names(each['host'] for each in found[0])}"]
    words += [f"    {trait}: {value}" for trait, value in usual.items()]
    for group in found[1:]:
        words.append(f"{len(group)} differing: {names(each['host'] for each in group)}")
        odd = _traits(group[0])
        for trait in dict.fromkeys([*usual, *odd]):
            if odd.get(trait) != usual.get(trait):
                words.append(
                    f"    {trait}: {odd.get(trait, 'not in its policy')}, not {usual.get(trait, 'there')}"
                )
    return words


def names(hosts: Iterable[str]) -> str:
    """Return host names, runs of numbers folded: gpu[001-098], spare."""
    runs: list[tuple[str, str, str, str]] = []  # prefix, first, last, suffix
    for prefix, number, suffix in sorted((_parts(host) for host in hosts), key=_order):
        if runs and number and _follows(runs[-1], prefix, number, suffix):
            runs[-1] = (prefix, runs[-1][1], number, suffix)
        else:
            runs.append((prefix, number, number, suffix))
    return ", ".join(
        f"{prefix}{first}{suffix}" if first == last else f"{prefix}[{first}-{last}]{suffix}"
        for prefix, first, last, suffix in runs
    )


def _parts(host: str) -> tuple[str, str, str]:
    """Split a name at its last number."""
    match = re.match(r"(.*?)(\d+)(\D*)\Z", host)
    return (match.group(1), match.group(2), match.group(3)) if match else (host, "", "")


def _order(parts: tuple[str, str, str]) -> tuple[str, str, int, str]:
    prefix, number, suffix = parts
    return prefix, suffix, int(number or 0), number


def _follows(run: tuple[str, str, str, str], prefix: str, number: str, suffix: str) -> bool:
    same = run[0] == prefix and run[3] == suffix and run[2] != ""
    # gpu9 is followed by gpu10, and gpu009 by gpu010, but not gpu9 by gpu010.
    return same and str(int(run[2]) + 1).zfill(len(run[2])) == number
