#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_persistence
short_description: Make a policy outlive a reboot, take that back, and say whether it holds
description:
  - Applies the settings first and reads them back, as M(host_settings) does. Then writes the sysctls to one
    file in C(/etc/sysctl.d), kernel modules to C(/etc/modules-load.d), and for the rest a systemd unit that
    applies the recorded policy at boot and a udev rule that does so for a GPU whose driver is bound.
  - What runs at boot is this module's own code, packed into one archive that needs only Python.
  - A systemd timer checks the host every few minutes and writes metrics for node_exporter.
  - Looks at what the next boot will make of our files and everybody else's. A value that another file or a
    TuneD profile replaces is C(overridden), with that file and line.
  - A sysctl that the kernel refused or does not have is not written to any file.
options:
  settings:
    description:
      - The sections of M(host_settings), by module. With O(state=verified) the recorded policy when left out.
    type: dict
    default: {}
  state:
    description:
      - V(persisted) applies the settings and puts the files on the host.
      - V(removed) takes away exactly those files. Values stay until the next reboot.
      - V(verified) changes nothing and compares value now, our files and the next boot with the policy.
    type: str
    choices: [persisted, removed, verified]
    default: persisted
  check_minutes:
    description: How often the timer checks.
    type: int
    default: 5
  textfile:
    description:
      - The file that the check writes for node_exporter; by default C(gpu_tuning.prom) in
        C(/var/lib/prometheus/node-exporter). Without that directory there are no metrics.
    type: path
  python:
    description: The Python, 3.9 or newer, that the units start.
    type: path
    default: /usr/bin/python3
  procfs_root:
    description: Where procfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /proc
  sysfs_root:
    description: Where sysfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /sys
  etc_root:
    description: Where C(/etc) is. Like each root below, by default it lies beside O(sysfs_root).
    type: path
  run_root:
    description: Where C(/run) is.
    type: path
  usr_root:
    description: Where C(/usr) is.
    type: path
  lib_root:
    description: Where C(/lib) is.
    type: path
  var_root:
    description: Where C(/var) is.
    type: path
  state_root:
    description: The directory on the managed host that holds the journal, for root's eyes only.
    type: path
    default: /var/lib/gpu-tuning
attributes:
  check_mode:
    description: Writes nothing at all and predicts what a real run changes.
    support: full
  diff_mode:
    description: Shows the settings and the text of the files that change.
    support: full
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Keep two settings across reboots
  host_persistence:
    settings:
      sysctl_snapshot:
        settings:
          - name: kernel.numa_balancing
            value: "0"
      cpuidle_state:
        max_exit_latency_us: 2

- name: Say whether they still hold
  host_persistence:
    state: verified

- name: Take away what was put on the host
  host_persistence:
    state: removed
"""

RETURN = r"""
rows:
  description:
    - One setting row per setting and per file. Kinds beside those of M(host_settings) are C(owned_file), a
      file of ours; C(in_file), a value in our files; C(at_boot), a value once the next boot is done; and
      C(daemon), systemd or udev where it could not be told.
  returned: always, unless the arguments, a foreign file or the journal stood in the way
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: at_boot:sysctl:vm.swappiness
    kind:
      description: The sort of setting.
      type: str
      sample: at_boot
    target:
      description: Which one of its kind.
      type: str
      sample: sysctl:vm.swappiness
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
      sample: "60"
    status:
      description:
        - One of C(ok), C(changed), C(would_change), C(not_applicable), C(unsupported), C(read_only),
          C(rejected), C(clamped), C(overridden), C(failed).
      type: str
      sample: overridden
    reason:
      description: One sentence with evidence; may be null when the status is C(ok) or C(changed).
      type: str
      sample: /etc/sysctl.d/99-local.conf:3 sets 60 and is read after /etc/sysctl.d/90-gpu-tuning.conf
    fix:
      description: When a change can take effect, C(runtime), C(reboot) or C(firmware).
      type: str
      sample: reboot
other_tuners:
  description: One sentence for each program and file that sets up what the policy sets up, too.
  returned: as for RV(rows)
  type: list
  elements: str
  sample: ["tuned starts at boot with profile virtual-host: sysctl.d is applied again after its profile"]
boot_id:
  description: The boot that the journal's values belong to.
  returned: unless O(state=removed)
  type: str
  sample: 7d5e1c0a-3f0b-4e58-9a0e-2b7f4a1f6c11
kernel_release:
  description: The kernel that was running.
  returned: unless O(state=removed)
  type: str
  sample: 6.8.12-9-pve
journal:
  description: The journal's file on the managed host.
  returned: unless O(state=removed)
  type: str
  sample: /var/lib/gpu-tuning/journal/7d5e1c0a-3f0b-4e58-9a0e-2b7f4a1f6c11.json
recorded:
  description: The values in the journal, by row id, as they were found first on this boot.
  returned: unless O(state=removed)
  type: dict
  sample: {"sysctl:vm.swappiness": "60"}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.gpu_tuning import persist, tuner


def build_module() -> AnsibleModule:
    roots = ("etc_root", "run_root", "usr_root", "lib_root", "var_root")
    common = {name: tuner.COMMON_ARGUMENTS[name] for name in ("procfs_root", "sysfs_root", "state_root")}
    return AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": list(persist.STATES), "default": persist.PERSISTED},
            "check_minutes": {"type": "int", "default": 5},
            "textfile": {"type": "path"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            **{name: {"type": "path"} for name in roots},
            **common,
        },
        supports_check_mode=True,
    )


def section_arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a section's arguments as its own module would have them. Raises tuner.BadInput."""
    section = tuner.SECTIONS.get(name)
    if section is None:
        raise tuner.BadInput(f"settings has {name}, which is none of {', '.join(tuner.SECTIONS)}")
    validator = ArgumentSpecValidator(section.arguments, mutually_exclusive=section.exclusive)
    validated = validator.validate(given)
    if validated.error_messages:
        raise tuner.BadInput(f"{name}: {'; '.join(validated.error_messages)}")
    return validated.validated_parameters


def main() -> None:
    module = build_module()
    given = {name: section for name, section in module.params["settings"].items() if section is not None}
    options = {**module.params, "across_boot": False}
    try:
        sections = {name: section_arguments(name, arguments) for name, arguments in given.items()}
        result = persist.run(sections, options, module.check_mode)
    except tuner.CannotStart as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
