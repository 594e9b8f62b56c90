#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sysctl_snapshot
short_description: Capture, apply and restore sysctls with read-back
description:
  - Handles any number of sysctls in one call, straight through C(/proc/sys), without a file in C(/etc).
  - Compares token by token, so that blanks, tabs and several numbers make no difference.
  - Captures both partners of the C(vm.dirty_*) pairs before any write and gives back the non-zero one only,
    since the kernel zeroes the partner of the one that is written.
  - Tells a key that this kernel lacks, one that is read-only here, a refused and a clamped value apart.
options:
  settings:
    description: The sysctls to set.
    type: list
    elements: dict
    suboptions:
      name:
        description:
          - The key, as in C(sysctl.d(5)), for example V(vm.swappiness), V(vm/swappiness) or
            V(net.ipv4.conf.eth0/100.rp_filter) for the interface C(eth0.100).
        type: str
        required: true
      value:
        description: The value, one line; several numbers are separated by blanks.
        type: str
        required: true
      match:
        description:
          - Whether the value is wanted as it is, at least or at most; several are compared one by one.
        type: str
        choices: [exact, minimum, maximum]
        default: exact
  names:
    description: Sysctls to capture or restore without wanting a value.
    type: list
    elements: str
  state:
    description:
      - V(captured) reads the settings and records what is not recorded yet in the journal.
      - V(applied) does the same, writes what differs and reads everything back.
      - V(restored) gives back the recorded values, of all keys or of those in O(names) or O(settings).
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
- name: Set two sysctls, leaving a larger receive buffer alone
  sysctl_snapshot:
    settings:
      - name: vm.swappiness
        value: "10"
      - name: net.core.rmem_max
        value: "16777216"
        match: minimum

- name: Give back every sysctl as it was found
  sysctl_snapshot:
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

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning import tuner

NAME = "sysctl_snapshot"


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
