# SPDX-License-Identifier: GPL-3.0-or-later
"""The journal: the values found on a host, on its disk before the first write.

One JSON document per boot, ``<state_root>/journal/<boot id>.json``, replaced whole and synced. The first
value found wins until it has been rolled back, so that a second run, or a run after a kill, never records
our own value as the host's. Runtime values vanish with a reboot, hence one document per boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator

from .kernel_files import error_text, read_line
from .typed import Any, Optional

VERSION = 1
#: Recorded machines have no boot id; a live kernel always does.
NO_BOOT_ID = "no-boot-id"

_BOOT_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]*\Z")

_ALREADY_BACK = "the recorded values are back, and the next rollback will only find them so"

#: One recorded setting: kind, target, before (normalised), set (what we wrote, None if we never did), and
#: what its kind adds (sysctl: raw, the text as it was read).
Entry = dict[str, Any]


NOTHING_CHANGED = "no setting was changed"


class CannotStart(Exception):
    """What a user asked for cannot be begun: one sentence; nothing has been changed."""


class JournalError(CannotStart):
    """The journal cannot be read or written, or another run holds it."""


def boot_id(procfs_root: str) -> str:
    """Return the kernel's boot id (proc/sys/kernel/random/boot_id), NO_BOOT_ID on a recorded machine.

    It becomes the name of a file, so what could be a path is no boot id.
    """
    found = read_line(os.path.join(procfs_root, "sys/kernel/random/boot_id")) or ""
    return found if _BOOT_ID.match(found) else NO_BOOT_ID


class JournalBusy(JournalError):
    """Another run holds the journal: trying again later helps."""


class Journal:
    """The recorded values of one boot. Use inside ``locked()`` for anything that writes."""

    def __init__(self, state_root: str, boot: str, kernel_release: Optional[str] = None) -> None:
        """Only remember where things are; nothing is read or written yet."""
        # Without a slash at its end: lstat would follow a link.
        self.state_root = os.path.abspath(state_root)
        self.directory = os.path.join(self.state_root, "journal")
        self.boot = boot
        self.kernel_release = kernel_release
        self.created: Optional[str] = None
        self.entries: dict[str, Entry] = {}

    @property
    def path(self) -> str:
        """The document of this boot."""
        return os.path.join(self.directory, f"{self.boot}.json")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the host's only writing place. Raises JournalError when another run has it."""
        with _explained("prepare", self.directory):
            # Who can write here could put values of their own in the journal, for root to restore.
            _own_directory(self.state_root, "write to", stat.S_IWGRP | stat.S_IWOTH)
            _own_directory(self.directory, "enter", stat.S_IRWXG | stat.S_IRWXO)
            fd = os.open(os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            with _explained("lock", self.directory):
                self._take(fd)
                self._drop_leftovers()
            yield
        finally:
            os.close(fd)

    def _take(self, fd: int) -> None:
        """Lock the file and write into it who has it. Raises JournalError when another run does."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            raise JournalBusy(
                f"another run (process {holder}) is tuning this host and holds {self.directory}/lock: "
                "nothing was changed; run again when it has finished"
            ) from None
        os.pwrite(fd, b"%-31d\n" % os.getpid(), 0)

    def _drop_leftovers(self) -> None:
        """Remove what a killed run was writing; the lock says that nobody is writing now."""
        for name in os.listdir(self.directory):
            if name.endswith(".tmp"):
                os.unlink(os.path.join(self.directory, name))

    def load(self) -> None:
        """Read this boot's document, if there is one. Raises JournalError when it is damaged."""
        try:
            with open(self.path, encoding="utf-8") as stream:
                document = json.load(stream)
            self.created, self.entries = document["created"], _entries(document)
        except FileNotFoundError:
            return
        except OSError as error:
            raise JournalError(f"cannot read the journal {self.path}: {error_text(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                f"the journal {self.path} is damaged ({error}): "
                "move it aside to go on without the values in it"
            ) from error

    def other_boots(self) -> list[str]:
        """Return the boot ids, oldest first, that have a document here and are not this one."""
        try:
            names = [n for n in os.listdir(self.directory) if n.endswith(".json")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JournalError(f"cannot read {self.directory}: {error_text(error)}") from error
        names.sort(key=lambda name: os.stat(os.path.join(self.directory, name)).st_mtime_ns)
        return [name[: -len(".json")] for name in names if name[: -len(".json")] != self.boot]

    def record(self, found: dict[str, Entry]) -> None:
        """Add what is not recorded yet, note what will be set, and have it on disk when this returns."""
        merged = dict(self.entries)
        for identity, entry in found.items():
            known = merged.get(identity)
            if known is None:
                merged[identity] = entry
            elif entry["set"] is not None:
                merged[identity] = {**known, "set": entry["set"]}
        if merged != self.entries:
            self._store(merged, NOTHING_CHANGED)

    def forget(self, identities: list[str]) -> None:
        """Drop what has been rolled back; an empty document goes away."""
        kept = {identity: entry for identity, entry in self.entries.items() if identity not in identities}
        if kept == self.entries:
            return
        if kept:
            self._store(kept, _ALREADY_BACK)
            return
        with _explained("remove", self.path, _ALREADY_BACK):
            os.unlink(self.path)
            _sync_directory(self.directory)
        self.entries = {}

    def _store(self, entries: dict[str, Entry], so_far: str) -> None:
        created = self.created or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        document = {
            "version": VERSION,
            "boot_id": self.boot,
            "kernel_release": self.kernel_release,
            "created": created,
            "entries": entries,
        }
        with _explained("write", self.path, so_far):
            _replace(self.path, f"{json.dumps(document, indent=1, sort_keys=True)}\n")
        self.created, self.entries = created, entries


@contextlib.contextmanager
def _explained(action: str, path: str, so_far: str = NOTHING_CHANGED) -> Iterator[None]:
    """Turn an OSError around the journal into the one sentence a user needs."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"cannot {action} the journal {path}: {error_text(error)}: {so_far}; "
            "make room or permission there, or choose another state_root"
        ) from error


def _entries(document: dict[str, Any]) -> dict[str, Entry]:
    """Return a document's entries. Raises ValueError, KeyError or TypeError when it is not one of ours."""
    if document["version"] != VERSION:
        raise ValueError(f"its version is {document['version']!r}, this tool knows {VERSION}")
    entries = document["entries"]
    if not isinstance(entries, dict):
        raise TypeError("entries is no object")
    for identity, entry in entries.items():
        names, values = (entry["kind"], entry["target"]), (entry["before"], entry["set"])
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"{identity} has no kind and target")
        if not all(value is None or isinstance(value, (str, int)) for value in values):
            raise TypeError(f"{identity} has values of no setting")
    return entries


def _own_directory(path: str, verb: str, forbidden: int) -> None:
    """Make a directory for root's eyes, or refuse one that is a link, another user's or too open."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & forbidden:
        raise JournalError(
            f"{path} must be a directory of the running user, no link, that others cannot {verb}, "
            "mode 0700: nothing was changed; correct it or choose another state_root"
        )


def _replace(path: str, text: str) -> None:
    """Write a file whole: temporary file beside it, synced, renamed over it, directory synced."""
    import tempfile  # a check never gets here, and this would be a tenth of its time

    directory = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(prefix=".journal-", suffix=".tmp", dir=directory)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(directory)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
