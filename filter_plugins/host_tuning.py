# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter that turns a policy and a run's tags into the plan of one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# On the controller, Ansible does not put module_utils on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

from gpu_tuning.policy import PolicyError, plan


def host_tuning_plan(
    policy: Any, overrides: Any, run_tags: Any, skip_tags: Any, kinds: Any = ()
) -> dict[str, Any]:
    """See gpu_tuning.policy.plan."""
    try:
        return plan(policy, overrides, run_tags, skip_tags, kinds)
    except PolicyError as error:
        raise AnsibleFilterError(f"host_tuning policy: {error}") from error


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Any]:
        return {"host_tuning_plan": host_tuning_plan}
