# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a policy outlive a reboot, take that back, and say whether it still holds.

Persisting goes runtime first: what the kernel refused is not written to any file. Then come our files, then
a look at what the next boot will make of them together with everybody else's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from . import agent, agent_archive, gpu_health, next_boot, other_tuners, persist_files, tuner
from .drift import drifted
from .engine import diff, written
from .owned_files import OwnedFile, OwnedFiles, make_directories, missing_directories, remove_empty, text_of
from .persist_places import APPLY_UNIT, CHECK_TIMER, Places
from .rows import CHANGED, FAILED, NOT_APPLICABLE, OK, WOULD_CHANGE, Row, failures

PERSISTED, REMOVED, VERIFIED = "persisted", "removed", "verified"
STATES = (PERSISTED, REMOVED, VERIFIED)
MINIMUM_PYTHON = (3, 9)

_PLAIN_PATH = re.compile(r"(/[\w.+-]+)+\Z")

Options = dict[str, Any]
Sections = next_boot.Sections


def run(sections: Sections, options: Options, check: bool) -> dict[str, Any]:
    """Return the module's result for one of STATES. Raises tuner.CannotStart; then nothing was changed."""
    places = Places.of(options)
    if options["state"] == PERSISTED:
        return _persist(sections, options, places, check)
    if options["state"] == REMOVED:
        return _remove(options, places, check)
    return _verify(sections, options, places)


def _persist(sections: Sections, options: Options, places: Places, check: bool) -> dict[str, Any]:
    textfile = options["textfile"] or places.default_textfile
    _refuse_odd(sections, options, {"textfile": textfile, "state_root": places.state})
    compiled = _same_python(options["python"])
    _refuse_foreign(persist_files.nothing(places, textfile))
    applied = tuner.run(sections, {**options, "state": tuner.APPLIED}, check)
    runtime = [Row(**row) for row in applied["rows"]]
    left_out = _left_out(runtime)
    gpus = gpu_health.addresses(places.sysfs)
    document = persist_files.policy_document(sections, places, textfile, gpus, _directories(places))
    sysctls = _sysctls(sections, places, left_out)
    modules = [name for name in next_boot.wanted_modules(sections) if f"module:{name}" not in left_out]
    # What a play runs is what the host will run.
    archive = agent_archive.build(agent.__name__.rpartition(".")[2], options["python"], compiled)
    files = persist_files.everything(
        places, document, sysctls, modules, options["python"], options["check_minutes"], archive
    )
    former = recorded(places).get("textfile") or textfile
    if former != textfile:
        files.append(OwnedFile(former, wanted=False))
    shown = _differences(files)
    rows = OwnedFiles(files).capture() if check else _written(files, document["directories"], places)
    if not check:
        rows += _tell_daemons(places, [CHECK_TIMER], rows)
    planned = {file.path: file.content.decode() for file in files if file.wanted and _is_text(file)}
    facts = next_boot.rows(sections, places, left_out, planned if check else None)
    every = [*runtime, *rows, *facts]
    result = {**applied, "diff": [*applied["diff"], *shown]}
    return _result(result, every, places, sections)


def _refuse_odd(sections: Sections, options: Options, paths: dict[str, str]) -> None:
    """Refuse what would mean something else in a unit or a rule. Raises BadInput."""
    for name, path in {"python": options["python"], **paths}.items():
        if not _PLAIN_PATH.match(path):
            raise tuner.BadInput(
                f"{name} {path!r} cannot stand in a systemd unit: give an absolute path of letters, digits "
                "and ._+-"
            )
    driver = (sections.get("pcie_maxreadreq") or {}).get("driver")
    if driver and not re.match(r"[\w.-]+\Z", driver):
        raise tuner.BadInput(f"pcie_maxreadreq: {driver!r} is not a driver's name")
    if not 1 <= options["check_minutes"] <= 1440:
        raise tuner.BadInput(f"check_minutes cannot be {options['check_minutes']}: give 1 to 1440")


