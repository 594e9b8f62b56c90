# SPDX-License-Identifier: GPL-3.0-or-later
"""Set and remove tokens of the kernel's command line for the next boot; see that every entry has them."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from . import boot_loader
from .boot_config import BootConfig, Entry, satisfied
from .boot_files import BootError, Content, content, put_back, replace, replace_all
from .boot_loader import Detected, Roots
from .cmdline import REPEATED, CommandLine, Token, parse, removals, wanted_tokens
from .journal import CannotStart, Journal, boot_id
from .kernel_files import read_line
from .rows import CHANGED, FAILED, OK, OVERRIDDEN, WOULD_CHANGE, Row

PRESENT, RESTORED = "present", "restored"
STATES = (PRESENT, RESTORED)
RECORD = "kernel-cmdline.json"


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller asks for. ``loader``: "auto" or one of boot_loader.LOADERS."""

    wanted: tuple[Token, ...]
    removed: tuple[Token, ...]
    state: str
    loader: str
    roots: Roots
    state_root: str
    regenerate: Optional[Sequence[str]] = None


def request(arguments: Mapping[str, Any]) -> Request:
    """Return a checked request from the module's arguments. Raises CannotStart."""
    try:
        wanted = wanted_tokens(arguments["parameters"] or ())
        removed = removals(arguments["remove"] or (), wanted)
    except ValueError as error:
        raise CannotStart(f"{error}; nothing was changed") from error
    if arguments["state"] == PRESENT and not wanted and not removed:
        raise CannotStart("state present needs parameters to set, or some to remove")
    return Request(
        tuple(wanted),
        tuple(removed),
        arguments["state"],
        arguments["loader"],
        boot_loader.roots_from(arguments),
        arguments["state_root"],
        arguments["regenerate"],
    )


def run(asked: Request, check: bool) -> dict[str, Any]:
    """Return the module's result. Raises CannotStart with one sentence; the files are then as before."""
    try:
        detected = _detected(asked)
        backend = boot_loader.config(detected.loader, asked.roots, asked.regenerate)
        result = _restored(asked, backend, check) if asked.state == RESTORED else _set(asked, backend, check)
    except (BootError, ValueError) as error:
        raise CannotStart(str(error)) from error
    running = _running(asked.roots)
    return {
        **result,
        "loader": detected.loader,
        "evidence": list(detected.evidence),
        "running": running.text,
        "reboot_required": asked.state == PRESENT and not _takes_effect(asked, running),
    }


def _detected(asked: Request) -> Detected:
    if asked.loader == "auto":
        return boot_loader.detect(asked.roots)
    return Detected(asked.loader, ("named by the option loader",))


def _running(roots: Roots) -> CommandLine:
    return parse(read_line(os.path.join(roots.procfs, "cmdline")) or "")


def _takes_effect(asked: Request, running: CommandLine) -> bool:
    return all(running.has(t) for t in asked.wanted) and all(running.lacks(r) for r in asked.removed)


def _set(asked: Request, backend: BootConfig, check: bool) -> dict[str, Any]:
    edits = backend.edits(asked.wanted, asked.removed)
    before = backend.entries()
    stale = bool(backend.regenerate) and bool(before) and not satisfied(before, asked.wanted, asked.removed)
    changed = bool(edits) or stale
    old = {path: content(path) for path in edits}
    rows = _rows(asked, before, pending=changed)
    if changed and not check:
        with _locked(asked):
            _record(asked, backend, edits)
            _carry_out(backend, edits, asked)
        rows = _read_back(rows, asked, backend)
    elif changed:
        rows = [row.with_status(WOULD_CHANGE, _REASON) if row.status == CHANGED else row for row in rows]
    return _result(changed, rows, _diff(old, edits), backend)


_REASON = "not in every boot entry"


@contextlib.contextmanager
def _locked(asked: Request) -> Iterator[None]:
    """Hold the lock that every writing run of this project takes."""
    with Journal(asked.state_root, boot_id(asked.roots.procfs)).locked():
        yield


def _carry_out(backend: BootConfig, edits: Mapping[str, Content], asked: Request) -> None:
    """Write, regenerate and check; on any failure everything is as it was. Raises BootError."""
    generated = backend.generated_files()
    old = {path: content(path) for path in (*edits, *generated)}
    replace_all(edits)
    try:
        backend.refresh()
        _check_entries(backend, asked)
    except BaseException as error:
        put_back({path: data for path, data in old.items() if content(path) != data})
        if isinstance(error, BootError):
            raise BootError(f"{error}; the old command line is configured again") from error
        raise


def _check_entries(backend: BootConfig, asked: Request) -> None:
    for entry in backend.entries():
        lost = [t for t in asked.wanted if not entry.line.has(t)]
        kept = [r for r in asked.removed if not entry.line.lacks(r)]
        if lost or kept:
            blame = backend.blame((lost or kept)[0])
            raise BootError(
                f"the boot entry {entry.name} {'lacks' if lost else 'still has'} "
                f"{' '.join(t.text for t in lost or kept)} after it was set{': ' if blame else ''}{blame}"
            )


