# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows as a JUnit report, for whatever shows test results in CI. Runs on the controller."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from .drift import difference
from .rows import NOT_APPLICABLE, READ_ONLY, UNSUPPORTED, Row

_SKIPPED = (NOT_APPLICABLE, UNSUPPORTED, READ_ONLY)
#: What XML 1.0 cannot hold at all.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(host: str, checked: str, rows: list[Row], failing: list[Row]) -> str:
    """Return the report of one host: a test case per row. ``checked``: the time, UTC."""
    failed = {row.id for row in failing}
    skipped = [row for row in rows if row.status in _SKIPPED and row.id not in failed]
    counts = {"tests": len(rows), "failures": len(failed), "errors": 0, "skipped": len(skipped)}
    numbers = {name: str(count) for name, count in counts.items()}
    root = ET.Element("testsuites", {"name": "gpu_tuning", **numbers})
    suite = ET.SubElement(
        root, "testsuite", {"name": _clean(host), "timestamp": checked.rstrip("Z"), **numbers}
    )
    for row in rows:
        case = ET.SubElement(
            suite, "testcase", {"classname": f"gpu_tuning.{row.kind}", "name": _clean(row.id)}
        )
        if row.id in failed:
            message = f"{row.status}: {difference(row)}{row.reason}"
            ET.SubElement(case, "failure", {"type": row.status, "message": _clean(message)})
        elif row.status in _SKIPPED:
            ET.SubElement(case, "skipped", {"message": _clean(str(row.reason))})
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
