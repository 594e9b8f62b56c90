#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_cmdline
short_description: Set and remove parameters on the kernel's command line
description:
  - Finds out which boot loader started the running kernel, and sets parameters in its configuration for the
    next boot.
  - GRUB gets one drop-in in C(/etc/default/grub.d), and no other file is edited. systemd-boot and
    C(proxmox-boot-tool) get C(/etc/kernel/cmdline). Boot Loader Specification entries are edited in place.
  - After the loader's own tool has run, every boot entry is checked to carry the parameters. When the tool
    fails, or an entry does not carry them, the old files are put back and the module fails.
options:
  parameters:
    description:
      - The parameters to set, one per entry, in double quotes where a value holds spaces.
      - One replaces those of the same name, except for names that are meant to be given several times, such
        as C(console) or C(pci), which are added.
    type: list
    elements: str
    default: []
  remove:
    description: What to remove, a name (whatever its value) or a name with its value.
    type: list
    elements: str
    default: []
  state:
    description:
      - V(present) sets and removes.
      - V(restored) gives the files the content that they had before this module's first change. A file that
        somebody else has changed since is left alone, and fails the module.
    type: str
    choices: [present, restored]
    default: present
  loader:
    description: The boot loader; V(auto) finds it out, and refuses to guess.
    type: str
    choices: [auto, grub, systemd-boot, proxmox-boot-tool, bls]
    default: auto
  regenerate:
    description:
      - The command that carries the configuration into the boot entries, instead of the loader's own
        (C(update-grub), C(proxmox-boot-tool refresh)). Needed where O(etc_root) is not the running host's.
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
    description: The directory on the managed host with the record of old contents, for root's eyes only.
    type: path
    default: /var/lib/gpu-tuning
attributes:
  check_mode:
    description: Writes nothing at all and predicts what a real run changes.
    support: full
  diff_mode:
    description: Shows each file that is edited.
    support: full
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Let the amd_pstate driver run, and idle states no deeper than C1
  kernel_cmdline:
    parameters:
      - amd_pstate=active
      - processor.max_cstate=1
    remove:
      - quiet

- name: Give back the command line as it was found
  kernel_cmdline:
    state: restored
"""

RETURN = r"""
rows:
  description: One setting row per parameter, or per file with O(state=restored).
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: cmdline:amd_pstate
    kind:
      description: The sort of setting.
      type: str
      sample: cmdline
    target:
      description: The parameter's name; the whole parameter where a name may be given several times.
      type: str
      sample: amd_pstate
    before:
      description: What the boot entries have of that name, the first that is not as desired; null for none.
      type: raw
      sample: null
    desired:
      description: The parameter asked for; null where it is to be removed.
      type: raw
      sample: amd_pstate=active
    after:
      description: Read back from the boot entries after all writes; null when nothing was written.
      type: raw
      sample: amd_pstate=active
    status:
      description: One of C(ok), C(changed), C(would_change), C(failed).
      type: str
      sample: changed
    reason:
      description: One sentence with evidence; may be null when the status is C(ok) or C(changed).
      type: str
      sample: null
    fix:
      description: When a change can take effect, here always C(reboot).
      type: str
      sample: reboot
reboot_required:
  description: Whether the running kernel was started without what is set now.
  returned: success
  type: bool
  sample: true
loader:
  description: The boot loader.
  returned: success
  type: str
  sample: grub
evidence:
  description: How the boot loader is known.
  returned: success
  type: list
  elements: str
  sample: ["the EFI variable LoaderInfo says systemd-boot 252.38"]
running:
  description: The running kernel's command line.
  returned: success
  type: str
  sample: BOOT_IMAGE=/boot/vmlinuz-6.1.0 root=/dev/vda3 ro quiet
entries:
  description: Every boot entry of this system's kernels as it stands now.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: The entry's title or file.
      type: str
      sample: Debian GNU/Linux
    release:
      description: The kernel's release.
      type: str
      sample: 6.1.0
    cmdline:
      description: The command line that the entry gives to its kernel.
      type: str
      sample: root=/dev/vda3 ro amd_pstate=active
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning import kernel_cmdline
from ansible.module_utils.gpu_tuning.boot_loader import LOADERS
from ansible.module_utils.gpu_tuning.journal import CannotStart


def build_module() -> AnsibleModule:
    return AnsibleModule(
        argument_spec={
            "parameters": {"type": "list", "elements": "str", "default": []},
            "remove": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": list(kernel_cmdline.STATES), "default": "present"},
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
        asked = kernel_cmdline.request(module.params)
        result = kernel_cmdline.run(asked, module.check_mode)
    except CannotStart as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
