# SPDX-License-Identifier: GPL-3.0-or-later
"""The three steps of a boot with a way back: make it, boot the new kernel once, judge what came up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from . import boot_facts, boot_loader
from .boot_files import BootError, content, encoded, replace, replace_all
from .boot_loader import Detected, Roots
from .boot_menu import BootMenu, menu, running_line
from .boot_once import obstacle, watchdog
from .cmdline import CommandLine, Token, parse, wanted_tokens
from .journal import CannotStart, Journal
from .kernel_cmdline import RECORD
from .kernel_state import ARMED, DONE, FAILED, GUARDED, State, load, store
from .rows import FAILED as ROW_FAILED
from .rows import Row

STATES = ("guarded", "armed", "verified")
#: What ``verified`` finds: nothing booted yet, good, wrong in some way, or the old kernel is back by itself.
PENDING, GOOD, WRONG, FELL_BACK = "pending", "good", "wrong", "fell_back"
WATCHDOG = "systemd/system.conf.d/gpu-tuning-first-boot.conf"
_WATCHDOG_TEXT = """\
# Written by gpu-tuning for the first boot of a new kernel; gone when that has been judged.
[Manager]
RuntimeWatchdogSec=60s
RebootWatchdogSec=10min
"""


class KernelBoot:
    """One host's upgrade as far as it has come."""

    def __init__(self, arguments: Mapping[str, Any], roots: Roots) -> None:
        """Check the arguments and read the state. Raises CannotStart, BootError."""
        self.arguments, self.roots = arguments, roots
        try:
            self.parameters = wanted_tokens(arguments["parameters"] or ())
        except ValueError as error:
            raise CannotStart(f"{error}; nothing was changed") from error
        self.state_root: str = arguments["state_root"]
        self.state: State = load(self.state_root)
        self.facts = boot_facts.collect(roots)
        self.release: str = arguments["release"] or self.state.get("release") or self.facts["release"]

    def run(self, check: bool) -> dict[str, Any]:
        """Do the step that is asked for. Raises BootError with one sentence."""
        step = {"guarded": self._guard, "armed": self._arm, "verified": self._verify}[self.arguments["state"]]
        if check:
            result = step(True)
        else:
            with Journal(self.state_root, self.facts["boot_id"]).locked():
                self.state = load(self.state_root)
                result = step(False)
        record = {**self.state, "journals": self._journals()}
        return {"changed": False, "rows": [], "outcome": None, **result, "record": record}

    def _journals(self) -> dict[str, Any]:
        """Return the journal of run-time settings of each boot that the upgrade knows, by boot id."""
        boots = [(self.state.get(key) or {}).get("boot_id") for key in ("before", "after")]
        found = {}
        for boot in filter(None, boots):
            journal = Journal(self.state_root, boot)
            journal.load()
            found[boot] = {identity: entry["before"] for identity, entry in journal.entries.items()}
        return found

    def _detected(self) -> Detected:
        if self.arguments["loader"] != "auto":
            return Detected(self.arguments["loader"], ("named by the option loader",))
        return boot_loader.detect(self.roots)

    def _menu(self) -> BootMenu:
        return menu(self._detected(), self.roots, self.arguments["regenerate"])

    # guarded

    def _guard(self, check: bool) -> dict[str, Any]:
        """Have the way back boot by default, whatever happens from here on."""
        phase, release = self.state.get("phase"), self.facts["release"]
        tried = phase == FAILED and self.state.get("release") == release
        under_way = phase in (GUARDED, ARMED) or tried
        here = {"release": release, "cmdline": running_line(self.roots).text}
        # A way back that is under way stays: what runs now may be what is being tried.
        way_back = self.state["way_back"] if under_way else here
        if check:
            return {"changed": not self._menu().guarded()}
        new: State = {
            "phase": GUARDED,
            "release": self.release,
            "parameters": [token.text for token in self.parameters],
            "way_back": way_back,
            "before": self.facts,
        }
        if phase == ARMED and self.state.get("release") == self.release:
            new = self.state
        if not under_way:
            # From here on, restoring the command line means: as it was when this upgrade began.
            replace(os.path.join(self.state_root, RECORD), None)
        store(self.state_root, new)
        self.state = new
        return {"changed": self._menu().guard(way_back["release"], parse(way_back["cmdline"]))}

    # armed

    def _arm(self, check: bool) -> dict[str, Any]:
        """Have the new kernel boot next: once where that is possible, by default where it was accepted."""
        if check:
            return {"changed": True}
        if self.state.get("phase") not in (GUARDED, ARMED):
            raise BootError("there is no way back yet: run the role with the tag install first")
        entries = self._menu()
        line = entries.line_of(self.release)
        lost = [t.text for t in self.parameters if line is not None and not line.has(t)]
        if line is None or lost:
            raise BootError(
                f"kernel {self.release} has no boot entry"
                if line is None
                else f"the boot entry of kernel {self.release} lacks {' '.join(lost)}"
            )
        reason = obstacle(self._detected(), self.roots, os.path.join(self.roots.boot, "grub"))
        if reason and not self.arguments["accept_no_fallback"]:
            raise BootError(f"{reason}: set kernel_upgrade_accept_no_fallback to boot without a way back")
        self._set_watchdog(_WATCHDOG_TEXT if watchdog(self.roots) else None)
        store(self.state_root, {**self.state, "phase": ARMED, "once": reason is None, "before": self.facts})
        self.state = load(self.state_root)
        entries.prefer(self.release) if reason else entries.arm(self.release)
        return {"changed": True, "outcome": "once" if reason is None else "default"}

    def _set_watchdog(self, text: Optional[str]) -> None:
        path = os.path.join(self.roots.etc, WATCHDOG)
        data = None if text is None else encoded(text)
        if content(path) != data:
            replace_all({path: data})

    # verified

    def _verify(self, check: bool) -> dict[str, Any]:
        rows = self._judged()
        phase, outcome = self.state.get("phase"), self._outcome(rows)
        failing = [row for row in rows if row.status == ROW_FAILED]
        result: dict[str, Any] = {"outcome": outcome, "rows": [row.as_dict() for row in rows]}
        if outcome == PENDING or phase in (None, DONE) or check:
            changed = outcome != PENDING and phase in (GUARDED, ARMED)
            return {**result, "changed": changed, "msg": _not_as_promised(failing) or None}
        if outcome == GOOD:
            self._menu().promote(self.release)
            self._finish(DONE, None)
        else:
            self._give_up(_why(outcome, self.state, failing))
        return {**result, "changed": phase != FAILED, "msg": self.state.get("failure")}

    def _judged(self) -> list[Row]:
        before = self.state.get("before") or self.facts
        needed: Sequence[str] = self.arguments["modules"] or ()
        parameters = self.parameters or [Token(text) for text in self.state.get("parameters") or ()]
        return boot_facts.judged(before, self.facts, self.release, parameters, needed)

    def _outcome(self, rows: Sequence[Row]) -> str:
        phase, before = self.state.get("phase"), self.state.get("before") or {}
        good = all(row.status != ROW_FAILED for row in rows)
        if phase in (None, DONE):
            return GOOD if good else WRONG
        rebooted = before.get("boot_id") != self.facts["boot_id"]
        if not rebooted and phase != FAILED:
            return PENDING
        if good and phase != FAILED:
            return GOOD
        if phase == GUARDED:
            # Not booked for this boot: somebody has rebooted in between, into the way back.
            return PENDING
        return FELL_BACK if self._on_the_way_back() else WRONG

    def _on_the_way_back(self) -> bool:
        way_back = self.state.get("way_back") or {}
        same_line = _same(running_line(self.roots), parse(way_back.get("cmdline", "")))
        return bool(self.facts["release"] == way_back.get("release") and same_line)

    def _give_up(self, why: str) -> None:
        way_back = self.state["way_back"]
        self._menu().guard(way_back["release"], parse(way_back["cmdline"]))
        self._finish(FAILED, self.state.get("failure") or why)

    def _finish(self, phase: str, failure: Optional[str]) -> None:
        self._set_watchdog(None)
        store(self.state_root, {**self.state, "phase": phase, "failure": failure, "after": self.facts})
        self.state = load(self.state_root)


def _same(one: CommandLine, other: CommandLine) -> bool:
    def meaning(line: CommandLine) -> list[tuple[str, str]]:
        return sorted((token.name, token.value or "") for token in line.tokens)

    return meaning(one) == meaning(other)


def _why(outcome: str, state: State, failing: Sequence[Row]) -> str:
    release, way_back = state["release"], state["way_back"]["release"]
    if outcome == FELL_BACK:
        return (
            f"kernel {release} did not come up: it panicked, hung or was reset, and the host came back "
            f"by itself on kernel {way_back} with its old command line"
        )
    return f"kernel {release} came up wrong: {_not_as_promised(failing)}"


def _not_as_promised(failing: Sequence[Row]) -> str:
    return "; ".join(f"{r.target}: wanted {r.desired}, found {r.after}: {r.reason}" for r in failing)
