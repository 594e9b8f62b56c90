# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows and GPUs as Prometheus metrics, for node_exporter's textfile collector.

Source: prometheus.io/docs/instrumenting/exposition_formats and /docs/practices/naming.
"""

from __future__ import annotations

from collections.abc import Iterable

from .gpu_health import Gpu
from .owned_files import HEADER
from .rows import OK, Row, Value
from .typed import Optional, Union

Number = Union[int, float]
Sample = tuple[dict[str, str], Number]

#: Text values with an order of their own, as the kernel's files have them.
_AS_NUMBER = {"enabled": 0, "disabled": 1, "absent": 0, "loaded": 1}
_KNOWN_STATES = ("cpuidle", "module")


def exposition(
    rows: list[Row], gpus: list[Gpu], expected: Optional[list[str]], checked_at: float, seconds: float
) -> str:
    """Return a whole textfile. ``expected``: addresses of GPUs when the policy was recorded."""
    read = [row for row in rows if row.desired is not None and row.before is not None]
    lines = [HEADER]
    for name, kind, text, samples in (
        (
            "setting_desired",
            "gauge",
            "Value the policy asks for, if a number.",
            _numbers(read, True),
        ),
        ("setting_actual", "gauge", "Value read, if a number.", _numbers(read, False)),
        ("setting_info", "gauge", "Values of settings that are texts.", _texts(read)),
        ("setting_in_desired_state", "gauge", "1 when the value is as the policy asks.", _verdicts(rows)),
        ("gpus", "gauge", "GPUs that answer.", [({}, sum(gpu.answers for gpu in gpus))]),
        ("gpus_expected", "gauge", "GPUs there when the policy was recorded.", _expected(expected)),
        ("gpu_present", "gauge", "1 when a GPU of the recorded policy answers.", _present(gpus, expected)),
        ("pcie_link_width_lanes", "gauge", "Width of a GPU's link.", _widths(gpus, "width")),
        (
            "pcie_link_max_width_lanes",
            "gauge",
            "Width that a GPU's link can have.",
            _widths(gpus, "max_width"),
        ),
        ("pcie_aer_errors_total", "counter", "PCI Express errors of a GPU since boot.", _errors(gpus)),
        ("last_check_timestamp_seconds", "gauge", "When the last check ended.", [({}, round(checked_at, 3))]),
        ("check_duration_seconds", "gauge", "Wall time of the last check.", [({}, round(seconds, 6))]),
    ):
        lines += _family(f"gpu_tuning_{name}", kind, text, samples)
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> list[str]:
    listed = [f"{name}{_labels(labels)} {number}" for labels, number in samples]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *listed] if listed else []


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number_of(kind: str, value: Value) -> Optional[int]:
    """Return a value as a number, None for a text: an idle state's "disabled" is 1, as in its file."""
    if kind in _KNOWN_STATES:
        return _AS_NUMBER.get(str(value))
    try:
        return int(str(value))
    except ValueError:
        return None


def _numbers(settings: list[Row], desired: bool) -> list[Sample]:
    found: list[Sample] = []
    for row in settings:
        number = number_of(row.kind, row.desired if desired else row.before)
        if number is not None:
            found.append((_identity(row), number))
    return found


def _texts(settings: list[Row]) -> list[Sample]:
    return [
        ({**_identity(row), "desired": str(row.desired), "actual": str(row.before)}, 1)
        for row in settings
        if number_of(row.kind, row.before) is None
    ]


def _verdicts(rows: list[Row]) -> list[Sample]:
    """Leave out what does not apply on this host, and kinds of rows that ask for nothing."""
    skipped = ("not_applicable", "unsupported")
    return [(_identity(row), int(row.status == OK)) for row in rows if row.status not in skipped]


def _identity(row: Row) -> dict[str, str]:
    return {"id": row.id, "kind": row.kind}


def _expected(expected: Optional[list[str]]) -> list[Sample]:
    return [] if expected is None else [({}, len(expected))]


def _present(gpus: list[Gpu], expected: Optional[list[str]]) -> list[Sample]:
    answering = {gpu.address for gpu in gpus if gpu.answers}
    return [({"address": address}, int(address in answering)) for address in expected or ()]


def _widths(gpus: list[Gpu], which: str) -> list[Sample]:
    lanes = [(gpu.address, getattr(gpu, which)) for gpu in gpus]
    return [({"address": address}, width) for address, width in lanes if width is not None]


def _errors(gpus: list[Gpu]) -> list[Sample]:
    return [
        ({"address": gpu.address, "severity": severity}, count)
        for gpu in gpus
        for severity, count in gpu.errors.items()
    ]
