# SPDX-License-Identifier: GPL-3.0-or-later
"""Start an inference server, wait until it is ready, stop it and only it; or attach to a running one."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from typing import Any, Callable, Optional

from . import processes

TAIL_LINES = 12


class ServerFailed(RuntimeError):
    """The server did not get ready, or ended; the text is for the user and holds the log's tail."""


def answers(url: str, timeout: float = 5.0) -> tuple[bool, str]:
    """Return whether a URL answers 200, and what it said otherwise."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status == 200, f"HTTP {reply.status}"
    except urllib.error.HTTPError as error:
        return False, f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return False, str(getattr(error, "reason", error))


def fetch_text(url: str, timeout: float = 10.0) -> Optional[str]:
    """Return a small page, None where it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return str(reply.read(1 << 20).decode(errors="replace"))
    except (OSError, ValueError):
        return None


class Server:
    """One server of the benchmark. ``spec``: command ([] to attach), environment, health_url, log,
    ready_timeout_s, stop_timeout_s."""

    def __init__(self, spec: dict[str, Any], say: Callable[[str], None]) -> None:
        """Nothing is started yet."""
        self.spec, self.say = spec, say
        self.process: Optional[subprocess.Popen[bytes]] = None

    @property
    def attached(self) -> bool:
        """Whether the server is somebody else's."""
        return not self.spec["command"]

    def start(self) -> None:
        """Start it (unless attached) and wait until it is ready; raises ServerFailed."""
        url = self.spec["health_url"]
        if not self.attached:
            ready, _ = answers(url)
            if ready:
                raise ServerFailed(
                    f"Something answers at {url} already: attach to it (an empty server command), "
                    "stop it, or choose another port."
                )
            self._launch()
        self._wait_ready(url)

    def _launch(self) -> None:
        try:
            with open(self.spec["log"], "ab") as log:
                self.process = processes.start(
                    self.spec["command"], self.spec["environment"], stdout=log, stderr=log
                )
        except OSError as error:
            program = self.spec["command"][0]
            raise ServerFailed(f"The server cannot be started: {program}: {error.strerror}.") from error

    def _wait_ready(self, url: str) -> None:
        start = said = time.monotonic()
        timeout = float(self.spec["ready_timeout_s"])
        while True:
            ready, cause = answers(url)
            self.check()
            now = time.monotonic()
            if ready:
                self.say(f"server ready after {now - start:.0f} s")
                return
            if now - start > timeout:
                raise ServerFailed(
                    f"The server was not ready after {timeout:.0f} s: {url} said: {cause}.{self.tail()}"
                )
            if now - said > 10:
                said = now
                self.say(f"waiting for the server: {now - start:.0f} of at most {timeout:.0f} s ({cause})")
            time.sleep(0.2)

    def check(self) -> None:
        """Raise ServerFailed when a server that we started has ended."""
        code = self.process.poll() if self.process else None
        if code is not None:
            raise ServerFailed(f"The server {processes.ended_by(code)}.{self.tail()}")

    def tail(self) -> str:
        """Return the last lines of the log as a text to append to a sentence."""
        if self.attached:
            return ""
        try:
            with open(self.spec["log"], "rb") as handle:
                handle.seek(0, 2)
                handle.seek(max(0, handle.tell() - 8192))
                lines = handle.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return ""
        return " The end of its log:\n  " + "\n  ".join(lines) if lines else " Its log is empty."

    def stop(self) -> None:
        """Stop what start() started, children included; an attached server is left alone."""
        if self.process:
            processes.stop(self.process, float(self.spec["stop_timeout_s"]))
            self.process = None
