#!/usr/bin/python
# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what decides a host's multi-GPU inference performance."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_host_facts
short_description: Read what decides a host's multi-GPU inference performance
version_added: "0.1.0"
description:
  - Reads CPUs, NUMA nodes, memory, power management, the PCIe paths of GPUs and network cards, ACS, the
    IOMMU,
    the NVIDIA driver, kernel, boot loader, sysctls with the files that set them, other tuning programs,
    containers
    with GPUs and the processes that use a GPU, all in one call.
  - Reads files only. The one program it runs is C(nvidia-smi), on a live host whose driver is loaded
    already, for
    what no file says (load, persistence mode, NVLink).
  - Changes nothing, and runs with ordinary rights too. What cannot be read is null, and RV(unknown) says
    why;
    what the host has not is null, too, and RV(absent) says so.
options:
  procfs_root:
    description: Where procfs is; a recorded machine has it elsewhere. By default beside O(sysfs_root).
    type: path
  sysfs_root:
    description: Where sysfs is.
    type: path
    default: /sys
  etc_root:
    description: Where C(/etc) is. Like every root below, by default it lies beside O(sysfs_root).
    type: path
  dev_root:
    description: Where C(/dev) is.
    type: path
  run_root:
    description: Where C(/run) is.
    type: path
  usr_root:
    description: Where C(/usr) is.
    type: path
  var_root:
    description: Where C(/var) is.
    type: path
  boot_root:
    description: Where C(/boot) is.
    type: path
  lib_root:
    description: Where C(/lib) is.
    type: path
  more_sysctls:
    description:
      - Sysctls to report besides those that the audit's own rules ask about, each with the sysctl.d line
        that sets it.
    type: list
    elements: str
    default: []
  nvidia_smi:
    description:
      - The C(nvidia-smi) to ask. By default the one in C(/usr/bin) on a live host, and none on a recorded
        machine.
      - It is not run where the driver is not loaded, since it would load it.
    type: path
author:
  - The project contributors (!UNKNOWN)
attributes:
  check_mode:
    support: full
    description: The module changes nothing in any mode.
  diff_mode:
    support: none
    description: There is no change to show.
notes:
  - Needs Python 3.9 on the managed host, and nothing else.
  - With ordinary rights only 64 bytes of each device's configuration space can be read, so ACS, MaxPayload,
    MaxReadReq and ASPM are unknown.
"""

EXAMPLES = r"""
- name: Read the facts of a GPU host
  gpu_host_facts:
  register: host

- name: Read the facts of a recorded machine
  gpu_host_facts:
    sysfs_root: /srv/recorded/sys
    procfs_root: /srv/recorded/proc
  register: recorded

- name: Ask for one more sysctl
  gpu_host_facts:
    more_sysctls:
      - net.core.somaxconn
  register: host
