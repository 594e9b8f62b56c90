#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama.cpp's own HTTP server from the xllamacpp wheel: ``llama_server.py MODEL.gguf PORT [SLOTS]``.

SERVER_SHARE in the environment (0.1: a tenth of the time) throttles it for real: a child stops and
continues it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import xllamacpp

CONTEXT_PER_SLOT = 1024
PERIOD = 0.02


def throttle(share: float) -> None:
    """Leave a child behind that lets this process run for ``share`` of each period, and dies with it."""
    if os.fork():
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    while True:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(PERIOD * (1 - share))
        os.kill(os.getppid(), signal.SIGCONT)
        time.sleep(PERIOD * share)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = int(sys.argv[2])
    parameters.n_parallel = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    parameters.n_ctx = parameters.n_parallel * CONTEXT_PER_SLOT
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.model_alias = {"tiny"}
    parameters.cache_prompt, parameters.cache_ram_mib = False, 0
    parameters.warmup = False
    server = xllamacpp.Server(parameters)
    print("listening on", server.listening_address, flush=True)
    if os.environ.get("SERVER_SHARE"):
        throttle(float(os.environ["SERVER_SHARE"]))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
