# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare two measurements by hand: ``python -m benchmark_report BASELINE.json MEASUREMENT.json``."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from . import conclude, page


def main() -> int:
    """Print the record's section; write page and JSON where asked. Exit code 1 when it is not compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmark_report", description=__doc__)
    parser.add_argument("baseline", help="measurement.json of the arm before")
    parser.add_argument("measurement", help="measurement.json of the arm after")
    parser.add_argument("--expect", nargs="*", default=["settings"], help="parts that were meant to differ")
    parser.add_argument("--show", action="store_true", help="compare although more differs")
    parser.add_argument("--html", help="file for the page")
    parser.add_argument("--json", help="file for the report as JSON")
    options = parser.parse_args()
    try:
        before, after = conclude.load(options.baseline), conclude.load(options.measurement)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report = conclude.conclude(before, after, options.expect, "show" if options.show else "refuse")
    if options.html:
        pathlib.Path(options.html).write_text(page.html(report), encoding="utf-8")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(page.markdown(report))
    return 1 if report["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
