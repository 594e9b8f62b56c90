# SPDX-License-Identifier: GPL-3.0-or-later
"""Read and replace a container config, on an ordinary file system and on pmxcfs (/etc/pve).

pmxcfs (pve-cluster; behaviour measured, quorate and not): modes come from the path and chmod, chown to
anything else gives EPERM or ENOSYS; without quorum files are 0440 and every write gives EACCES, never
EROFS; a temporary file in the same directory and a rename is the way that readers never see half a file,
and the one Proxmox takes itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Optional

from . import lxc_config as grammar
from . import rows as status
from .lxc_config import Config

#: pmxcfs takes no larger file, and no container config comes near it.
MAX_SIZE = 1 << 20
LOCK_TIMEOUT_SECONDS = 10.0
_CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_TEMPORARY_MARK = ".gpu-tuning."
#: What a file system that fixes modes by itself says to chmod, chown or to extended attributes.
_NOT_OFFERED = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class ConfigError(Exception):
    """A config that cannot be read as one: one sentence that names the file, the cause and the cure."""


class WriteRefused(Exception):
    """A config that was not written, and is as it was: one sentence, and the row status it means."""

    def __init__(self, row_status: str, sentence: str) -> None:
        """Keep the row status (``read_only``, ``rejected`` or ``failed``) beside the sentence."""
        super().__init__(sentence)
        self.row_status = row_status


@dataclasses.dataclass(frozen=True)
class Source:
    """A config as it was read: its path, its bytes, and its ``os.stat_result`` then."""

    path: str
    data: bytes
    stat: os.stat_result

    @property
    def text(self) -> str:
        """The bytes as latin-1, which gives every byte back."""
        return self.data.decode("latin-1")


def read_config(path: str) -> Source:
    """Return a config. Raises :class:`ConfigError` for anything that is no readable text file of its size."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise ConfigError(
                f"{path} is a symbolic link; name the file it points to, links are not followed"
            )
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no regular file; name the container's config file")
        if found.st_size > MAX_SIZE:
            raise ConfigError(f"{path} holds {found.st_size} bytes; a container config has at most 1 MiB")
        return _read(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: there is no such container on this host") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {_text(error)}") from error


def _read(path: str) -> Source:
    # NONBLOCK and NOFOLLOW: what lstat saw may have been replaced by a fifo or a link since.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        found = os.fstat(stream.fileno())
        data = stream.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise ConfigError(f"{path} grew over 1 MiB while it was read; a container config has at most that")
    if _CONTROL_BYTES.search(data):
        raise ConfigError(f"{path} holds binary data; a container config is text, restore it from a backup")
    return Source(path, data, found)


def vmid(config: Config, path: str) -> Optional[str]:
    """Return the id of a Proxmox container by its config's name, None for plain LXC."""
    match = re.fullmatch(r"([0-9]+)\.conf", os.path.basename(path))
    return match.group(1) if config.format == grammar.PROXMOX and match else None


def preflight(source: Source, config: Config) -> None:
    """Raise :class:`WriteRefused` when this config must not be written now. Writes nothing."""
    path = source.path
    if config.format == grammar.PROXMOX:
        if not source.stat.st_mode & 0o222:
            raise WriteRefused(
                status.READ_ONLY,
                f"{path} is read-only (mode {stat.S_IMODE(source.stat.st_mode):04o}): the Proxmox cluster "
                "has no quorum; "
                f"nothing was changed, restore the quorum (pvecm status) and run again",
            )
        lock = config.value("lock")
        if lock is not None:
            raise WriteRefused(
                status.REJECTED,
                f"{path} carries 'lock: {lock}': another Proxmox task owns the container; nothing of it was "
                "changed, "
                f"wait for that task (or 'pct unlock' after a crash) and run again",
            )
    if source.stat.st_nlink > 1:
        raise WriteRefused(
            status.REJECTED,
            f"{path} has {source.stat.st_nlink} hard links, which a rename would part; nothing was changed",
        )


