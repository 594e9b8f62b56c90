#!/usr/bin/python
# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation of the action plugin of this name, which does all the work."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_host_audit
short_description: Say what holds a host's multi-GPU inference back, with evidence
version_added: "0.1.0"
description:
  - Reads the host's facts with C(gpu_host_facts), the one module call it makes, and asks the rules about them
    on the controller.
  - Prints a verdict and a table, and writes C(audit.json), C(system-improve.md) and C(audit.html) to
    C(<reports_root>/<host>/<UTC time>/) on the controller. Writes nothing on the host.
options:
  procfs_root:
    description: Where procfs is. By default beside O(sysfs_root).
    type: str
  sysfs_root:
    description: Where sysfs is, by default C(/sys).
    type: str
  etc_root:
    description: Where C(/etc) is. By default beside O(sysfs_root), and so each root below.
    type: str
  dev_root:
    description: Where C(/dev) is.
    type: str
  run_root:
    description: Where C(/run) is.
    type: str
  usr_root:
    description: Where C(/usr) is.
    type: str
  var_root:
    description: Where C(/var) is.
    type: str
  boot_root:
    description: Where C(/boot) is.
    type: str
  lib_root:
    description: Where C(/lib) is.
    type: str
  more_sysctls:
    description: Sysctls to read for rules of one's own.
    type: list
    elements: str
    default: []
  nvidia_smi:
    description: The C(nvidia-smi) to ask instead of the host's own.
    type: str
  rules_dirs:
    description: Directories on the controller whose C(*.yml) files are rules.
    type: list
    elements: str
    required: true
  skip_rules:
    description: Ids of rules to leave out.
    type: list
    elements: str
    default: []
  templates_dir:
    description: Directory on the controller with the reports' templates.
    type: str
    required: true
  reports_root:
    description: Directory on the controller for the reports.
    type: str
    required: true
  compare_with:
    description: An earlier C(audit.json) to compare with. By default the host's newest one.
    type: str
  fail_on:
    description: Fail when a finding is of this severity or worse. Empty never fails.
    type: str
    choices: ["", P0, P1, P2, info]
    default: ""
  show_table:
    description: Print the verdict and the table.
    type: bool
    default: true
author:
  - The project contributors (!UNKNOWN)
attributes:
  action:
    support: full
    description: The work is done on the controller.
  check_mode:
    support: full
    description: In check mode no report is written either.
  diff_mode:
    support: full
    description: Shows the findings against those of the earlier audit.
"""

EXAMPLES = r"""
- name: Audit a GPU host
  gpu_host_audit:
    rules_dirs:
      - "{{ role_path }}/rules"
    templates_dir: "{{ role_path }}/templates"
    reports_root: reports
  register: audit

- name: Audit a GPU host with rules of one's own, and fail on the worst findings
  gpu_host_audit:
    rules_dirs:
      - "{{ role_path }}/rules"
      - "{{ inventory_dir }}/audit_rules"
    templates_dir: "{{ role_path }}/templates"
    reports_root: reports
    fail_on: P0
"""

RETURN = r"""
verdict:
  description: One line - what there is, what is wrong with it, what comes first.
  returned: success
  type: str
  sample: "8 GPUs: 2 P0, 1 P1, 5 P2. First: The IOMMU translates every access of the GPUs (reboot)."
counts:
  description: How many rules found something, by severity, and how many are clear, unknown or not applicable.
  returned: success
  type: dict
rows:
  description: The findings as setting rows, each with its rule's severity, remedy, effect, cost and source.
  returned: success
  type: list
  elements: dict
changes:
  description: Ids of findings that appeared, are gone, changed or are unclear since the earlier audit.
  returned: success, null without an earlier audit
  type: dict
report_dir:
  description: Where the reports are on the controller.
  returned: success, null in check mode
  type: str
"""
