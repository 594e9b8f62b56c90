#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama.cpp's own HTTP server from the xllamacpp wheel: ``llama_server.py MODEL.gguf PORT [SLOTS]``."""

from __future__ import annotations

import signal
import sys
import threading

import xllamacpp

CONTEXT_PER_SLOT = 1024


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
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
