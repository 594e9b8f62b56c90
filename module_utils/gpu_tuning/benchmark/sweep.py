# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure a server over concurrency levels, repeated, with results that count only when they are whole.

The unit of replication is one run of one level in one repeat; by default each repeat starts the server anew.
Seeds differ per repeat and level (a warm prefix cache makes a second run look twice as fast) and are the same
in both arms of a comparison. What was measured is on disk after every run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from typing import Any, Callable, Optional

from . import figures, processes
from .documents import drop_ballast, write_json
from .server import Server, ServerFailed, answers, fetch_text

SCHEMA = "gpu_benchmark/inference/1"


class Interrupted(BaseException):
    """A signal asked the sweep to end."""


def _on_signal(number: int, _frame: Any) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def requests_of(level: int, spec: dict[str, Any]) -> int:
    """Return how many requests a level gets: some per stream, and no fewer than the least."""
    return max(level * int(spec["requests_per_stream"]), int(spec["least_requests"]))


def seed_of(spec: dict[str, Any], repeat: int, level: int) -> int:
    """Return a run's seed: another one for each repeat and level, the same in both arms."""
    return int(spec["seed"]) + 1000 * repeat + int(spec["levels"].index(level))


def fill(command: list[str], names: dict[str, Any]) -> list[str]:
    """Return an argv with ``{name}`` replaced by its value; other braces (JSON arguments) stay."""
    filled = []
    for argument in command:
        for name, value in names.items():
            argument = argument.replace("{" + name + "}", str(value))
        filled.append(argument)
    return filled


