# SPDX-License-Identifier: GPL-3.0-or-later
"""Read and write the small files of procfs and sysfs, on a live kernel and on a recorded machine alike."""

from __future__ import annotations

import errno
import os

from .typed import Optional

#: The largest attribute the kernel prints is one page; sysctls may be a little longer.
READ_LIMIT = 65536

#: "You may not", in all the ways containers, lockdown and file modes say it.
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
#: "It is not there any more": a device that was removed, a CPU that went offline.
GONE = (errno.ENOENT, errno.ENODEV, errno.ENXIO)


def read_bytes(path: str, limit: int = READ_LIMIT) -> bytes:
    """Return up to ``limit`` bytes of a file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = chunk = os.read(fd, limit)
        while chunk and len(found) < limit:
            chunk = os.read(fd, limit - len(found))
            found += chunk
        return found
    finally:
        os.close(fd)


def read_text(path: str) -> str:
    """Return a file's text as it stands, undecodable bytes kept as surrogates. Raises OSError."""
    return read_bytes(path).decode("utf-8", "surrogateescape")


def read_line(path: str) -> Optional[str]:
    """Return an attribute's stripped text, or None when it cannot be read.

    With one read(2): the kernel answers with the whole attribute.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, READ_LIMIT).decode("utf-8", "surrogateescape").strip()
        finally:
            os.close(fd)
    except OSError:
        return None


def write_text(path: str, text: str) -> None:
    """Give a kernel attribute a new value with one write(2) and without truncating. Raises OSError.

    The kernel takes one write as one value. On a recorded machine the attribute is an ordinary file,
    told apart by its size being that of its content: a shorter value is padded with newlines to cover
    the old one and cut afterwards, so that a kill between the two leaves the new value, not a mixture.
    """
    data = text.encode("utf-8", "surrogateescape")
    covered = _recorded_size(path)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        _write_whole(fd, data.ljust(covered, b"\n"))
        if covered > len(data):
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def is_recorded(path: str) -> bool:
    """Tell a recorded machine's file from an attribute, which answers for itself. Raises OSError."""
    return _recorded_size(path) > 0


def _recorded_size(path: str) -> int:
    """Return an ordinary file's size, 0 for an attribute: procfs says size 0, sysfs says one page."""
    size = os.stat(path).st_size
    return size if size and size == len(read_bytes(path)) else 0


def _write_whole(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    if written != len(data):
        raise OSError(errno.EIO, f"only {written} of {len(data)} bytes were taken")


def error_text(error: OSError) -> str:
    """Return an error as people search for it: "EINVAL (Invalid argument)"."""
    name = errno.errorcode.get(error.errno or 0, f"errno {error.errno}")
    return f"{name} ({error.strerror})"
