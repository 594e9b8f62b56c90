# SPDX-License-Identifier: GPL-3.0-or-later
"""A callback that writes every task's result to a file, a JSON document a line."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: collect
type: aggregate
short_description: Write every task's result to a file, for tests and benchmarks
description:
  - Appends one JSON document per finished task and host to the file in E(GPU_TUNING_COLLECT).
"""


class CallbackModule(CallbackBase):
    """Collects what the screen shows too little of."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "collect"
    CALLBACK_NEEDS_ENABLED = True

    def _collect(self, result: Any, outcome: str) -> None:
        document = {
            "host": result._host.get_name(),
            "task": result._task.get_name(),
            "action": result._task.action,
            "outcome": outcome,
            "result": result._result,
        }
        with open(os.environ["GPU_TUNING_COLLECT"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps(document, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._collect(result, "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._collect(result, "failed")

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._collect(result, "skipped")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._collect(result, "unreachable")
