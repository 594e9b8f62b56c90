# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the tools of the tests' own virtual environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(argv: list[str], cwd: Path = REPO, **environment: str) -> str:
    """Run a command that must succeed."""
    variables = {**os.environ, "PATH": PATH, **environment}
    done = subprocess.run(
        argv, cwd=cwd, env=variables, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
