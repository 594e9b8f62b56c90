# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Audit a host: one module call for its facts, rules and reports on the controller."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Optional

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# An action plugin is loaded by its path and has no package; this is where its own code lies.
REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(REPO, "plugin_utils"))

from host_audit import document, evaluate, reports, rules

ROOTS = ("procfs", "sysfs", "etc", "dev", "run", "usr", "var", "boot", "lib")
ARGUMENTS: dict[str, dict[str, Any]] = {
    **{name + "_root": {"type": "str"} for name in ROOTS},
    "more_sysctls": {"type": "list", "elements": "str", "default": []},
    "nvidia_smi": {"type": "str"},
    "rules_dirs": {"type": "list", "elements": "str", "required": True},
    "skip_rules": {"type": "list", "elements": "str", "default": []},
    "templates_dir": {"type": "str", "required": True},
    "reports_root": {"type": "str", "required": True},
    "compare_with": {"type": "str"},
    "fail_on": {"type": "str", "choices": ["", *rules.SEVERITIES], "default": ""},
    "show_table": {"type": "bool", "default": True},
}
OWN_RULES = os.path.join(REPO, "roles/host_audit/rules")
MODULE_ARGUMENTS = (*(name + "_root" for name in ROOTS), "more_sysctls", "nvidia_smi")


EVALUATOR = evaluate.Evaluator()


def prepare() -> None:
    """Compile the repo's own rules. Ansible loads this file before it forks a worker for each host."""
    with contextlib.suppress(rules.RuleError):  # said by the run itself, if these rules are asked at all
        EVALUATOR.compile(rules.load([OWN_RULES]))


prepare()


class ActionModule(ActionBase):
    """Runs gpu_host_facts on the host, then asks the rules and writes the reports here."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return verdict, counts, findings and where the reports are."""
        result = dict(super().run(tmp, task_vars))
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        facts = self._host_facts(arguments, task_vars or {})
        if facts.get("failed"):
            return {**result, **facts}
        try:
            return {**result, **self._audit(facts, arguments, (task_vars or {})["inventory_hostname"])}
        except (rules.RuleError, reports.ReportError) as error:
            raise AnsibleActionFail(str(error)) from error

    def _host_facts(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        given = {name: arguments[name] for name in MODULE_ARGUMENTS if arguments[name]}
        answer = self._execute_module(module_name="gpu_host_facts", module_args=given, task_vars=task_vars)
        # Plain data: the rules know facts by identity, and Ansible's own containers copy themselves.
        return dict(json.loads(json.dumps(answer)))

    def _audit(self, answer: dict[str, Any], arguments: dict[str, Any], host: str) -> dict[str, Any]:
        facts = evaluate.HostFacts(answer["facts"], answer["unknown"], answer["absent"])
        asked = rules.load(arguments["rules_dirs"], arguments["skip_rules"])
        rows = EVALUATOR.rows(asked, facts)
        before = reports.earlier(arguments["reports_root"], host, arguments["compare_with"])
        audit = document.build(host, facts, rows, before)
        folder = None
        if not self._task.check_mode:
            folder = reports.write(audit, arguments["reports_root"], arguments["templates_dir"])
        if arguments["show_table"]:
            self._show(audit, folder)
        if self._task.diff:
            # Ansible shows the difference of changed tasks only, and an audit changes nothing.
            self._display.display(document.difference(before, audit))
        return self._result(audit, before, folder, arguments["fail_on"])

    def _show(self, audit: dict[str, Any], folder: Optional[str]) -> None:
        place = f"reports in {folder}" if folder else "check mode: no report is written"
        self._display.display(f"{document.table(audit)}\n  {place}")

    def _result(
        self, audit: dict[str, Any], before: Optional[dict[str, Any]], folder: Optional[str], fail_on: str
    ) -> dict[str, Any]:
        result: dict[str, Any] = {
            "changed": False,
            "verdict": audit["verdict"],
            "counts": audit["counts"],
            "rows": [row for row in audit["rows"] if row["outcome"] == evaluate.FINDING],
            "changes": audit["changes"],
            "report_dir": folder,
        }
        if self._task.diff:
            result["diff"] = _diff(audit, before)
        if fail_on and document.worst_at_least(audit["rows"], fail_on):
            result.update(failed=True, msg=f"{audit['verdict']} (host_audit_fail_on is {fail_on})")
        return result


def _diff(audit: dict[str, Any], before: Optional[dict[str, Any]]) -> dict[str, str]:
    return {
        "before_header": f"findings of {before['created_at']}" if before else "no earlier audit",
        "after_header": f"findings of {audit['created_at']}",
        "before": document.lines(before["rows"]) if before else "",
        "after": document.lines(audit["rows"]),
    }
