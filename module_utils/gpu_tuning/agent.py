# SPDX-License-Identifier: GPL-3.0-or-later
"""The program on a managed host: applies the recorded policy at boot, checks it, writes metrics.

It is this package's own code, packed by agent_archive; systemd and udev start it (persist_files).
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time

from . import gpu_health, tuner
from .drift import drifted
from .journal import CannotStart, JournalBusy
from .kernel_files import error_text
from .metrics import exposition
from .owned_files import replace_file
from .persist_places import BY_FILE, POLICY, Places
from .rows import CHANGED, FAILURES, Row, failures
from .typed import Any, Optional

USAGE = """\
usage: gpu-tuning.pyz [--policy FILE] COMMAND

  apply [--device ADDRESS]  set what the policy asks for and no other file sets, as at boot; of one device
  verify                    say what differs now, in our files and at the next boot: exit status 1
  check                     say what differs now and write node_exporter's textfile: exit status 0
  metrics                   print that textfile
"""
#: Exit statuses: something differs or failed; cannot start; another run holds the journal (EX_TEMPFAIL).
DIFFERS, CANNOT, BUSY = 1, 2, 75


class Unusable(Exception):
    """The recorded policy or the command line cannot be used: one sentence."""


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    try:
        policy, command, device = _parsed(argv)
        document = _read(policy)
        return _COMMANDS[command](document, device)
    except JournalBusy as error:
        print(error, file=sys.stderr)
        return BUSY
    except (Unusable, CannotStart) as error:
        print(error, file=sys.stderr)
        return CANNOT


def _parsed(argv: list[str]) -> tuple[str, str, Optional[str]]:
    """Return (policy file, command, device). By hand: argparse costs a fifth of a check's time."""
    options: dict[str, str] = {}
    words: list[str] = []
    waiting = iter(argv)
    for word in waiting:
        if word in ("--policy", "--device"):
            options[word] = next(waiting, "")
        else:
            words.append(word)
    if words in (["-h"], ["--help"]):
        raise Unusable(USAGE)
    device = options.get("--device")
    if len(words) != 1 or words[0] not in _COMMANDS or "" in options.values():
        raise Unusable(USAGE)
    if device is not None and words[0] != "apply":
        raise Unusable(USAGE)
    return options.get("--policy", POLICY), words[0], device


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            document: dict[str, Any] = json.load(stream)
        if document["version"] != 1:
            raise Unusable(f"{path} is of version {document['version']}, this program knows 1: persist again")
        return {**document, "sections": dict(document["sections"]), "roots": dict(document["roots"])}
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error_text(error)}: run playbooks/persist.yml") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{path} is damaged ({error}): run playbooks/persist.yml again") from error


def _apply(document: dict[str, Any], device: Optional[str]) -> int:
    sections = {name: each for name, each in document["sections"].items() if name not in BY_FILE}
    if device is not None:
        sections = _for_device(sections, device)
    if not sections:
        print("nothing to apply: the policy has only sysctls and kernel modules")
        return 0
    with _alone(document["roots"]["state_root"]):
        result = tuner.run(sections, _common(document, tuner.APPLIED), False)
    rows = [Row(**row) for row in result["rows"]]
    for row in rows:
        if row.status in FAILURES:
            print(f"{row.id}: {row.status}: {row.reason}", file=sys.stderr)
    print(f"{sum(row.status == CHANGED for row in rows)} of {len(rows)} settings changed")
    return DIFFERS if result["failed"] else 0


def _for_device(sections: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the MaxReadReq section for one function; the rule that named it has matched the others."""
    section = sections.get("pcie_maxreadreq")
    if section is None:
        return {}
    narrowed = {**section, "devices": [device], "vendor": None, "device": None, "class": None, "driver": None}
    return {"pcie_maxreadreq": narrowed}


class _alone:
    """Wait for the other agents: several GPUs are bound at the same time."""

    def __init__(self, state_root: str) -> None:
        self.path = os.path.join(state_root, "agent.lock")

    def __enter__(self) -> None:
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unusable(f"cannot open {self.path}: {error_text(error)}: nothing was changed") from error
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _common(document: dict[str, Any], state: str) -> dict[str, Any]:
    return {**document["roots"], "state": state, "across_boot": False}


def look(document: dict[str, Any]) -> list[Row]:
    """Return the policy's settings as they are now; what is not as asked is a failure."""
    result = tuner.run(document["sections"], _common(document, tuner.CAPTURED), True)
    return drifted([Row(**row) for row in result["rows"]])


def _verify(document: dict[str, Any], _: Optional[str]) -> int:
    from . import next_boot

    rows = look(document)
    places = Places.of(document["roots"])
    left_out = {row.id: str(row.reason) for row in rows if row.before is None}
    rows += next_boot.rows(document["sections"], places, left_out)
    failing = _print_failing(rows, "")
    print(f"{len(rows) - failing} of {len(rows)} facts are as the policy asks")
    return DIFFERS if failing else 0


def _check(document: dict[str, Any], _: Optional[str]) -> int:
    rows, text = _looked(document)
    # "<4>": a warning to whoever reads the journal by priority.
    _print_failing(rows, "<4>" if "JOURNAL_STREAM" in os.environ else "")
    path = document["textfile"]
    if not os.path.isdir(os.path.dirname(path)):
        print(f"no metrics: {os.path.dirname(path)} is not there (is prometheus-node-exporter installed?)")
        return 0
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error_text(error)}: the last metrics stay there") from error
    return 0


def _metrics(document: dict[str, Any], _: Optional[str]) -> int:
    sys.stdout.write(_looked(document)[1])
    return 0


def _looked(document: dict[str, Any]) -> tuple[list[Row], str]:
    begun = time.monotonic()
    rows = look(document)
    gpus = gpu_health.look(document["roots"]["sysfs_root"])
    seconds = time.monotonic() - begun
    return rows, exposition(rows, gpus, document.get("gpus"), time.time(), seconds)


def _print_failing(rows: list[Row], prefix: str) -> int:
    failing = failures(rows)
    for row in failing:
        print(f"{prefix}{row.id}: {row.status}: {row.reason}", file=sys.stderr)
    return len(failing)


_COMMANDS = {"apply": _apply, "verify": _verify, "check": _check, "metrics": _metrics}
