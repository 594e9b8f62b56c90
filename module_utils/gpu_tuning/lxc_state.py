# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that makes a repair certain: the majors of earlier runs and what each rule meant.

One JSON file under the state root. It holds the last maps of /proc/devices (newest first), and for each
config the meaning of every rule text when it was last known, so that a map which has been used for a
repair is not applied to the repaired text again (majors can swap).
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from typing import Any, Optional

from .proc_devices import Majors, RecordError, parse_recorded

RECORD_NAME = "device-majors.json"
_MAX_MAPS = 16
_MAX_SIZE = 16 << 20


@dataclasses.dataclass
class Record:
    """What earlier runs knew. ``maps`` is newest first; ``containers`` is by the config's path.

    A container's entry: ``rules`` (rule text -> driver name, or None where the meaning was unknown)
    and ``consumed`` (digest of the recorded map a caller gave when the rules were last read, or None).
    """

    maps: list[Majors] = dataclasses.field(default_factory=list)
    containers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def remembers(self, path: str, text: str) -> bool:
        """Return whether this rule of this config was seen before."""
        return text in self.containers.get(path, {}).get("rules", {})

    def meaning(self, path: str, text: str) -> Optional[str]:
        """Return the driver that a rule of a config meant when it was last known, or None."""
        name = self.containers.get(path, {}).get("rules", {}).get(text)
        return str(name) if name is not None else None

    def consumed(self, path: str) -> Optional[str]:
        """Return the digest of the recorded map that this config's rules were last read with."""
        digest = self.containers.get(path, {}).get("consumed")
        return str(digest) if digest is not None else None

    def remember(self, path: str, rules: dict[str, Optional[str]], consumed: Optional[str]) -> None:
        """Replace what is known of one config."""
        self.containers[path] = {"rules": rules, "consumed": consumed}

    def add_map(self, now: Majors) -> None:
        """Put a map in front, unless it is there already; older ones stay, up to a limit."""
        rest = [known for known in self.maps if known.digest() != now.digest()]
        self.maps = [now, *rest][:_MAX_MAPS]

    def dump(self) -> str:
        """Return the record as JSON. ``majors`` is the newest map, as ``recorded_devices`` reads it."""
        maps = [known.as_dict() for known in self.maps]
        body = {
            "version": 1,
            "majors": maps[0] if maps else {},
            "earlier": maps[1:],
            "containers": self.containers,
        }
        return json.dumps(body, indent=1, sort_keys=True) + "\n"


def state_path(state_root: str, name: str = RECORD_NAME, make: bool = True) -> str:
    """Return where a file of the state lies. ``make``: make the directory, for its owner only (OSError)."""
    if make:
        os.makedirs(state_root, mode=0o700, exist_ok=True)
    return os.path.join(state_root, name)


def load_record(state_root: str) -> Record:
    """Return the record under a state root, empty when there is none.

    Raises :class:`RecordError` when a file is there that is no record: guessing would be worse.
    """
    path = state_path(state_root, make=False)
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read(_MAX_SIZE)
    except FileNotFoundError:
        return Record()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"the record {path} cannot be read: {error}; move it away to begin a new one"
        ) from error
    return _parse_record(text, path)


def _parse_record(text: str, path: str) -> Record:
    newest = parse_recorded(text, path)
    try:
        body = json.loads(text)
        earlier = [parse_recorded(json.dumps({"majors": table}), path) for table in body["earlier"]]
        containers = {str(key): _entry(value) for key, value in body["containers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"the record {path} is damaged ({error}); move it away to begin a new one"
        ) from error
    return Record([newest, *earlier], containers)


def _entry(value: Any) -> dict[str, Any]:
    rules = {str(text): None if name is None else str(name) for text, name in value["rules"].items()}
    consumed = value.get("consumed")
    return {"rules": rules, "consumed": None if consumed is None else str(consumed)}


def save_record(state_root: str, record: Record) -> bool:
    """Write the record, whole or not at all; return whether the file changed.

    Raises OSError. The directory is made for its owner only: the record names every container.
    """
    path = state_path(state_root)
    text = record.dump()
    try:
        with open(path, encoding="utf-8") as handle:
            if handle.read() == text:
                return False
    except (OSError, UnicodeDecodeError):
        pass
    _replace(path, text.encode())
    return True


def _replace(path: str, data: bytes) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
