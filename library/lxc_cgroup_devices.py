#!/usr/bin/python

# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: lxc_cgroup_devices
short_description: Find and repair stale device rules in LXC and Proxmox container configs
description:
  - After a kernel or driver upgrade the character majors of GPU drivers move, container configs still name
    the old ones, and CUDA cannot initialise in the container although nvidia-smi works.
  - Reads any number of configs in one call, of Proxmox and of plain LXC, and says for each device class what
    is wrong.
  - Repairs with the smallest edit, the digits of a major in place. Every other byte stays as it is, nothing
    is widened, and a number whose meaning cannot be known is reported and left alone.
  - Writes by a temporary file in the same directory and a rename, as C(/etc/pve) needs it, with Proxmox's
    own lock held and a backup kept in C(lxc-backups) under O(state_root).
options:
  state:
    description:
      - V(diagnosed) reports and changes nothing.
      - V(repaired) repairs the configs too, and records what each rule means.
    type: str
    choices: [diagnosed, repaired]
    default: diagnosed
  paths:
    description:
      - Config files, or names or ids of containers. By default all containers of this host.
    type: list
    elements: str
    default: []
  format:
    description: The format of the configs; V(auto) goes by each file's name, else by its text.
    type: str
    choices: [auto, proxmox, lxc]
    default: auto
  recorded_devices:
    description:
      - A copy of C(/proc/devices) from before the majors moved, or a record this module wrote.
      - Without it, the record under O(state_root) and the evidence in the config decide.
    type: path
  mode:
    description:
      - V(repair) corrects the numbers.
      - V(major_free) rewrites rules to rules by path, which LXC 4.0 and newer resolves at each start.
      - V(devn) moves mounts and rules to Proxmox C(devN) lines, which Proxmox 8.1 and newer resolves at
        each start.
    type: str
    choices: [repair, major_free, devn]
    default: repair
  load:
    description:
      - First load NVIDIA drivers that containers need and create missing nodes with nvidia-modprobe.
    type: bool
    default: false
  live:
    description: Give running containers their new rules with lxc-cgroup, as far as that is possible.
    type: bool
    default: false
  verify:
    description:
      - Open each device a running container is meant to have from inside it, and initialise CUDA where it
        is installed.
    type: bool
    default: false
  record:
    description: Record the majors of now also with O(state=diagnosed), for instance before a reboot.
    type: bool
    default: false
  procfs_root:
    description: Where procfs is mounted, or a recorded machine's copy of it.
    type: path
    default: /proc
  dev_root:
    description: Where the device nodes are, or a recorded machine's copy of them.
    type: path
    default: /dev
  state_root:
    description: The directory on the managed host that holds backups and the record, for root's eyes only.
    type: path
    default: /var/lib/gpu-tuning
  pve_root:
    description: Where Proxmox keeps its configuration.
    type: path
    default: /etc/pve
  lxc_root:
    description: Where plain LXC keeps its containers.
    type: path
    default: /var/lib/lxc
  lock_root:
    description: Where Proxmox keeps its locks of containers.
    type: path
    default: /run/lock/lxc
notes:
  - O(load), O(live) and O(verify) act on the real host whatever the roots are.
attributes:
  check_mode:
    description: Writes nothing at all and predicts what a real run changes, refusals included.
    support: full
  diff_mode:
    description: Shows each config that changes, before and after, whole.
    support: full
author:
  - The project contributors (!UNKNOWN)
"""

EXAMPLES = r"""
- name: Say which containers have stale device rules
  lxc_cgroup_devices:
    state: diagnosed

- name: Repair all containers with the map of majors saved before the upgrade
  lxc_cgroup_devices:
    state: repaired
    recorded_devices: /root/devices.before

- name: Make one Proxmox container independent of majors
  lxc_cgroup_devices:
    state: repaired
    paths:
      - "101"
    mode: devn
