# SPDX-License-Identifier: GPL-3.0-or-later
"""What must be the same, or knowingly different, for two benchmarks to be compared."""

from __future__ import annotations

import glob
import os
import platform
import re
from typing import Any, Optional

from . import nvml

#: Environment that changes how GPUs talk to each other; other names may hold secrets and are not recorded.
ENVIRONMENT = re.compile(r"(NCCL|CUDA|SGLANG|VLLM|OMP|TORCH|PYTORCH|FLASHINFER)_\w+")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return None


def environment(*sources: dict[str, str]) -> dict[str, str]:
    """Return the variables that matter, later sources over earlier ones, secrets left out."""
    merged: dict[str, str] = {}
    for source in sources:
        merged.update(source)
    return {
        name: merged[name]
        for name in sorted(merged)
        if ENVIRONMENT.fullmatch(name) and not SECRET.search(name)
    }


def iommu_modes(sysfs: str) -> list[str]:
    """Return the distinct IOMMU domain types of the machine, none without an IOMMU."""
    types = {_read(path) for path in glob.glob(f"{sysfs}/kernel/iommu_groups/*/type")}
    return sorted(kind for kind in types if kind)


def collect(procfs: str, sysfs: str, extra: dict[str, str]) -> dict[str, Any]:
    """Return the fingerprint of the host that this runs on; ``extra`` is the environment of the server.

    Keys: kernel, cmdline (as a list), driver, gpus, environment, iommu, governor, machine. The settings rows
    and the server's arguments are added on the controller, which knows them.
    """
    driver, gpus = nvml.gpus()
    clocks = ("memory_clock_mhz", "sm_clock_mhz")  # of this moment: recorded, but no part of the identity
    stable = [{key: value for key, value in gpu.items() if key not in clocks} for gpu in gpus]
    version = re.search(r"\s(\d{3,}\.\d[\d.]*)\s", _read(f"{procfs}/driver/nvidia/version") or "")
    governor = _read(f"{sysfs}/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "machine": platform.machine(),
        "kernel": _read(f"{procfs}/sys/kernel/osrelease"),
        "cmdline": (_read(f"{procfs}/cmdline") or "").split(),
        "driver": driver or (version.group(1) if version else None),
        "gpus": stable,
        "clocks_now": [{key: gpu[key] for key in clocks} for gpu in gpus],
        "environment": environment(dict(os.environ), extra),
        "iommu": iommu_modes(sysfs),
        "governor": governor,
    }
