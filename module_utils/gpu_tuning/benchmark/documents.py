# SPDX-License-Identifier: GPL-3.0-or-later
"""Write JSON so that a reader sees the old text or the new one, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from typing import Any

BALLAST = "ballast"


def drop_ballast(folder: str) -> None:
    """Give up the room that a job keeps for the moment when the disk is full."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, BALLAST))


def write_json(path: str, data: Any) -> None:
    """Write beside the target, sync and rename; raises OSError (ENOSPC ...) with the target untouched.

    ``allow_nan`` is off: a bare Infinity or NaN would make a file that only Python can read.
    """
    write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: str, text: str) -> None:
    """Write UTF-8 text in the same way, mode 0600 for a new file; an old file keeps its mode."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".gpu-benchmark.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            if os.path.exists(path):
                os.fchmod(file.fileno(), os.stat(path).st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