"""

RETURN = r"""
rows:
  description: One row per device class, node, dead line and finding of each container.
  returned: always, unless the arguments were refused
  type: list
  elements: dict
  contains:
    id:
      description: Stable and unique on a host.
      type: str
      sample: lxc_device:101/nvidia-uvm
    kind:
      description: The sort of setting.
      type: str
      sample: lxc_device
    target:
      description: The container, and what of it.
      type: str
      sample: 101/nvidia-uvm
    before:
      description: The major, or majors, that the config named; for a node its number.
      type: raw
      sample: "504"
    desired:
      description: The major it should name; with another mode than V(repair), the paths.
      type: raw
      sample: "509"
    after:
      description: What a fresh read of the config names.
      type: raw
      sample: "509"
    status:
      description:
        - One of C(ok), C(changed), C(would_change), C(not_applicable), C(unsupported), C(read_only),
          C(rejected), C(overridden), C(failed).
      type: str
      sample: changed
    finding:
      description:
        - One of C(stale), C(foreign), C(missing), C(not_enforced), C(dead), C(node_missing),
          C(driver_not_loaded), C(ok).
      type: str
      sample: stale
    reason:
      description: One sentence with evidence and cure.
      type: str
      sample: >-
        rule "c 504:* rwm" (line 10): 504 was nvidia-uvm by the map in /root/devices.before, and nvidia-uvm
        is 509 now
    fix:
      description: When a change can take effect.
      type: str
      sample: runtime
    container:
      description: The container's name or id.
      type: str
      sample: "101"
    path:
      description: The container's config.
      type: str
      sample: /etc/pve/lxc/101.conf
containers:
  description: The containers that were looked at, in their start order.
  returned: as for RV(rows)
  type: list
  elements: dict
  contains:
    name:
      description: The container's name or id.
      type: str
      sample: "101"
    path:
      description: The container's config.
      type: str
      sample: /etc/pve/lxc/101.conf
    format:
      description: The config's format, C(proxmox) or C(lxc).
      type: str
      sample: proxmox
    arguments:
      description: The arguments that name the container to LXC's tools.
      type: list
      elements: str
      sample: ["-n", "101"]
    changed:
      description: Whether its config was changed, or would be in check mode.
      type: bool
      sample: true
    rules_changed:
      description: Whether that changes what it may open, so that a running container needs the new rules.
      type: bool
      sample: true
    live:
      description:
        - What came of O(live), one of C(applied), C(not_applied), C(not_running), C(nothing_to_apply),
          C(not_asked).
      type: str
      sample: applied
    has_devices:
      description: Whether it is meant to have a GPU device.
      type: bool
      sample: true
diff:
  description: Each config that changes, before and after, whole.
  returned: as for RV(rows)
  type: list
  elements: dict
  contains:
    before_header:
      description: The config's path.
      type: str
      sample: /etc/pve/lxc/101.conf
    after_header:
      description: The config's path.
      type: str
      sample: /etc/pve/lxc/101.conf
    before:
      description: The config as it was.
      type: str
      sample: |
        lxc.cgroup2.devices.allow: c 504:* rwm
    after:
      description: The config as it is now, or would be in check mode.
      type: str
      sample: |
        lxc.cgroup2.devices.allow: c 509:* rwm
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning.lxc_devices import DEAD, FOREIGN
from ansible.module_utils.gpu_tuning.lxc_repair import BadInput, Outcome, Request, run
from ansible.module_utils.gpu_tuning.rows import FAILED


def build_module() -> AnsibleModule:
    return AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["diagnosed", "repaired"], "default": "diagnosed"},
            "paths": {"type": "list", "elements": "str", "default": []},
            "format": {"type": "str", "choices": ["auto", "proxmox", "lxc"], "default": "auto"},
            "recorded_devices": {"type": "path"},
            "mode": {"type": "str", "choices": ["repair", "major_free", "devn"], "default": "repair"},
            "load": {"type": "bool", "default": False},
            "live": {"type": "bool", "default": False},
            "verify": {"type": "bool", "default": False},
            "record": {"type": "bool", "default": False},
            "procfs_root": {"type": "path", "default": "/proc"},
            "dev_root": {"type": "path", "default": "/dev"},
            "state_root": {"type": "path", "default": "/var/lib/gpu-tuning"},
            "pve_root": {"type": "path", "default": "/etc/pve"},
            "lxc_root": {"type": "path", "default": "/var/lib/lxc"},
            "lock_root": {"type": "path", "default": "/run/lock/lxc"},
        },
        supports_check_mode=True,
    )


def request_of(module: AnsibleModule) -> Request:
    options = dict(module.params)
    return Request(config_format=options.pop("format"), check=module.check_mode, **options)


def warn(module: AnsibleModule, outcome: Outcome) -> None:
    for row in outcome.rows:
        if row.status == FAILED and row.finding in (FOREIGN, DEAD):
            module.warn(f"{row.container}: {row.reason}")


def main() -> None:
    module = build_module()
    try:
        outcome = run(request_of(module))
    except BadInput as error:
        module.fail_json(msg=str(error))
    warn(module, outcome)
    if outcome.errors:
        # Everything that could be done has been done; the rest must not look like success.
        module.fail_json(msg="; ".join(outcome.errors), **outcome.as_dict())
    module.exit_json(**outcome.as_dict())


if __name__ == "__main__":
    main()