"""

RETURN = r"""
facts:
  description:
    - The facts by topic. Sizes are in bytes, link speeds in GT/s, frequencies in kHz, latencies in
      microseconds.
    - A value that could not be read is null.
  returned: success
  type: dict
  contains:
    schema:
      description: Grows when a fact changes its meaning or goes away.
      type: int
    collected_at:
      description: When the facts were read, UTC.
      type: str
    hostname:
      description: The host's own name.
      type: str
    boot_id:
      description: The kernel's id of this boot.
      type: str
    firmware:
      description: Vendor, product, version and date of the firmware; UEFI, Secure Boot.
      type: dict
    os:
      description: Distribution, Proxmox VE's version, kind of container if it is one.
      type: dict
    kernel:
      description:
        - Release, command line as text and as tokens (name to list of values), kernels installed in
          /boot.
      type: dict
    boot:
      description: Boot loader, and the command line that its configuration asks for.
      type: dict
    cpu:
      description: Model, sockets, cores, threads, SMT, microcode revisions, vulnerabilities.
      type: dict
    numa:
      description: Nodes with CPUs, memory and distances; nodes per socket.
      type: dict
    memory:
      description:
        - Sizes, swap, transparent and reserved huge pages, and the DIMM slots out of the SMBIOS tables.
      type: dict
    power:
      description:
        - Frequency driver, governor and limits, each as value to CPU list; boost; idle states by name
          with the
          number of CPUs that have each disabled.
      type: dict
    gpus:
      description:
        - One dict per GPU function with its registers, the C(path) from the root port, the true link of
          its C(slot)
          (at most what both ends can do), BARs, and error counters.
      type: list
      elements: dict
    gpu_count:
      description: How many GPUs there are.
      type: int
    nics:
      description: The same for network controllers.
      type: list
      elements: dict
    bridges:
      description:
        - Every bridge above a GPU or a network controller; C(between_gpus) when GPU to GPU traffic passes
          it.
      type: list
      elements: dict
    switches:
      description: PCIe switches above GPUs, by upstream port.
      type: list
      elements: dict
    gpu_pairs:
      description: Each pair of GPUs with its relation (PIX, PXB, PHB, NODE, SYS) and NUMA nodes.
      type: list
      elements: dict
    pair_counts:
      description: How many pairs have each relation.
      type: dict
    other_display:
      description: Display controllers that are no GPU, such as a BMC's.
      type: list
      elements: dict
    nvidia_bridges:
      description: Addresses of NVSwitch functions.
      type: list
      elements: str
    aspm_policy:
      description: The kernel's ASPM policy.
      type: str
    functions:
      description: How many PCI functions there are, virtual ones not counted.
      type: int
    iommu:
      description:
        - Mode (off, passthrough, translated, mixed) as the kernel has it, what the command line asks for,
          groups.
      type: dict
    nvidia:
      description:
        - Driver version and kind, parameters, modules, device nodes, persistence daemon, RDMA devices.
      type: dict
    nvidia_smi:
      description:
        - Load, performance state, persistence mode and memory of each GPU, also as C(smi) of each GPU.
        - How many NVLinks there are, and how many of them carry data.
      type: dict
    character_devices:
      description: Driver name to major number.
      type: dict
    sysctl:
      description: Each sysctl's value now, the sysctl.d lines that set it, and the one that wins.
      type: dict
    services:
      description: Other programs that tune a host, running or enabled; TuneD's profile.
      type: dict
    containers:
      description: LXC and Proxmox containers with a GPU, and the drivers their device rules miss.
      type: list
      elements: dict
    gpu_processes:
      description:
        - Processes that hold a GPU open, with container, CPU and memory affinity, limits, size of
          /dev/shm, Python,
          packages (torch, NCCL, SGLang, vLLM) and those environment variables that decide how GPUs talk.
      type: list
      elements: dict
    this_process:
      description:
        - The same of the module's own process. Inside a container that is the container's affinity, limits,
          size of /dev/shm and installed packages, also while no server runs.
      type: dict
    kernel_log:
      description: Kernel messages on GPUs, links and the IOMMU by topic, with count and first lines.
      type: dict
unknown:
  description: Path of each null that could not be read (C(gpus.0.acs)), and one sentence why.
  returned: success
  type: dict
  sample:
    gpus.0.max_payload_size: cannot read beyond 64 bytes without privilege (CAP_SYS_ADMIN)
absent:
  description: Path of each null that stands for something the host has not, and one sentence.
  returned: success
  type: dict
  sample:
    power.cpufreq: no frequency driver is loaded (usual in a VM)
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpu_tuning.facts import collect
from ansible.module_utils.gpu_tuning.facts.reader import ROOTS, Host


def build_module():
    """Return the module object."""
    roots = {name + "_root": {"type": "path"} for name in ROOTS if name != "sysfs"}
    return AnsibleModule(
        argument_spec={
            **roots,
            "sysfs_root": {"type": "path", "default": "/sys"},
            "more_sysctls": {"type": "list", "elements": "str", "default": []},
            "nvidia_smi": {"type": "path"},
        },
        supports_check_mode=True,
    )


def main():
    """Read the facts and return them."""
    module = build_module()
    host = Host.from_options(module.params)
    facts, unknown, absent = collect(host, module.params["more_sysctls"], module.params["nvidia_smi"])
    module.exit_json(changed=False, facts=facts, unknown=unknown, absent=absent)


if __name__ == "__main__":
    main()
