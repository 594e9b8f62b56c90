# SPDX-License-Identifier: GPL-3.0-or-later
"""Both boots of a kernel upgrade in one section."""

from __future__ import annotations

import copy
from typing import Any

import kernel_record

GPU = {"address": "0000:c1:00.0", "driver": "nvidia", "link_width": 16, "max_link_width": 16}
BEFORE: dict[str, Any] = {
    "boot_id": "one",
    "release": "6.1.0",
    "cmdline": "root=/dev/sda1 quiet",
    "device_majors": {"nvidia": [195], "nvidia-uvm": [240]},
    "gpus": [GPU, GPU],
    "amd_pstate": None,
    "scaling_driver": "acpi-cpufreq",
    "cpuidle_driver": "acpi_idle",
    "idle_states": ["POLL", "C1", "C2"],
}
AFTER = {
    **copy.deepcopy(BEFORE),
    "boot_id": "two",
    "release": "6.12.0",
    "cmdline": "root=/dev/sda1 amd_pstate=active",
    "device_majors": {"nvidia": [195], "nvidia-uvm": [239]},
    "amd_pstate": "active",
    "scaling_driver": "amd-pstate-epp",
    "idle_states": ["POLL", "C1"],
}
JOURNALS = {
    "one": {"sysctl:vm.swappiness": "60", "sysctl:kernel.x": "1", "gone": "1"},
    "two": {"sysctl:vm.swappiness": "30", "sysctl:kernel.x": "1"},
}
RECORD = {"phase": "done", "release": "6.12.0", "before": BEFORE, "after": AFTER, "journals": JOURNALS}


def rows(record: dict[str, Any]) -> dict[str, tuple[str, str]]:
    table = [line for line in kernel_record.section(record).splitlines() if line.startswith("| ")]
    return {name: (old, new) for name, old, new in (line[2:-2].split(" | ") for line in table[2:])}


def test_both_boots_are_side_by_side() -> None:
    assert rows(RECORD) == {
        "kernel": ("6.1.0", "6.12.0"),
        "command line": ("root=/dev/sda1 quiet", "root=/dev/sda1 amd_pstate=active"),
        "amd pstate": ("none", "active"),
        "scaling driver": ("acpi-cpufreq", "amd-pstate-epp"),
        "cpuidle driver": ("acpi_idle", "acpi_idle"),
        "idle states": ("POLL C1 C2", "POLL C1"),
        "GPUs": ("2 (nvidia), links x16 of x16, x16 of x16",) * 2,
        "major of nvidia-uvm": ("240", "239"),
        "found at first: sysctl:vm.swappiness": ("60", "30"),
    }
    assert "Kernel 6.12.0 came up as promised and is the default." in kernel_record.section(RECORD)


def test_a_kernel_that_was_given_up_says_why() -> None:
    failed = {**RECORD, "phase": "failed", "failure": "kernel 6.12.0 did not come up: it panicked"}
    assert "Given up: kernel 6.12.0 did not come up: it panicked." in kernel_record.section(failed)


def test_a_command_line_cannot_break_the_table() -> None:
    hostile = {**RECORD, "after": {**AFTER, "cmdline": "x|y\n| evil | <b> |"}}
    assert rows({**hostile, "after": AFTER}).keys() == rows(RECORD).keys()
    line = next(x for x in kernel_record.section(hostile).splitlines() if x.startswith("| command line"))
    assert line.endswith("| x\\|y \\| evil \\| &lt;b> \\| |")
