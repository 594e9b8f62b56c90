# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole files and links that this tool puts on a host and takes away again, and nobody else's.

A file is ours when its first lines carry MARK, or when it lies in a directory of our own. One that is not
ours under a name that we need stays, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from .engine import Kind, Refused
from .journal import Entry
from .kernel_files import READ_LIMIT, error_text, read_bytes
from .rows import FAILED, WOULD_CHANGE, Row, Value
from .typed import NamedTuple, Optional, Union

MARK = "Managed by gpu_tuning"
HEADER = f"# {MARK}: changes made here are lost. See playbooks/persist.yml and playbooks/unpersist.yml."

CURRENT, OUTDATED, ABSENT = "current", "outdated", "absent"
_MARK_WITHIN = 200  # bytes
_LARGEST = 4 << 20


class OwnedFile(NamedTuple):
    """A file's path and content, or a link's path and ``target``; ``wanted`` False takes it away.

    ``private`` says that it lies in a directory of our own. ``same`` compares contents that may differ in
    bytes and still be the same.
    """

    path: str
    content: bytes = b""
    target: Optional[str] = None
    wanted: bool = True
    private: bool = False
    mode: int = 0o644
    same: Callable[[bytes, bytes], bool] = bytes.__eq__


class OwnedFiles(Kind):
    """Files and links as rows: "absent", "outdated" or "current"."""

    kind = "owned_file"

    def __init__(self, files: list[OwnedFile]) -> None:
        """Take the files in the order in which they are to be written."""
        self.files = {file.path: file for file in files}

    def capture(self) -> list[Row]:
        """Return a row per file; one that is somebody else's is a failure."""
        return [self._captured(file) for file in self.files.values()]

    def _captured(self, file: OwnedFile) -> Row:
        row = Row(f"owned_file:{file.path}", self.kind, file.path)
        row.desired = CURRENT if file.wanted else ABSENT
        try:
            row.before = self.read(row)
        except Refused as refused:
            return row.with_status(refused.status, refused.reason)
        if row.before == row.desired:
            return row
        return row.with_status(WOULD_CHANGE, f"is {row.before}")

    def read(self, row: Row) -> Value:
        """Compare what is there with what should be. Raises Refused for somebody else's file."""
        file = self.files[row.target]
        try:
            found = _look(file.path)
        except OSError as error:
            raise Refused(FAILED, f"cannot read {file.path}: {error.strerror}") from error
        if found is None:
            return ABSENT
        if not is_ours(file, found):
            raise Refused(
                FAILED,
                f"{file.path} is there and was not made by this tool: it stays as it is; move it aside, or "
                "delete it, and run again",
            )
        if isinstance(found, str):
            return CURRENT if found == file.target else OUTDATED
        return CURRENT if file.same(found, file.content) else OUTDATED

    def write(self, row: Row) -> None:
        """Put the file in its place whole, or remove it. Raises Refused."""
        file = self.files[row.target]
        try:
            _put(file)
        except OSError as error:
            action = "write" if file.wanted else "remove"
            reason = f"cannot {action} {file.path}: {error_text(error)}: it is {row.before} as before"
            raise Refused(FAILED, f"{reason}; make room or permission there and run again") from error

    def recorded_row(self, entry: Entry) -> Row:
        """Files are not journalled."""
        raise NotImplementedError


def _put(file: OwnedFile) -> None:
    if not file.wanted:
        os.unlink(file.path)
    elif file.target is not None:
        _replace_link(file.path, file.target)
    else:
        replace_file(file.path, file.content, file.mode)


def is_ours(file: OwnedFile, found: Union[bytes, str]) -> bool:
    """Tell whether what was found (bytes, or a link's target) is what this tool makes."""
    if isinstance(found, str):
        # A unit is enabled by a link that bears its own name; one that leads to /dev/null masks it.
        return file.target is not None and os.path.basename(found) == os.path.basename(file.path)
    return file.target is None and (file.private or MARK.encode() in found[:_MARK_WITHIN])


def _look(path: str) -> Union[bytes, str, None]:
    """Return a file's bytes, a link's target, None when there is neither. Raises OSError."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return read_bytes(path, _LARGEST)


def text_of(path: str) -> Optional[str]:
    """Return a text file for a diff: "" where it is not there, None where it is no text."""
    try:
        return read_bytes(path, READ_LIMIT).decode("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        return None


def replace_file(path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file whole: beside it under another name, synced, renamed over it. Raises OSError."""
    with _beside(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, mode), "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    _sync(os.path.dirname(path))


def _replace_link(path: str, target: str) -> None:
    with _beside(path) as temporary:
        os.symlink(target, temporary)
        os.replace(temporary, path)
    _sync(os.path.dirname(path))


@contextlib.contextmanager
def _beside(path: str):  # type: ignore[no-untyped-def]
    """Give a name beside a path that nobody can guess, and leave nothing there after an error."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.urandom(8).hex()}")
    try:
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def missing_directories(paths: list[str]) -> list[str]:
    """Return the directories that would have to be made for these files, outermost first."""
    missing: list[str] = []
    for path in paths:
        chain: list[str] = []
        directory = os.path.dirname(path)
        while (
            directory not in missing
            and not os.path.isdir(directory)
            and directory != os.path.dirname(directory)
        ):
            chain.insert(0, directory)
            directory = os.path.dirname(directory)
        missing += [each for each in chain if each not in missing]
    return missing


def make_directories(directories: list[str]) -> None:
    """Make directories, outermost first. Raises OSError."""
    for directory in directories:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
            os.chmod(directory, 0o755)


def remove_empty(directories: list[str]) -> None:
    """Remove directories, innermost first, as far as they are empty."""
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
