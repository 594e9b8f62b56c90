#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_preflight
short_description: Say what stands in the way of a kernel upgrade, before anything is changed
description:
  - Resolves a package name to the kernel it would install, and checks sources, holds, pins, space, DKMS
    modules, Secure Boot, the way back, and whether parameters can do anything on this CPU.
  - Changes nothing, in check mode or not. The DKMS trial build works in a scratch directory.
options:
  package:
    description: The kernel's package, or a metapackage that leads to one; empty to keep the running kernel.
    type: str
    default: ""
  headers:
    description: Want the kernel's headers even without DKMS modules.
    type: bool
    default: false
  parameters:
    description: The parameters to set, as for C(kernel_cmdline).
    type: list
    elements: str
    default: []
  remove:
    description: The parameters to remove, as for C(kernel_cmdline).
    type: list
    elements: str
    default: []
  retry:
    description: Allow an upgrade that was tried before and given up.
    type: bool
    default: false
  panic_seconds:
    description: Add C(panic=) with this value where a reboot after a panic is not configured; 0 to leave it.
    type: int
    default: 0
  dkms_trial:
    description: Build DKMS modules for the new kernel in a scratch directory.
    type: bool
    default: true
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
    description: Never changes anything.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Look before the upgrade
  kernel_preflight:
    package: proxmox-kernel-6.11
    parameters: [amd_pstate=active, processor.max_cstate=1]
  register: preflight
"""

RETURN = r"""
rows:
  description: One row per check; a failed one fails the module.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: "preflight:space"
    kind:
      description: The sort of row.
      type: str
      sample: preflight
    target:
      description: What was looked at.
      type: str
      sample: space
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
running_release:
  description: The running kernel's release.
  returned: success
  type: str
  sample: 6.1.0-57-cloud-amd64
release:
  description: The release that is to run in the end.
  returned: success
  type: str
  sample: 6.12.9-cloud-amd64
parameters:
  description: The parameters to set, those that can do something on this host.
  returned: success
  type: list
  elements: str
  sample: [amd_pstate=active]
packages:
  description: The packages that are still to be installed.
  returned: success
  type: list
  elements: str
  sample: [linux-image-6.12-cloud-amd64]
loader:
  description: The boot loader; null when it cannot be told.
  returned: success
  type: str
  sample: grub
one_time_boot:
  description: Whether a kernel can be booted just once.
  returned: success
  type: bool
  sample: true
guests:
  description: Containers and virtual machines that a reboot stops.
  returned: success
  type: list
  elements: str
  sample: [container gpu]
settled:
  description: Whether the wanted kernel is running with the wanted parameters.
  returned: success
  type: bool
  sample: false
unfinished:
  description: Whether a first boot of a new kernel has been and was not judged yet.
  returned: success
  type: bool
  sample: false
phase:
  description: How far an upgrade has come, C(guarded), C(armed), C(done), C(failed); null without one.
  returned: success
  type: str
  sample: null
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning.boot_files import BootError
from ansible.module_utils.gpu_tuning.boot_loader import LOADERS, roots_from
from ansible.module_utils.gpu_tuning.journal import CannotStart
from ansible.module_utils.gpu_tuning.kernel_preflight import Preflight


def build_module() -> AnsibleModule:
    return AnsibleModule(
        argument_spec={
            "package": {"type": "str", "default": ""},
            "headers": {"type": "bool", "default": False},
            "parameters": {"type": "list", "elements": "str", "default": []},
            "remove": {"type": "list", "elements": "str", "default": []},
            "retry": {"type": "bool", "default": False},
            "panic_seconds": {"type": "int", "default": 0},
            "dkms_trial": {"type": "bool", "default": True},
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
        result = Preflight(module.params, roots_from(module.params)).run()
    except (BootError, CannotStart) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