def _rows(asked: Request, before: Sequence[Entry], pending: bool) -> list[Row]:
    """Return a row per token; before is what the entries have, the first wrong one if there is one."""
    rows = []
    for token, wanted in [(t, True) for t in asked.wanted] + [(r, False) for r in asked.removed]:
        target = token.text if token.name in REPEATED or (token.value and not wanted) else token.name
        desired = token.text if wanted else None
        row = Row(f"cmdline:{target}", "cmdline", target, fix="reboot", desired=desired)
        fine = [e.line.has(token) if wanted else e.line.lacks(token) for e in before]
        shown = next((e for e, right in zip(before, fine) if not right), before[0] if before else None)
        row.before = _value(token, shown.line) if shown else None
        row.status = CHANGED if pending and not (fine and all(fine)) else OK
        rows.append(row)
    return rows


def _value(token: Token, line: CommandLine) -> Optional[str]:
    """Return the token of this name that counts, as the line has it."""
    same = line.named(token.name)
    exact = [each for each in same if each.means(token)] if token.name in REPEATED else same
    return exact[-1].text if exact else None


def _read_back(rows: list[Row], asked: Request, backend: BootConfig) -> list[Row]:
    after = backend.entries()
    tokens = [*asked.wanted, *asked.removed]
    for row, token in zip(rows, tokens):
        row.after = _value(token, after[0].line) if after else None
        if row.status == CHANGED and not after:
            row.reason = "the boot entries are on partitions that are not mounted: not read back"
    return rows


def _result(
    changed: bool, rows: list[Row], diff: list[dict[str, str]], backend: BootConfig
) -> dict[str, Any]:
    failing = [row for row in rows if row.status in (FAILED, OVERRIDDEN)]
    failure = {"msg": "; ".join(f"{r.id}: {r.reason}" for r in failing)} if failing else {}
    return {
        "changed": changed,
        "failed": bool(failing),
        **failure,
        "rows": [row.as_dict() for row in rows],
        "diff": diff,
        "entries": [
            {"name": e.name, "release": e.release, "cmdline": e.line.text} for e in backend.entries()
        ],
    }


def _diff(old: Mapping[str, Content], new: Mapping[str, Content]) -> list[dict[str, str]]:
    return [
        {
            "before_header": path,
            "after_header": path,
            "before": (old[path] or b"").decode("utf-8", "replace"),
            "after": (data or b"").decode("utf-8", "replace"),
        }
        for path, data in new.items()
    ]


# The record: what each file held before this project's first change, and what it was made to hold.


def _record_path(asked: Request) -> str:
    return os.path.join(asked.state_root, RECORD)


def _record(asked: Request, backend: BootConfig, edits: Mapping[str, Content]) -> None:
    """Have the old content on disk before the first write; what was recorded first stays."""
    known = _recorded(asked)
    for path, data in edits.items():
        first = known.get(path, {}).get("old", _encode(content(path)))
        known[path] = {"old": first, "new": _encode(data)}
    _store(asked, known)


def _recorded(asked: Request) -> dict[str, dict[str, Optional[str]]]:
    data = content(_record_path(asked))
    if data is None:
        return {}
    try:
        files: dict[str, dict[str, Optional[str]]] = json.loads(data)["files"]
        return files
    except (ValueError, KeyError, TypeError) as error:
        raise BootError(f"the record {_record_path(asked)} is damaged ({error}): move it aside") from error


def _store(asked: Request, files: Mapping[str, Any]) -> None:
    document = {"version": 1, "files": files}
    data = (json.dumps(document, indent=1) + "\n").encode() if files else None
    try:
        replace(_record_path(asked), data, 0o600)
    except OSError as error:
        raise BootError(f"cannot write {_record_path(asked)}: {error}: nothing was changed") from error


def _encode(data: Content) -> Optional[str]:
    return None if data is None else base64.b64encode(data).decode("ascii")


def _decode(recorded: Optional[str]) -> Content:
    return None if recorded is None else base64.b64decode(recorded)


def _restored(asked: Request, backend: BootConfig, check: bool) -> dict[str, Any]:
    """Give the recorded files their old content, unless somebody else has changed them since."""
    recorded = _recorded(asked)
    edits: dict[str, Content] = {}
    rows = []
    for path, entry in recorded.items():
        now, old, ours = content(path), _decode(entry["old"]), _decode(entry["new"])
        row = Row(f"cmdline:{path}", "cmdline", path, "changed by us", "as found", fix="reboot")
        if now == old or (now is None and path not in backend.owned_files()):
            row.before = "as found"
        elif now != ours:
            row = row.with_status(FAILED, f"{path} was changed by someone else since: left as it is")
        else:
            edits[path] = old
            row = row.with_status(WOULD_CHANGE, "written by this tool") if check else row.with_status(CHANGED)
        rows.append(row)
    before = {path: content(path) for path in edits}
    if recorded and not check:
        with _locked(asked):
            replace_all(edits)
            # Also when all files are back: a killed run may have got no further than that.
            backend.refresh()
            _store(asked, {row.target: recorded[row.target] for row in rows if row.status == FAILED})
    return _result(bool(edits), rows, _diff(before, edits), backend)
