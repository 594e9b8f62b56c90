# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a tree of small files and relative links: a recorded sysfs and procfs."""

from __future__ import annotations

import os
from collections.abc import Mapping

READ_ONLY = 0o444
WRITABLE = 0o644


class HostTree:
    """Files below ``root``, named by paths relative to it. Nothing is written over."""

    def __init__(self, root: str) -> None:
        """Start a tree; ``root`` is made with the first file."""
        self.root = root
        self._made: set[str] = set()

    def file(self, path: str, content: object, mode: int = READ_ONLY) -> None:
        """Write one file. Bytes go in as they are, anything else as text with a newline after it."""
        data = content if isinstance(content, bytes) else f"{content}\n".encode()
        descriptor = os.open(self._place(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            os.write(descriptor, data)
            os.fchmod(descriptor, mode)  # whatever the umask
        finally:
            os.close(descriptor)

    def files(self, directory: str, contents: Mapping[str, object], mode: int = READ_ONLY) -> None:
        """Write one file per name in ``contents``."""
        for name, content in contents.items():
            self.file(f"{directory}/{name}", content, mode)

    def writable(self, directory: str, contents: Mapping[str, object]) -> None:
        """Write one file per name that root may change."""
        self.files(directory, contents, WRITABLE)

    def link(self, path: str, target: str) -> None:
        """Make ``path`` a relative link to ``target``, both relative to the root of the tree."""
        os.symlink(os.path.relpath(target, os.path.dirname(path)), self._place(path))

    def directory(self, path: str) -> None:
        """Make a directory and those above it."""
        if path not in self._made:
            os.makedirs(os.path.join(self.root, path), exist_ok=True)
            self._made.add(path)

    def _place(self, path: str) -> str:
        self.directory(os.path.dirname(path))
        return os.path.join(self.root, path)