@contextlib.contextmanager
def proxmox_lock(
    lock_root: str, container_id: Optional[str], timeout: float = LOCK_TIMEOUT_SECONDS
) -> Iterator[None]:
    """Hold Proxmox's own lock of a container (flock, as PVE::AbstractConfig does); nothing for plain LXC.

    Raises :class:`WriteRefused` when a Proxmox tool holds it for ``timeout`` seconds.
    """
    if container_id is None:
        yield
        return
    path = os.path.join(lock_root, f"pve-config-{container_id}.lock")
    try:
        os.makedirs(lock_root, mode=0o755, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise WriteRefused(
            status.FAILED, f"Proxmox's lock {path} cannot be opened: {_text(error)}"
        ) from error
    try:
        _wait_for(handle, path, timeout)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, path: str, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise WriteRefused(
                    status.REJECTED,
                    f"a Proxmox tool has held {path} for {timeout:g} s; nothing of the container was "
                    "changed, run again",
                ) from None
            time.sleep(0.1)


def backup(directory: str, source: Source) -> str:
    """Keep a config's bytes in a private directory and return the path; the same bytes are kept once.

    Raises :class:`WriteRefused` when that fails: nothing is changed that cannot be given back.
    """
    digest = hashlib.sha256(source.data).hexdigest()[:16]
    path = os.path.join(directory, f"{source.path.strip('/').replace('/', '_')}.{digest}")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _check_private(directory)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
            if stream.read() == source.data:
                return path
        _write_backup(path, source.data)
    except OSError as error:
        raise WriteRefused(
            status.FAILED,
            f"{source.path} was not changed: its backup in {directory} cannot be written: {_text(error)}",
        ) from error
    return path


def _check_private(directory: str) -> None:
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(errno.EPERM, "it must be a directory of the running user that nobody else can write")


def _write_backup(path: str, data: bytes) -> None:
    temporary = f"{path}{_TEMPORARY_MARK}{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            _write_all(stream.fileno(), data)
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def replace_config(source: Source, data: bytes, config_format: str) -> bytes:
    """Put ``data`` in the place of a config that is still as ``source``, and return a fresh read of it.

    At every instant the path holds the old or the new bytes, whole. Raises :class:`WriteRefused`; the old
    config is then in place.
    """
    directory, name = os.path.split(os.path.abspath(source.path))
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise WriteRefused(status.FAILED, f"{source.path} was not changed: {_text(error)}") from error
    try:
        _remove_leftovers(parent, name)
        _replace_in(parent, name, source, data, config_format)
        return _fresh(source.path)
    finally:
        os.close(parent)


def _fresh(path: str) -> bytes:
    try:
        return read_config(path).data
    except ConfigError as error:
        raise WriteRefused(status.FAILED, f"{path} was written but cannot be read back: {error}") from error


def _remove_leftovers(parent: int, name: str) -> None:
    """Remove what a killed run was writing: the run's own lock says that nobody is writing now."""
    mark = re.compile(re.escape(f"{name}{_TEMPORARY_MARK}") + r"[0-9a-f]{16}")
    for entry in os.listdir(parent):
        if mark.fullmatch(entry):
            with contextlib.suppress(OSError):
                os.unlink(entry, dir_fd=parent)


def _replace_in(parent: int, name: str, source: Source, data: bytes, config_format: str) -> None:
    temporary = f"{name}{_TEMPORARY_MARK}{secrets.token_hex(8)}"
    try:
        _write_temporary(parent, temporary, source, data, config_format)
        _check_unchanged(parent, name, source)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except WriteRefused:
        _drop(parent, temporary)
        raise
    except OSError as error:
        _drop(parent, temporary)
        raise _refusal(source.path, error, config_format) from error
    # The rename has happened: a directory that cannot be synced does not undo it.
    with contextlib.suppress(OSError):
        os.fsync(parent)


def _drop(parent: int, temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary, dir_fd=parent)


def _write_temporary(parent: int, temporary: str, source: Source, data: bytes, config_format: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600, dir_fd=parent)
    try:
        _write_all(handle, data)
        _keep_owner_and_mode(handle, source, fixed_by_path=config_format == grammar.PROXMOX)
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _keep_owner_and_mode(handle: int, source: Source, fixed_by_path: bool) -> None:
    """Give the new file the old one's owner, mode and extended attributes, and call nothing needlessly.

    ``fixed_by_path``: on pmxcfs both files have what their path gives them, so nothing differs; should a
    version of it differ and refuse, the path decides all the same.
    """
    now = os.fstat(handle)
    try:
        if (now.st_uid, now.st_gid) != (source.stat.st_uid, source.stat.st_gid):
            os.fchown(handle, source.stat.st_uid, source.stat.st_gid)
        if stat.S_IMODE(os.fstat(handle).st_mode) != stat.S_IMODE(source.stat.st_mode):
            os.fchmod(handle, stat.S_IMODE(source.stat.st_mode))
    except OSError as error:
        if not fixed_by_path or error.errno not in _NOT_OFFERED:
            raise
    _copy_attributes(handle, source.path)


def _copy_attributes(handle: int, path: str) -> None:
    try:
        for attribute in os.listxattr(path, follow_symlinks=False):
            os.setxattr(handle, attribute, os.getxattr(path, attribute, follow_symlinks=False))
    except OSError as error:
        if error.errno not in (*_NOT_OFFERED, errno.ENODATA):
            raise


def _check_unchanged(parent: int, name: str, source: Source) -> None:
    """Raise :class:`WriteRefused` when the config is no longer what the edit was computed from."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    same_file = (found.st_dev, found.st_ino) == (source.stat.st_dev, source.stat.st_ino)
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    with os.fdopen(handle, "rb") as stream:
        same_bytes = stream.read(MAX_SIZE + 1) == source.data
    # pmxcfs numbers its inodes anew with each version, so the bytes decide; a file that was replaced by
    # one of the same bytes is as good.
    if not same_bytes or not (same_file or stat.S_ISREG(found.st_mode)):
        raise WriteRefused(
            status.FAILED,
            f"{source.path} changed since it was read; nothing was written, run again to repair what it is "
            "now",
        )


def _refusal(path: str, error: OSError, config_format: str) -> WriteRefused:
    """Return what an error of the write means to the user."""
    if error.errno in (errno.EACCES, errno.EROFS):
        quorum = (
            "; on /etc/pve that means the cluster has no quorum (pvecm status)"
            if config_format == grammar.PROXMOX
            else ""
        )
        return WriteRefused(
            status.READ_ONLY, f"{path} was not changed: {_text(error)}{quorum}; run again when it is writable"
        )
    cause = {
        errno.ENOSPC: "make room on its file system and run again",
        errno.EDQUOT: "make room in the quota and run again",
        errno.EFBIG: "the file system takes no file of that size",
    }.get(error.errno or 0, "the old config is in place")
    return WriteRefused(status.FAILED, f"{path} was not changed: {_text(error)}; {cause}")


def _text(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error} ({code})" if code else str(error)
