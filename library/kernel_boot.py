#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_boot
short_description: Boot a new kernel once, with a way back
description:
  - Keeps the running kernel, with the command line it is running with, as an entry of its own and as the boot
    menu's default, until a new kernel has booted and was found good.
options:
  state:
    description:
      - V(guarded) makes that entry the default.
      - V(armed) records what the host looks like, and has the new kernel boot next time, once; by default
        where the boot loader cannot do that and O(accept_no_fallback) says so.
      - V(verified) compares what came up with what was promised. A good kernel becomes the default, and the
        way back goes; after a bad one the way back stays the default.
    type: str
    choices: [guarded, armed, verified]
    required: true
  release:
    description: The new kernel's release; if empty, that of the upgrade under way, or the running one.
    type: str
    default: ""
  parameters:
    description: The parameters that the new kernel must be started with.
    type: list
    elements: str
    default: []
  modules:
    description: Kernel modules that must be loaded; NVIDIA's must if they were before the reboot.
    type: list
    elements: str
    default: []
  accept_no_fallback:
    description: Go on where the boot loader cannot boot a kernel just once.
    type: bool
    default: false
  loader:
    description: The boot loader; V(auto) finds it out, and refuses to guess.
    type: str
    choices: [auto, grub, systemd-boot, proxmox-boot-tool, bls]
    default: auto
  regenerate:
    description:
      - The command that makes the boot menu, instead of the loader's own. Needed where O(etc_root) is not the
        running host's.
    type: list
    elements: str
  esps:
    description: Where EFI system partitions are mounted; looked for when it is not given.
    type: list
    elements: path
  etc_root:
    description: The directory of configuration, or another machine's copy of it.
    type: path
    default: /etc
  boot_root:
    description: The directory of kernels and boot menus, or another machine's copy of it.
    type: path
    default: /boot
  procfs_root:
    description: Where procfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /proc
  sysfs_root:
    description: Where sysfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /sys
  state_root:
    description: The directory on the managed host that holds the state of the upgrade, for root's eyes only.
    type: path
    default: /var/lib/gpu-tuning
attributes:
  check_mode:
    description: Writes nothing at all.
    support: full
  diff_mode:
    description: The boot menu is not shown.
    support: none
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Keep the running kernel as the way back
  kernel_boot:
    state: guarded
    release: 6.12.9-cloud-amd64
    parameters: [amd_pstate=active]

- name: Judge what came up
  kernel_boot:
    state: verified
  register: verdict
"""

RETURN = r"""
rows:
  description: With O(state=verified), one row per promise.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: "boot:release"
    kind:
      description: The sort of row.
      type: str
      sample: boot
    target:
      description: What was looked at.
      type: str
      sample: release
    before:
      description: What it was before, where that is known.
      type: raw
      sample: null
    desired:
      description: What it should be, where there is such a value.
      type: raw
      sample: null
    after:
      description: What it is, where it is a value.
      type: raw
      sample: null
    status:
      description: C(ok), C(failed) or C(not_applicable).
      type: str
      sample: ok
    reason:
      description: One sentence with evidence; may be null when the status is C(ok).
      type: str
      sample: null
    fix:
      description: When a change can take effect, here always C(reboot).
      type: str
      sample: reboot
outcome:
  description:
    - With V(verified), C(pending) before the reboot, C(good), C(wrong) in what came up, or C(fell_back) when
      the way back has booted by itself. With V(armed), C(once) or C(default).
  returned: success
  type: str
  sample: good
msg:
  description: What went wrong, in one sentence; null when nothing did.
  returned: with O(state=verified), once a boot was judged
  type: str
  sample: null
record:
  description:
    - The upgrade's state, with what the host looked like before (C(before)) and after (C(after)), and the
      journals of run-time settings of both boots (C(journals)).
  returned: success
  type: dict
  sample: {"phase": "done", "release": "6.12.9-cloud-amd64"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning.boot_files import BootError
from ansible.module_utils.gpu_tuning.boot_loader import LOADERS, roots_from
from ansible.module_utils.gpu_tuning.journal import CannotStart
from ansible.module_utils.gpu_tuning.kernel_boot import STATES, KernelBoot


def build_module() -> AnsibleModule:
    return AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": list(STATES), "required": True},
            "release": {"type": "str", "default": ""},
            "parameters": {"type": "list", "elements": "str", "default": []},
            "modules": {"type": "list", "elements": "str", "default": []},
            "accept_no_fallback": {"type": "bool", "default": False},
            "loader": {"type": "str", "choices": ["auto", *LOADERS], "default": "auto"},
            "regenerate": {"type": "list", "elements": "str"},
            "esps": {"type": "list", "elements": "path"},
            "etc_root": {"type": "path", "default": "/etc"},
            "boot_root": {"type": "path", "default": "/boot"},
            "procfs_root": {"type": "path", "default": "/proc"},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "state_root": {"type": "path", "default": "/var/lib/gpu-tuning"},
        },
        supports_check_mode=True,
    )


def main() -> None:
    module = build_module()
    try:
        result = KernelBoot(module.params, roots_from(module.params)).run(module.check_mode)
    except (BootError, CannotStart) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
