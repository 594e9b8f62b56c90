#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pcie_aspm
short_description: Capture, apply and restore power saving on PCI Express links
description:
  - Sets the policy of all links (C(/sys/module/pcie_aspm/parameters/policy)) and every state that the link
    of a GPU offers (C(link/*_aspm), C(link/clkpm)).
  - The kernel refuses the policy where it leaves ASPM to the firmware or was booted with C(pcie_aspm=off).
options:
  policy:
    description: The policy for all links; left alone if not given.
    type: str
    choices: [default, performance, powersave, powersupersave]
  gpu_links:
    description: Whether the links of GPUs may use their power saving states; left alone if not given.
    type: str
    choices: ["on", "off"]
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
- name: Keep links awake
  pcie_aspm:
    policy: performance
    gpu_links: "off"

- name: Give back what was found
  pcie_aspm:
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
      sample: pcie_aspm:policy
    kind:
      description: The sort of setting.
      type: str
      sample: pcie_aspm
    target:
      description: Which one of its kind.
      type: str
      sample: policy
    before:
      description: The value found, normalised; null where it is not known.
      type: raw
      sample: default
    desired:
      description: The value asked for.
      type: raw
      sample: performance
    after:
      description: A fresh read after all writes, never the value written; null when nothing was applied.
      type: raw
      sample: performance
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
  sample: {"pcie_aspm:policy": default}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning import tuner

NAME = "pcie_aspm"


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
