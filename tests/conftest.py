# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# No example may depend on how busy the machine is; none is kept on the disk; and CI judges a change by the
# same examples each time, while everybody else looks for new ones.
hypothesis.settings.register_profile(
    "repo", deadline=None, database=None, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("repo")

# Plays that are meant to fail leave no list of hosts in the checkout's reports.
os.environ["ANSIBLE_RETRY_FILES_ENABLED"] = "false"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Give a new folder in memory, as procfs and sysfs are: the journal's fsyncs cost nothing there.

    The very same tests take minutes beside a program that keeps the disk busy.
    """
    memory = "/dev/shm"
    place = memory if os.path.ismount(memory) and os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="gpu-tuning-", dir=place))
    # With room beside it, for a journal that must not be in it; and for every user to look at.
    (folder / "machine").mkdir()
    folder.chmod(0o755)
    yield folder / "machine"
    shutil.rmtree(folder)
