# SPDX-License-Identifier: GPL-3.0-or-later
"""A file system with the manners of /etc/pve (pmxcfs), in memory, for tests.

Run as ``python -m support.pmxcfs MOUNTPOINT CONTROL``. The file CONTROL holds "quorate", "lost", or the
number of changing calls after which the quorum is lost. Errors are those measured on a real pmxcfs:
without quorum everything that changes gives EACCES and files show 0440; chmod and chown succeed only for
what is there already.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fuse

WWW_DATA = 33
MAX_FILE = 1 << 20


class Pmxcfs(fuse.Operations):  # type: ignore[misc]
    """Files by path; directories are those that were made, ``/`` among them."""

    def __init__(self, control: Path) -> None:
        self.control = control
        self.files: dict[str, bytearray] = {}
        self.directories = {"/"}
        self.versions: dict[str, int] = {"/": 1}
        self.numbers = itertools.count(2)
        self.changes = 0

    def quorate(self) -> bool:
        word = self.control.read_text().strip()
        return word == "quorate" or (word.isdigit() and self.changes < int(word))

    def change(self, path: str) -> None:
        """Count a changing call, or refuse it as pmxcfs does."""
        if not self.quorate():
            raise fuse.FuseOSError(errno.EACCES)
        self.changes += 1
        self.versions[path] = next(self.numbers)

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        quorate = self.quorate()
        common = {"st_uid": 0, "st_gid": WWW_DATA, "st_ino": self.versions.get(path, 0), "st_nlink": 1}
        if path in self.directories:
            return {**common, "st_mode": stat.S_IFDIR | (0o755 if quorate else 0o555)}
        if path in self.files:
            mode = stat.S_IFREG | (0o640 if quorate else 0o440)
            return {**common, "st_mode": mode, "st_size": len(self.files[path])}
        raise fuse.FuseOSError(errno.ENOENT)

    def readdir(self, path: str, fh: Any) -> list[str]:
        names = [*self.files, *(self.directories - {"/"})]
        return [".", "..", *(os.path.basename(name) for name in names if os.path.dirname(name) == path)]

    def open(self, path: str, flags: int) -> int:
        if path not in self.files:
            raise fuse.FuseOSError(errno.ENOENT)
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.change(path)
        self.files[path] = bytearray()
        return 0

    def read(self, path: str, size: int, offset: int, fh: Any) -> bytes:
        return bytes(self.files[path][offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: Any) -> int:
        self.change(path)
        if offset + len(data) > MAX_FILE:
            raise fuse.FuseOSError(errno.EFBIG)
        content = self.files[path]
        content.extend(b"\0" * (offset - len(content)))
        content[offset : offset + len(data)] = data
        return len(data)

    def truncate(self, path: str, length: int, fh: Any = None) -> None:
        self.change(path)
        if length > MAX_FILE:
            raise fuse.FuseOSError(errno.EFBIG)
        content = self.files[path]
        del content[length:]
        content.extend(b"\0" * (length - len(content)))

    def rename(self, old: str, new: str) -> None:
        self.change(new)
        self.files[new] = self.files.pop(old)

    def unlink(self, path: str) -> None:
        self.change(path)
        del self.files[path]

    def mkdir(self, path: str, mode: int) -> None:
        self.change(path)
        self.directories.add(path)

    def chmod(self, path: str, mode: int) -> None:
        if path in self.directories or stat.S_IMODE(mode) != 0o640:
            raise fuse.FuseOSError(errno.EPERM)

    def chown(self, path: str, uid: int, gid: int) -> None:
        same = (0, 2**32 - 1, -1)
        if uid not in same or gid not in (WWW_DATA, 2**32 - 1, -1):
            raise fuse.FuseOSError(errno.EPERM)

    def utimens(self, path: str, times: Any = None) -> None:
        self.change(path)

    def link(self, target: str, source: str) -> None:
        raise fuse.FuseOSError(errno.EPERM)

    def symlink(self, target: str, source: str) -> None:
        raise fuse.FuseOSError(errno.ENOSYS)

    def mknod(self, path: str, mode: int, dev: int) -> None:
        raise fuse.FuseOSError(errno.ENOSYS)

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        raise fuse.FuseOSError(errno.EOPNOTSUPP)

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> None:
        raise fuse.FuseOSError(errno.EOPNOTSUPP)

    def listxattr(self, path: str) -> list[str]:
        raise fuse.FuseOSError(errno.EOPNOTSUPP)

    def fsync(self, path: str, datasync: int, fh: Any) -> int:
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: Any) -> int:
        return 0


@contextmanager
def mounted(mountpoint: Path, control: Path) -> Iterator[Path]:
    """Mount the file system in a process of its own for the block, quorate at first."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    control.write_text("quorate")
    command = [sys.executable, "-m", "support.pmxcfs", str(mountpoint), str(control)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    server = subprocess.Popen(command, env=environment)
    try:
        _wait_until_mounted(server, mountpoint)
        yield mountpoint
    finally:
        subprocess.run(["fusermount", "-u", "-z", str(mountpoint)], check=False)
        server.terminate()
        server.wait(timeout=30)


def _wait_until_mounted(server: subprocess.Popen[bytes], mountpoint: Path) -> None:
    end = time.monotonic() + 30
    while not os.path.ismount(mountpoint):
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the stand-in for pmxcfs did not mount {mountpoint}")
        time.sleep(0.02)


def main() -> None:
    mountpoint, control = sys.argv[1:]
    options = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0, "use_ino": True}
    fuse.FUSE(Pmxcfs(Path(control)), mountpoint, foreground=True, nothreads=True, **options)


if __name__ == "__main__":
    main()
