# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the NVIDIA Management Library what the GPUs are and how fast their memory is clocked."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

_CLOCK_SM, _CLOCK_MEMORY = 1, 2


def gpus() -> tuple[Optional[str], list[dict[str, Any]]]:
    """Return (driver version, GPUs); (None, []) where there is no library or no driver.

    Per GPU: name, memory_clock_mhz and sm_clock_mhz now, max_memory_clock_mhz and max_sm_clock_mhz,
    memory_bus_bits; each None where the library does not tell. Source: the NVML API reference.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, []
    if library.nvmlInit_v2() != 0:
        return None, []
    try:
        return _text(library.nvmlSystemGetDriverVersion), [
            _gpu(library, handle) for handle in _handles(library)
        ]
    finally:
        library.nvmlShutdown()


def _handles(library: Any) -> list[ctypes.c_void_p]:
    handles = []
    for index in range(_number(library.nvmlDeviceGetCount_v2) or 0):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            handles.append(handle)
    return handles


def _number(function: Any, *arguments: Any) -> Optional[int]:
    value = ctypes.c_uint()
    return int(value.value) if function(*arguments, ctypes.byref(value)) == 0 else None


def _text(function: Any, *arguments: Any) -> Optional[str]:
    buffer = ctypes.create_string_buffer(96)
    code = function(*arguments, buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode(errors="replace") if code == 0 else None


def _gpu(library: Any, handle: ctypes.c_void_p) -> dict[str, Any]:
    def clock(function: Any, which: int) -> Optional[int]:
        return _number(function, handle, ctypes.c_uint(which))

    return {
        "name": _text(library.nvmlDeviceGetName, handle),
        "memory_clock_mhz": clock(library.nvmlDeviceGetClockInfo, _CLOCK_MEMORY),
        "sm_clock_mhz": clock(library.nvmlDeviceGetClockInfo, _CLOCK_SM),
        "max_memory_clock_mhz": clock(library.nvmlDeviceGetMaxClockInfo, _CLOCK_MEMORY),
        "max_sm_clock_mhz": clock(library.nvmlDeviceGetMaxClockInfo, _CLOCK_SM),
        "memory_bus_bits": _number(library.nvmlDeviceGetMemoryBusWidth, handle),
    }