def _same_python(python: str) -> bool:
    """Tell whether the host's Python is of the running version. Raises BadInput for one that will not do."""
    ask = "import sys; print(*sys.version_info[:2], sys.implementation.cache_tag)"
    try:
        done = subprocess.run(
            [python, "-I", "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        major, minor, tag = done.stdout.split()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise tuner.BadInput(
            f"{python} does not run, which the units need at boot: {error}; give another as python"
        ) from error
    if (int(major), int(minor)) < MINIMUM_PYTHON:
        raise tuner.BadInput(
            f"{python} is Python {major}.{minor}; the units need 3.9 or newer: give another as python"
        )
    return tag == sys.implementation.cache_tag


def _refuse_foreign(files: list[OwnedFile]) -> None:
    foreign = [row for row in OwnedFiles(files).capture() if row.status == FAILED]
    if foreign:
        raise tuner.BadInput("; ".join(str(row.reason) for row in foreign))


def _left_out(runtime: list[Row]) -> dict[str, str]:
    """Return why settings are not persisted, by id: what the kernel refuses now, it will at boot."""
    kept = (OK, CHANGED, WOULD_CHANGE)
    return {row.id: f"{row.status}: {row.reason}" for row in runtime if row.status not in kept}


def _sysctls(sections: Sections, places: Places, left_out: dict[str, str]) -> dict[str, str]:
    """Return the drop-in's lines. A minimum or maximum that others' files meet already is left to them."""
    found = {}
    for wanted in next_boot.wanted_sysctls(sections):
        theirs = next_boot.boot_value(places, wanted.name)
        met = wanted.match != "exact" and next_boot.meets(wanted, theirs)
        if f"sysctl:{wanted.name}" not in left_out and not met and wanted.value is not None:
            found[wanted.name] = wanted.value
    return found


def _directories(places: Places) -> list[str]:
    """Return the directories made for our files: by earlier runs, as the policy has them, and by this one."""
    paths = [file.path for file in persist_files.nothing(places, places.default_textfile)[:-1]]
    paths = [path for path in paths if path != places.default_textfile]
    known = recorded(places).get("directories") or []
    missing = missing_directories(paths)
    return [*known, *(each for each in missing if each not in (*known, *places.own_directories))]


def recorded(places: Places) -> dict[str, Any]:
    """Return the policy recorded on the host, {} where there is none or it cannot be understood."""
    try:
        with open(places.policy, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _written(files: list[OwnedFile], directories: list[str], places: Places) -> list[Row]:
    """Write the policy, make the directories it names, write the rest. Raises BadInput without a directory.

    In this order a run that is killed at any point leaves nothing that an unpersist does not find.
    """
    wanted = {os.path.dirname(file.path) for file in files if file.wanted}
    needed = [each for each in directories if any(f"{path}/".startswith(f"{each}/") for path in wanted)]
    try:
        policy, agents = places.own_directories
        make_directories([policy])
        rows = _put(files[:1])
        make_directories([*needed, agents])
    except OSError as error:
        raise tuner.BadInput(
            f"cannot make {error.filename}: {error.strerror}: the settings are applied until the next "
            "reboot, nothing was persisted"
        ) from error
    return rows + _put(files[1:])


def _put(files: list[OwnedFile]) -> list[Row]:
    kind = OwnedFiles(files)
    return written([(kind, row) for row in kind.capture()])


def _differences(files: list[OwnedFile]) -> list[dict[str, str]]:
    changing = {row.target for row in OwnedFiles(files).capture() if row.status == WOULD_CHANGE}
    return [text for file in files if file.path in changing for text in _difference(file)]


def _is_text(file: OwnedFile) -> bool:
    return file.target is None and not file.path.endswith(".pyz")


def _difference(file: OwnedFile) -> list[dict[str, str]]:
    if not _is_text(file):
        return []
    before, after = text_of(file.path), file.content.decode() if file.wanted else ""
    if before is None:
        return []
    return [{"before_header": file.path, "after_header": file.path, "before": before, "after": after}]


def _tell_daemons(places: Places, start: list[str], rows: list[Row]) -> list[Row]:
    """Have systemd and udev read what changed. One that does not is a row: the next boot is fine."""
    if not places.live or not any(row.status == CHANGED for row in rows):
        return []
    commands = [["systemctl", "daemon-reload"], ["udevadm", "control", "--reload"]]
    # Restart: a timer that runs already does not take a new interval otherwise.
    commands += [["systemctl", "--no-block", "restart", unit] for unit in start]
    return [row for row in map(_told, commands) if row.status != OK]


def _told(argv: list[str]) -> Row:
    row = Row(f"daemon:{' '.join(argv)}", "daemon", " ".join(argv))
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        return row.with_status(NOT_APPLICABLE, f"cannot run {argv[0]}: {error.strerror}")
    if done.returncode == 0:
        return row
    said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
    return row.with_status(FAILED, f"{' '.join(argv)} failed: {said}; it takes effect with the next boot")


def _remove(options: Options, places: Places, check: bool) -> dict[str, Any]:
    document = recorded(places)
    files = persist_files.nothing(places, document.get("textfile") or places.default_textfile)
    if not check and places.live and any(os.path.lexists(file.path) for file in files):
        for unit in (CHECK_TIMER, APPLY_UNIT):
            _told(["systemctl", "stop", unit])
    shown = _differences(files)
    rows = OwnedFiles(files).capture() if check else _put(files)
    if not check:
        remove_empty([*(document.get("directories") or []), *places.own_directories])
        rows += _tell_daemons(places, [], rows)
    return _result({"diff": [*diff(rows), *shown]}, rows, places, {})


def _verify(sections: Sections, options: Options, places: Places) -> dict[str, Any]:
    """Compare value now, our file and the next boot with the policy given, or with the recorded one."""
    document = recorded(places)
    sections = sections or document.get("sections") or {}
    looked = tuner.run(sections, {**options, "state": tuner.CAPTURED}, True)
    runtime = [Row(**row) for row in looked["rows"]]
    facts = [_not_persisted(places)]
    if document:
        facts = next_boot.rows(sections, places, _left_out(runtime))
    every = [*drifted(runtime), *facts]
    return _result({**looked, "changed": False, "diff": []}, every, places, sections)


def _not_persisted(places: Places) -> Row:
    reason = (
        f"not persisted: {places.policy} is not there, so a reboot undoes the values; playbooks/persist.yml"
    )
    return Row(
        "at_boot:policy", next_boot.AT_BOOT, "policy", status=NOT_APPLICABLE, reason=reason, fix="reboot"
    )


def _result(result: dict[str, Any], rows: list[Row], places: Places, sections: Sections) -> dict[str, Any]:
    failing = failures(rows)
    listed = "; ".join(f"{row.id}: {row.status}: {row.reason}" for row in failing[:5])
    more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
    changed = any(row.status in (CHANGED, WOULD_CHANGE) for row in rows)
    names = [wanted.name for wanted in next_boot.wanted_sysctls(sections)]
    return {
        **result,
        "changed": changed,
        "rows": [row.as_dict() for row in rows],
        "other_tuners": other_tuners.named(places, names),
        "failed": bool(failing),
        **({"msg": f"{len(failing)} of {len(rows)} settings failed: {listed}{more}"} if failing else {}),
    }
