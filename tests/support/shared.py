# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the material that lies beside a checkout and is no part of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "GPU_TUNING_SHARED"


def shared_root() -> Path:
    """Return where ../shared is, or would be; the environment's GPU_TUNING_SHARED comes first."""
    beside_checkout = Path(__file__).resolve().parents[3] / "shared"
    return Path(os.environ.get(VARIABLE) or beside_checkout)


def why_missing(path: str) -> str | None:
    """Return why ../shared/``path`` cannot be used, None when it can."""
    place = shared_root() / path
    return None if place.exists() else f"no {place} (set {VARIABLE} to where shared/ is)"


def shared(path: str) -> Path:
    """Return ../shared/``path``, or skip the running test with the reason."""
    reason = why_missing(path)
    if reason:
        pytest.skip(reason)
    return shared_root() / path
