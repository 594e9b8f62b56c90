# SPDX-License-Identifier: GPL-3.0-or-later
"""Read ``nvbandwidth -j``, in the shape of the project's own P2P program.

Its traps, all handled here: cells are strings and an empty one is "N/A"; a bidirectional test appends three
matrices (both directions, then the total) to one entry; a test that failed leaves an entry that says
"Running" and a second one of the same name that says "Error"; a CUDA failure still prints JSON, with an
``error`` key; ``read`` moves data from the column's device to the row's.
"""

from __future__ import annotations

import json
import math
from typing import Any, Optional

from .figures import BadResult

Matrix = list[list[Optional[float]]]

#: test name -> (kind, direction)
TESTS = {
    "host_to_device_memcpy_ce": ("h2d", None),
    "device_to_host_memcpy_ce": ("d2h", None),
    "device_to_device_memcpy_write_ce": ("d2d", "push"),
    "device_to_device_memcpy_read_ce": ("d2d", "pull"),
    "device_to_device_bidirectional_memcpy_write_ce": ("d2d_both", "push"),
    "device_to_device_latency_sm": ("latency", None),
}


def _cell(text: Any, test: str) -> Optional[float]:
    if text in ("N/A", None, ""):
        return None
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise BadResult(f"nvbandwidth {test}: the cell {text!r} is not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise BadResult(f"nvbandwidth {test}: the cell {text!r} is no measured figure")
    return value


def _matrix(test: dict[str, Any]) -> Matrix:
    rows = test.get("bandwidth_matrix")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise BadResult(f"nvbandwidth {test.get('name')}: there is no bandwidth_matrix")
    return [[_cell(cell, str(test["name"])) for cell in row] for row in rows]


def _measurements(name: str, matrix: Matrix) -> list[dict[str, Any]]:
    kind, direction = TESTS[name]
    if kind == "d2d_both":
        columns = len(matrix[0])
        if len(matrix) != 3 * columns:
            raise BadResult(
                f"nvbandwidth {name}: {len(matrix)} rows where three matrices of {columns} belong"
            )
        matrix = matrix[2 * columns :]
    unit = "median_us" if kind == "latency" else "median_gbps"
    found = []
    for row, cells in enumerate(matrix):
        for column, value in enumerate(cells):
            if value is None or (kind == "d2d_both" and row > column):
                continue
            source, target = (column, row) if direction == "pull" else (row, column)
            ends = {"source": None if kind == "h2d" else source, "target": None if kind == "d2h" else target}
            if kind == "d2h":
                ends["source"] = column
            figure = value / 1000 if kind == "latency" else value  # latencies are nanoseconds
            found.append(
                {"kind": kind, **ends, "node": None, "peer": True, "direction": direction, unit: figure}
            )
    return found


def parse(text: str) -> dict[str, Any]:
    """Return a P2P result from what nvbandwidth printed; raises BadResult with one sentence.

    The result has the keys of the P2P program's: devices, measurements (without samples: nvbandwidth keeps
    none), status ``complete`` or ``partial``, and an error that names the tests that failed.
    """
    start = text.find("{")
    try:
        data = json.loads(text[start:]) if start >= 0 else {}
        root = data["nvbandwidth"]
    except (ValueError, KeyError, TypeError):
        raise BadResult("nvbandwidth printed no complete JSON result") from None
    if root.get("error"):
        raise BadResult(f"nvbandwidth failed: {root['error']}")
    measurements: list[dict[str, Any]] = []
    tests = root.get("testcases") or []
    states: dict[str, str] = {}
    for test in tests:
        states[str(test.get("name"))] = str(test.get("status"))  # the later entry of a name is the outcome
    for test in tests:
        name = str(test.get("name"))
        if name in TESTS and states[name] == "Passed":
            measurements += _measurements(name, _matrix(test))
    failed = sorted(name for name, state in states.items() if state not in ("Passed", "Waived"))
    if not measurements:
        raise BadResult(f"nvbandwidth measured nothing (tests: {states or 'none'})")
    return {
        "engine": {"name": "nvbandwidth", "version": root.get("git version") or root.get("version")},
        "devices": [
            {"index": index, "name": str(name)}
            for index, name in enumerate(root.get("GPU Device list") or [])
        ],
        "measurements": measurements,
        "status": "partial" if failed else "complete",
        "error": {"message": f"nvbandwidth tests failed: {', '.join(failed)}", "exit_code": 1}
        if failed
        else None,
    }
