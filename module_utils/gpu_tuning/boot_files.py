# SPDX-License-Identifier: GPL-3.0-or-later
"""Replace the files that a boot depends on: whole or not at all, with their mode and owner."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Optional

from .kernel_files import FORBIDDEN, error_text

#: A file's bytes, None where there is (or shall be) no file.
Content = Optional[bytes]

_TEMPORARY = ".gpu-tuning-"


class BootError(Exception):
    """A boot file or a boot tool failed: one sentence with what is left on the disk."""


def content(path: str) -> Content:
    """Return a file's bytes, None where there is none. Raises BootError."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BootError(f"cannot read {path}: {error_text(error)}") from error


def text(path: str) -> Optional[str]:
    """Return a file's text, undecodable bytes kept as surrogates; None where there is none."""
    data = content(path)
    return None if data is None else data.decode("utf-8", "surrogateescape")


def lines(value: str) -> list[str]:
    """Return lines with their ends; only a newline ends one (str.splitlines knows ten more characters)."""
    return re.findall(r"[^\n]*\n|[^\n]+", value)


def encoded(value: str) -> bytes:
    """Return the bytes that ``text`` would read as this value."""
    return value.encode("utf-8", "surrogateescape")


def replace(path: str, data: Content, mode: int = 0o644) -> None:
    """Give a file its new content, or remove it; an existing one keeps its mode. Raises OSError.

    A link is followed first: boot files are root's, and an administrator's link is meant.
    """
    path = os.path.realpath(path)
    directory = os.path.dirname(path)
    if data is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        _sync(directory)
        return
    os.makedirs(directory, exist_ok=True)
    _drop_leftovers(directory)
    # A name that starts with a dot is read by no boot tool, whatever pattern it globs for.
    fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, suffix=".tmp", dir=directory)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            _adopt(stream.fileno(), path, mode)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync(directory)


def _adopt(fd: int, path: str, mode: int) -> None:
    """Give the new file the old one's mode and owner; an ESP (vfat) has neither and refuses."""
    uid = gid = -1
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(path)
        mode, uid, gid = stat.S_IMODE(old.st_mode), old.st_uid, old.st_gid
    try:
        os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in FORBIDDEN:
            raise


def _drop_leftovers(directory: str) -> None:
    """Remove what a killed run was writing; callers hold the host's lock."""
    for name in os.listdir(directory):
        if name.startswith(_TEMPORARY) and name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_all(contents: Mapping[str, Content], modes: Optional[Mapping[str, int]] = None) -> None:
    """Replace several files; when one fails, those before it get their old content back. Raises BootError."""
    old: dict[str, Content] = {}
    for path, data in contents.items():
        try:
            before = content(path)
            if before == data:
                continue
            old[path] = before
            replace(path, data, (modes or {}).get(path, 0o644))
        except OSError as error:
            del old[path]
            put_back(old)
            raise BootError(
                f"cannot write {path}: {error_text(error)}: nothing was changed; "
                "make room or permission there"
            ) from error


def put_back(old: Mapping[str, Content]) -> None:
    """Restore files after a failure; one that cannot be restored is named. Raises BootError."""
    lost = []
    for path, data in old.items():
        try:
            replace(path, data)
        except OSError as error:
            lost.append(f"{path} ({error_text(error)})")
    if lost:
        raise BootError(f"and the old content could not be put back into {', '.join(lost)}: do it by hand")


def run(argv: list[str], cwd: Optional[str] = None, timeout_s: int = 1800) -> str:
    """Run a boot tool and return what it printed. Raises BootError with its own words."""
    # LC_ALL: what is parsed must not be translated.
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    environment["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environment,
            cwd=cwd,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootError(f"cannot run {argv[0]}: {error}") from error
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        heard = done.stderr.decode("utf-8", "replace").strip() or said.strip() or "no word"
        last = " / ".join(line for line in heard.splitlines()[-4:] if line.strip())
        raise BootError(f"{' '.join(argv)} failed with status {int(done.returncode)}: {last}")
    return said
