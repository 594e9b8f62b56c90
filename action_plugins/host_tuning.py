# SPDX-License-Identifier: GPL-3.0-or-later
"""Carry out the plan of a run in one call of host_settings.

An action plugin, so that the plan is worked out once and each host costs one task: a task that only prepares
another one costs the controller as much as one that runs a module.
"""

from __future__ import annotations

from typing import Any, Optional

from ansible.plugins.action import ActionBase

ROOTS = ("procfs_root", "sysfs_root", "state_root")


class ActionModule(ActionBase):
    """host_tuning: a plan (gpu_tuning.policy.plan) and the host's roots in, host_settings' result out."""

    _VALID_ARGS = frozenset(("plan", *ROOTS))
    _supports_check_mode = True

    def run(self, tmp: Optional[str] = None, task_vars: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """Return what host_settings returned, and the plan; skipped where no step needs the host."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        plan = self._task.args["plan"]
        steps = set(plan["steps"])
        if steps.isdisjoint(("snapshot", "apply", "verify")):
            return {**result, "plan": plan, "skipped": True}
        if steps.isdisjoint(("snapshot", "apply")):
            # Only looks: check mode keeps even the journal as it is.
            self._task.check_mode = True
        arguments = {
            **{root: self._task.args[root] for root in ROOTS},
            **plan["sections"],
            "state": "applied" if "apply" in steps else "captured",
            # A later pass over everything, in the same call: calls are what costs time.
            "verify": "verify" in steps,
        }
        done = self._execute_module(
            module_name="host_settings", module_args=arguments, task_vars=task_vars or {}
        )
        return {**result, **done, "plan": plan}