class Sweep:
    """The whole measurement; ``result`` is JSON-ready at any time."""

    def __init__(self, spec: dict[str, Any], say: Callable[[str], None]) -> None:
        """Nothing is started yet. ``spec`` is what the role builds; see its argument specification."""
        self.spec, self.say = {**spec, "levels": [int(level) for level in spec["levels"]]}, say
        self.server = Server({**spec["server"], "log": os.path.join(spec["folder"], "server.log")}, say)
        self.runs: list[dict[str, Any]] = []
        self.started, self.done = time.monotonic(), 0
        # "partial" until the end: a sweep that is killed outright leaves what it kept last
        self.result: dict[str, Any] = {
            "schema": SCHEMA,
            "status": "partial",
            "error": None,
            "runs": self.runs,
        }

    def run(self) -> int:
        """Measure everything; return 0 when every run counts, 1 otherwise. Partial results are kept."""
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _on_signal)
        try:
            self._all()
            failed = [run for run in self.runs if run["problems"]]
            if failed:
                self.result["error"] = (
                    f"{len(failed)} of {len(self.runs)} runs do not count: {_first(failed)}"
                )
        except (ServerFailed, Interrupted) as error:
            self.result["error"] = str(error)
        except OSError as error:
            drop_ballast(self.spec["folder"])
            self.result["error"] = disk_error(error)
        finally:
            self._end()
        if self.result["error"]:
            self.say(self.result["error"])
        return 1 if self.result["error"] else 0

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the server is stopped in order, whoever asks again
        self.server.stop()
        good = [run for run in self.runs if not run["problems"]]
        complete = not self.result["error"] and bool(good)
        self.result["status"] = "complete" if complete else "partial" if good else "failed"
        with contextlib.suppress(OSError):
            self._keep()

    def _all(self) -> None:
        repeats, restart = int(self.spec["repeats"]), bool(self.spec["restart_server"])
        for repeat in range(1, repeats + 1):
            if repeat == 1 or (restart and not self.server.attached):
                self.server.stop()
                self.say(
                    f"repeat {repeat}/{repeats}: "
                    + ("attach" if self.server.attached else "start the server")
                )
                self.server.start()
                self._describe()
            for level in self.spec["levels"]:
                self._one(repeat, level)
                self._keep()

    def _describe(self) -> None:
        if "server_info" not in self.result and self.spec.get("info_url"):
            self.result["server_info"] = (fetch_text(self.spec["info_url"]) or "")[:65536]

    def _one(self, repeat: int, level: int) -> None:
        run: dict[str, Any] = {
            "level": level,
            "repeat": repeat,
            "seed": seed_of(self.spec, repeat, level),
            "requests": requests_of(level, self.spec),
            "figures": None,
            "problems": [],
        }
        self.runs.append(run)
        output = os.path.join(self.spec["folder"], f"client-{repeat}-{level}.json")
        try:
            code = self._client(run, output)
            run["figures"] = self._read(output)
            planned, length = run["requests"], int(self.spec["output_length"])
            run["problems"] += figures.problems(run["figures"], planned, length)
            if code != 0:
                run["problems"].append(f"the load generator {processes.ended_by(code)}{self._said(output)}")
        except figures.BadResult as error:
            run["problems"].append(f"{error}{self._said(output)}")
        except BaseException:
            run["problems"].append("interrupted")
            raise
        finally:
            self.done += 1
            self._progress(run)
        self.server.check()  # a server that is gone explains a failed run better than the client can
        if run["problems"] and not answers(self.spec["server"]["health_url"])[0]:
            raise ServerFailed(f"The server no longer answers at {self.spec['server']['health_url']}.")

    def _client(self, run: dict[str, Any], output: str) -> int:
        names = {
            "output_file": output,
            "concurrency": run["level"],
            "requests": run["requests"],
            "seed": run["seed"],
            "input_length": self.spec["input_length"],
            "output_length": self.spec["output_length"],
            "warmup": self.spec["warmup_requests"],
        }
        command = fill(self.spec["client"]["command"], names)
        try:
            with open(output + ".log", "wb") as log:
                client = processes.start(command, self.spec["client"]["environment"], stdout=log, stderr=log)
        except FileNotFoundError as error:
            raise ServerFailed(
                f"The load generator cannot be started: {command[0]} does not exist."
            ) from error
        try:
            return self._wait(client)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()

    def _wait(self, client: subprocess.Popen[bytes]) -> int:
        """Wait for the client; one whose server has ended gets five more seconds to say so."""
        end = time.monotonic() + float(self.spec["client"]["timeout_s"])
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return client.wait(timeout=0.5)
            gone = self.server.process is not None and self.server.process.poll() is not None
            if gone:
                end = min(end, time.monotonic() + 5)
            if time.monotonic() > end:
                cause = "the server ended during the run" if gone else "it did not end in time and was ended"
                raise figures.BadResult(f"the load generator was stopped: {cause}")

    def _read(self, output: str) -> dict[str, Any]:
        try:
            with open(output, encoding="utf-8", errors="replace") as handle:
                return figures.parse(self.spec["client"]["tool"], handle.read())
        except FileNotFoundError:
            raise figures.BadResult("the load generator left no result") from None

    def _said(self, output: str) -> str:
        with contextlib.suppress(OSError), open(output + ".log", "rb") as handle:
            lines = handle.read()[-4096:].decode(errors="replace").strip().splitlines()
            return f" (it said: {lines[-1].strip()[:300]})" if lines else ""
        return ""

    def _progress(self, run: dict[str, Any]) -> None:
        total = int(self.spec["repeats"]) * len(self.spec["levels"])
        left = (time.monotonic() - self.started) / self.done * (total - self.done)
        found = run["figures"]
        text = (
            "FAILED: " + "; ".join(run["problems"])
            if run["problems"]
            else (
                f"{found['output_tokens_per_s']:.1f} tok/s, TTFT {found['ttft_ms']['median']:.0f} ms, "
                f"TPOT {found['tpot_ms']['median']:.1f} ms"
            )
        )
        where = f"repeat {run['repeat']}/{self.spec['repeats']}, concurrency {run['level']}"
        self.say(f"[{self.done}/{total}] {where}: {text}  (about {left:.0f} s left)")

    def _keep(self) -> None:
        write_json(
            os.path.join(self.spec["folder"], "result.json"), {**self.result, "status": self._status()}
        )

    def _status(self) -> str:
        ended = self.result["status"] != "failed" or bool(self.result["error"])
        return str(self.result["status"]) if ended else "partial"


def _first(failed: list[dict[str, Any]]) -> str:
    run = failed[0]
    return f"concurrency {run['level']}, repeat {run['repeat']}: {'; '.join(run['problems'])}"


def disk_error(error: OSError) -> str:
    """Return one sentence for a file that cannot be written."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return (
            f"The disk of the work folder is full{where}: free some, or set another gpu_benchmark_work_dir."
        )
    return f"A file of the benchmark cannot be written{where}: {error.strerror}."


def tell(text: str) -> None:
    """Print a line of progress; a full disk or a reader that is gone must not end the measurement."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def main(spec: dict[str, Any], say: Optional[Callable[[str], None]] = None) -> int:
    """Run a sweep from its specification; see Sweep."""
    return Sweep(spec, say or tell).run()
