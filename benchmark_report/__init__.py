# SPDX-License-Identifier: GPL-3.0-or-later
"""Read benchmark measurements, compare them, explain the outcome, draw it. Runs on the controller.

A *measurement* is one JSON document (``measurement.schema.json``): the fingerprint of the host, the workload,
and the fabric and inference runs. Needs SciPy and Matplotlib (``requirements/benchmark.in``).
"""

from __future__ import annotations

import pathlib
import sys

_REPO = pathlib.Path(__file__).resolve().parents[1]
for _folder in (str(_REPO / "module_utils"), str(_REPO / "plugin_utils")):
    if _folder not in sys.path:  # the parsers and the physics are shared with the managed host
        sys.path.append(_folder)
