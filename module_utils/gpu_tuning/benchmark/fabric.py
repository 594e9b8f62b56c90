# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the P2P program, or nvbandwidth where it is installed, as often as a comparison needs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, Callable, Optional

from . import nvbandwidth, processes
from .documents import drop_ballast, write_json
from .figures import BadResult
from .sweep import disk_error, tell

SCHEMA = "gpu_benchmark/fabric/1"
NOTHING_TO_MEASURE = 3


class Fabric:
    """All repeats; ``result`` is JSON-ready at any time and on disk after every repeat."""

    def __init__(self, spec: dict[str, Any], say: Callable[[str], None]) -> None:
        """``spec``: folder, program, python, engine (auto, driver, torch, nvbandwidth), repeats, arguments,
        size_mib, timeout_s."""
        self.spec, self.say = spec, say
        self.child: Optional[subprocess.Popen[bytes]] = None
        self.runs: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {"schema": SCHEMA, "status": "failed", "error": None, "runs": self.runs}

    def run(self) -> int:
        """Measure all repeats; return the first exit code that is not 0 (3: nothing to measure)."""
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._interrupted)
        code = 0
        for repeat in range(1, int(self.spec["repeats"]) + 1):
            self.say(f"fabric, repeat {repeat}/{self.spec['repeats']}")
            code = self._nvbandwidth() if self._engine() == "nvbandwidth" else self._own(repeat)
            self._keep(code)
            if code:
                break
        return code

    def _engine(self) -> str:
        wanted = str(self.spec["engine"])
        if wanted != "auto":
            return wanted
        return "nvbandwidth" if shutil.which("nvbandwidth") else "driver"

    def _interrupted(self, number: int, _frame: Any) -> None:
        self.result["error"] = f"stopped by {signal.Signals(number).name}"
        if self.child:
            self.child.send_signal(signal.SIGTERM)  # it ends its own child and keeps what it has

    def _own(self, repeat: int) -> int:
        output = os.path.join(self.spec["folder"], f"p2p-{repeat}.json")
        command = [self.spec["python"] or sys.executable, self.spec["program"], "--output", output]
        command += ["--engine", self._engine(), *self.spec["arguments"]]
        lines: list[str] = []
        self.child = processes.start(command, {}, stderr=subprocess.PIPE)
        assert self.child.stderr is not None
        for line in self.child.stderr:
            lines.append(line.decode(errors="replace").rstrip())
            self.say(lines[-1])
        code = self.child.wait()
        self._take(output)
        if code and not self.result["error"]:
            self.result["error"] = lines[-1] if lines else f"The P2P program {processes.ended_by(code)}."
        return code

    def _take(self, output: str) -> None:
        try:
            with open(output, encoding="utf-8") as handle:
                self.runs.append(json.load(handle))
        except (OSError, ValueError):
            self.result["error"] = self.result["error"] or "The P2P program left no result."

    def _nvbandwidth(self) -> int:
        tests = [*nvbandwidth.TESTS]
        command = ["nvbandwidth", "-j", "-b", str(self.spec["size_mib"]), "-i", "5", "-t", *tests]
        self.child = processes.start(command, {}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = self.child.communicate(timeout=float(self.spec["timeout_s"]) * len(tests))
            self.runs.append(nvbandwidth.parse(output.decode(errors="replace")))
            return 0
        except BadResult as error:
            self.result["error"] = str(error)
        except subprocess.TimeoutExpired:
            processes.stop(self.child, 2.0)
            self.result["error"] = "nvbandwidth did not end in time and was ended; see dmesg for Xid errors."
        return 1

    def _keep(self, code: int) -> None:
        whole = [run for run in self.runs if run["status"] == "complete"]
        complete = code == 0 and not self.result["error"] and len(whole) == len(self.runs)
        self.result["status"] = "complete" if complete else "partial" if whole else "failed"
        try:
            write_json(os.path.join(self.spec["folder"], "result.json"), self.result)
        except OSError as error:
            drop_ballast(self.spec["folder"])
            self.result["error"] = disk_error(error)
            write_json(os.path.join(self.spec["folder"], "result.json"), {**self.result, "status": "partial"})


def main(spec: dict[str, Any], say: Optional[Callable[[str], None]] = None) -> int:
    """Run the repeats from their specification; see Fabric."""
    return Fabric(spec, say or tell).run()
