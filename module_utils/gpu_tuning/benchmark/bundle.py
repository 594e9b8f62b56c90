# SPDX-License-Identifier: GPL-3.0-or-later
"""The one file that travels to the measured host: this package as a zip that Python runs.

``python3 bundle.pyz start|poll|stop|result|remove|fingerprint ...`` answers with one JSON line; ``sweep`` and
``fabric`` are what a job runs.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from typing import Any

MAIN = "import sys\nfrom gpu_tuning.benchmark.bundle import main\nsys.exit(main(sys.argv[1:]))\n"
P2P = "p2p_bandwidth.py"


def build(p2p_program: str) -> bytes:
    """Return the bundle: this package, its parent's __init__ and the P2P program, as a runnable zip."""
    package = os.path.dirname(os.path.abspath(__file__))
    files = {"__main__.py": MAIN, "gpu_tuning/__init__.py": "", P2P: _read(p2p_program)}
    for name in sorted(os.listdir(package)):
        if name.endswith(".py"):
            files[f"gpu_tuning/benchmark/{name}"] = _read(os.path.join(package, name))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in files.items():
            bundle.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as handle:
        return handle.read()


def _spec(folder: str) -> dict[str, Any]:
    spec = dict(json.loads(_read(os.path.join(folder, "spec.json"))))
    spec["program"] = os.path.join(folder, P2P)
    with zipfile.ZipFile(os.path.join(folder, "bundle.pyz")) as bundle:  # it starts itself again: a real file
        bundle.extract(P2P, folder)
    return spec


def _run(program: str, folder: str) -> int:
    from . import fabric, sweep

    return sweep.main(_spec(folder)) if program == "sweep" else fabric.main(_spec(folder))


def _answer(command: str, arguments: list[str]) -> Any:
    from . import fingerprint, job

    if command == "start":
        order = json.loads(_read(arguments[0]))  # a file: arguments are for everybody to see
        found = fingerprint.collect(order["procfs_root"], order["sysfs_root"], order["environment"])
        folder = job.start(order["base"], order["lease"], sys.argv[0], order["program"], order["spec"])
        return {"folder": folder, "fingerprint": found}
    if command == "poll":
        return job.poll(arguments[0], int(arguments[1]))
    if command == "result":
        return {"result": job.result(arguments[0])}
    {"stop": job.stop, "remove": job.remove}[command](arguments[0])
    return {}


def main(arguments: list[str]) -> int:
    """Run one command; an error is one JSON line with the key ``error``, exit code 1."""
    command, *rest = arguments
    if command in ("sweep", "fabric"):
        return _run(command, rest[0])
    try:
        print(json.dumps(_answer(command, rest)))
        return 0
    except OSError as error:
        print(json.dumps({"error": f"{error.filename or 'a file'}: {error.strerror}"}))
        return 1
    except (ValueError, KeyError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
