#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_settings
short_description: Capture, apply and restore several kinds of settings in one call
description:
  - Runs several of the modules named below in one module invocation, since it is invocations that cost time
    on a host, not settings.
  - Everything is captured and recorded before the first write, whatever its kind.
options:
  sysctl_snapshot:
    description: Exactly the arguments of C(sysctl_snapshot) itself; left out, sysctls are not looked at.
    type: dict
  pcie_maxreadreq:
    description: Exactly the arguments of C(pcie_maxreadreq) itself.
    type: dict
  cpuidle_state:
    description: Exactly the arguments of C(cpuidle_state) itself.
    type: dict
  kernel_module:
    description: Exactly the arguments of C(kernel_module) itself.
    type: dict
  pcie_acs:
    description: Exactly the arguments of C(pcie_acs) itself.
    type: dict
  cpu_frequency:
    description: Exactly the arguments of C(cpu_frequency) itself.
    type: dict
  pcie_aspm:
    description: Exactly the arguments of C(pcie_aspm) itself.
    type: dict
  transparent_hugepages:
    description: Exactly the arguments of C(transparent_hugepages) itself.
    type: dict
  gpu_persistence_mode:
    description: Exactly the arguments of C(gpu_persistence_mode) itself.
    type: dict
  state:
    description:
      - V(captured) reads the settings and records what is not recorded yet in the journal.
      - V(applied) does the same, writes what differs and reads everything back.
      - V(restored) gives back the recorded values, of the kinds that have a section.
    type: str
    choices: [captured, applied, restored]
    default: applied
  procfs_root:
    description: Where procfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /proc
  sysfs_root:
    description: Where sysfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /sys
  state_root:
    description: The directory on the managed host that holds the journal, for root's eyes only.
    type: path
    default: /var/lib/gpu-tuning
  across_boot:
    description:
      - With O(state=restored), write values that were recorded before a reboot, which is refused otherwise.
    type: bool
    default: false
  verify:
    description:
      - With O(state=applied), look everything up and read it once more at the end, in a pass of its own.
    type: bool
    default: false
attributes:
  check_mode:
    description: Writes nothing at all and predicts what a real run changes.
    support: full
  diff_mode:
    description: Shows the settings that change, CPUs folded together.
    support: full
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Tune a host in one call
  host_settings:
    sysctl_snapshot:
      settings:
        - name: kernel.numa_balancing
          value: "0"
    pcie_maxreadreq:
      value: 4096
      vendor: "0x10de"
      class: ["0x0300", "0x0302"]
    cpuidle_state:
      max_exit_latency_us: 2

- name: Give back everything as it was found
  host_settings:
    state: restored
    sysctl_snapshot: {}
    pcie_maxreadreq: {}
    cpuidle_state: {}
    kernel_module: {}
"""

RETURN = r"""
rows:
  description: One setting row per setting that was looked at.
  returned: always, unless the arguments or the journal were refused
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: sysctl:vm.swappiness
    kind:
      description: The sort of setting.
      type: str
      sample: sysctl
    target:
      description: Which one of its kind.
      type: str
      sample: vm.swappiness
    before:
      description: The value found, normalised; null where it is not known.
      type: raw
      sample: "60"
    desired:
      description: The value asked for.
      type: raw
      sample: "10"
    after:
      description: A fresh read after all writes, never the value written; null when nothing was applied.
      type: raw
      sample: "10"
    status:
      description:
        - One of C(ok), C(changed), C(would_change), C(not_applicable), C(unsupported), C(read_only),
          C(rejected), C(clamped), C(overridden), C(failed).
      type: str
      sample: changed
    reason:
      description: One sentence with evidence; may be null when the status is C(ok) or C(changed).
      type: str
      sample: null
    fix:
      description: When a change can take effect, C(runtime), C(reboot) or C(firmware).
      type: str
      sample: runtime
verified_rows:
  description: The rows of the pass that O(verify) asks for, as O(state=captured) returns them.
  returned: with O(verify), when something was applied
  type: list
  elements: dict
boot_id:
  description: The boot that the journal's values belong to.
  returned: as for RV(rows)
  type: str
  sample: 7d5e1c0a-3f0b-4e58-9a0e-2b7f4a1f6c11
kernel_release:
  description: The kernel that was running.
  returned: as for RV(rows)
  type: str
  sample: 6.8.12-9-pve
journal:
  description: The journal's file on the managed host.
  returned: as for RV(rows)
  type: str
  sample: /var/lib/gpu-tuning/journal/7d5e1c0a-3f0b-4e58-9a0e-2b7f4a1f6c11.json
recorded:
  description: The values in the journal, by row id, as they were found first on this boot.
  returned: as for RV(rows)
  type: dict
  sample: {"sysctl:vm.swappiness": "60"}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.gpu_tuning import tuner


def build_module() -> AnsibleModule:
    return AnsibleModule(
        argument_spec={**{name: {"type": "dict"} for name in tuner.SECTIONS}, **tuner.COMMON_ARGUMENTS},
        required_one_of=[list(tuner.SECTIONS)],
        supports_check_mode=True,
    )


def section_arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a section's arguments as its own module would have them. Raises tuner.BadInput."""
    section = tuner.SECTIONS[name]
    validator = ArgumentSpecValidator(section.arguments, mutually_exclusive=section.exclusive)
    validated = validator.validate(given)
    if validated.error_messages:
        raise tuner.BadInput(f"{name}: {'; '.join(validated.error_messages)}")
    return validated.validated_parameters


def main() -> None:
    module = build_module()
    given = {name: module.params[name] for name in tuner.SECTIONS if module.params[name] is not None}
    try:
        sections = {name: section_arguments(name, arguments) for name, arguments in given.items()}
        result = tuner.run(sections, module.params, module.check_mode)
    except tuner.CannotStart as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
