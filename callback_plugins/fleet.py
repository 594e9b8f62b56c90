# SPDX-License-Identifier: GPL-3.0-or-later
"""Output that stays readable with many hosts: one line per host, and what differs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.callback.default import CallbackModule as Default

# On the controller, Ansible does not put module_utils on the path. Loaded here, before the first fork, it is
# loaded once: every task of every host would load it anew.
ROOT = Path(__file__).resolve().parents[1]
for _folder in (str(ROOT / "module_utils"), str(ROOT / "plugin_utils")):
    if _folder not in sys.path:
        sys.path.append(_folder)

import gpu_tuning.junit  # noqa: F401
import tuning_record  # noqa: F401

DOCUMENTATION = """
name: fleet
type: stdout
short_description: One line per host where there are many
description:
  - Up to five hosts are shown as the default callback shows them, and reports as lines of text. With more,
    each host gets one line per report, with what differs below it, and a host that fails or cannot be reached
    says why.
    E(GPU_TUNING_FLEET_FROM) is the number of hosts from which on this is so.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

FROM = int(os.environ.get("GPU_TUNING_FLEET_FROM", "6"))


class CallbackModule(Default):
    """The default callback for few hosts, one line per host for many."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "fleet"

    def __init__(self) -> None:
        """Start as the default callback."""
        super().__init__()
        self._many = False

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Count the play's hosts, --limit and all."""
        self._many = len(play.get_variable_manager()._inventory.get_hosts(play.hosts)) >= FROM
        super().v2_playbook_on_play_start(play)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Name tasks for few hosts only."""
        if not self._many:
            super().v2_playbook_on_task_start(task, is_conditional)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Show a report: all its lines for few hosts, else its headline and what differs."""
        if not self._many:
            super().v2_runner_on_ok(result)
            self._lines_of_report(result, "C_OK")
        elif "headline" in result._result:
            self._report(result, "C_CHANGED" if result._result.get("differences") else "C_OK")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Show a failed report as any other, and of other failures the sentence."""
        if not self._many:
            # By default a failed task is shown whole, which -v is for here.
            if "headline" not in result._result or self._run_is_verbose(result):
                super().v2_runner_on_failed(result, ignore_errors)
            else:
                self._display.display(f"failed: [{self.host_label(result)}]", color=_color("C_ERROR"))
            self._lines_of_report(result, "C_ERROR")
        elif "headline" in result._result:
            self._report(result, "C_ERROR")
        elif not ignore_errors:
            self._line(result, f"failed: {result._task.get_name()}: {_sentence(result)}", "C_ERROR")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Show why a host cannot be reached."""
        if not self._many:
            super().v2_runner_on_unreachable(result)
        else:
            self._line(result, f"unreachable: {_sentence(result)}", "C_UNREACHABLE")

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Show skipped tasks for few hosts only."""
        if not self._many:
            super().v2_runner_on_skipped(result)

    def v2_on_file_diff(self, result: Any) -> None:
        """Show diffs for few hosts only: with many, the reports have them."""
        if not self._many:
            super().v2_on_file_diff(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Name the hosts that failed instead of counting tasks for each host."""
        if not self._many:
            super().v2_playbook_on_stats(stats)
            return
        failed, dark = sorted(stats.failures), sorted(stats.dark)
        words = [f"{len(stats.processed) - len({*failed, *dark})} of {len(stats.processed)} hosts ok"]
        words += [f"{len(failed)} failed: {', '.join(failed)}"] if failed else []
        words += [f"{len(dark)} unreachable: {', '.join(dark)}"] if dark else []
        self._display.display("; ".join(words))

    def _lines_of_report(self, result: Any, color: str) -> None:
        """Show what a report says to people; the rest of the result is for programs, and for -v."""
        if "headline" in result._result:
            for line in result._result["msg"]:
                self._display.display(f"    {line}", color=_color(color))

    def _report(self, result: Any, color: str) -> None:
        self._line(result, result._result["headline"], color)
        for difference in result._result.get("differences") or ():
            self._display.display(f"    {difference}", color=_color(color))

    def _line(self, result: Any, text: str, color: str) -> None:
        self._display.display(f"{result._host.get_name()}: {text}", color=_color(color))


def _color(name: str) -> Any:
    from ansible import constants

    return getattr(constants, name.replace("C_", "COLOR_"))


def _sentence(result: Any) -> str:
    """Return a result's message on one line."""
    message = result._result.get("msg") or result._result.get("module_stderr") or "no reason given"
    return " ".join(" ".join(message if isinstance(message, list) else [str(message)]).split())
