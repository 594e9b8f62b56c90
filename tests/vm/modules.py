# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the stand-in modules against headers that are unpacked, not installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("kmod")


def build(headers: Path, release: str, directory: Path) -> list[Path]:
    """Build for one kernel into a directory; ``headers``: where its packages were unpacked."""
    source = headers / f"usr/src/linux-headers-{release}"
    makefile = source / "Makefile"
    # It includes its sibling by an absolute path, where the sibling would be if it were installed.
    relocated = re.sub(r"^include \S*?(/usr/src/)", rf"include {headers}\1", makefile.read_text(), flags=re.M)
    makefile.write_text(relocated)
    # With vmlinux there, the build wants pahole for type information.
    (source / "vmlinux").unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    for each in SOURCE.iterdir():
        shutil.copy(each, directory)
    argv = ["make", "-s", "-C", source, f"M={directory}", "CC=gcc-12", "modules"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted(directory.glob("*.ko"))
    subprocess.run(["strip", "--strip-debug", *built], check=True)
    return built
