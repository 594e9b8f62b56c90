#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_persistence_mode
short_description: Capture, apply and restore persistence mode of NVIDIA GPUs
description:
  - Asks C(nvidia-smi) once for all GPUs, sets those that differ, and asks again.
  - Not applicable without the NVIDIA driver. Where C(nvidia-persistenced) runs, the mode is its business.
options:
  mode:
    description: Whether GPUs stay initialised while nobody uses them.
    type: str
    choices: ["on", "off"]
  nvidia_smi:
    description: The command to ask; on a recorded machine there is none unless this is given.
    type: path
  state:
    description:
      - V(captured) reads the settings and records what is not recorded yet in the journal.
      - V(applied) does the same, writes what differs and reads everything back.
      - V(restored) gives back the recorded values.
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
- name: Keep GPUs initialised
  gpu_persistence_mode:
    mode: "on"

- name: Give back what was found
  gpu_persistence_mode:
    state: restored
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
      sample: "gpu_persistence:0000:01:00.0"
    kind:
      description: The sort of setting.
      type: str
      sample: gpu_persistence
    target:
      description: Which one of its kind.
      type: str
      sample: "0000:01:00.0"
    before:
      description: The value found, normalised; null where it is not known.
      type: raw
      sample: "off"
    desired:
      description: The value asked for.
      type: raw
      sample: "on"
    after:
      description: A fresh read after all writes, never the value written; null when nothing was applied.
      type: raw
      sample: "on"
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
  sample: {"gpu_persistence:0000:01:00.0": "off"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning import tuner

NAME = "gpu_persistence_mode"


def build_module() -> AnsibleModule:
    section = tuner.SECTIONS[NAME]
    return AnsibleModule(
        argument_spec=tuner.argument_spec(NAME),
        mutually_exclusive=section.exclusive,
        supports_check_mode=True,
    )


def main() -> None:
    module = build_module()
    try:
        result = tuner.run({NAME: module.params}, module.params, module.check_mode)
    except tuner.CannotStart as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
