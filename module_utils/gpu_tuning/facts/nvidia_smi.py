# SPDX-License-Identifier: GPL-3.0-or-later
"""What only the NVIDIA driver's own tool says: load, clocks state, persistence mode, NVLink.

The tool is asked only where the driver is loaded and its control node is there: it would load the one
and make the other itself, and an audit changes nothing.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from typing import Any, Optional, Union

from .reader import Facts, Host, Unknown, absent

_FIELDS = (
    ("pci.bus_id", "address"),
    ("pstate", "pstate"),
    ("utilization.gpu", "utilisation_percent"),
    ("persistence_mode", "persistence_mode"),
    ("memory.total", "memory_mib"),
    ("power.limit", "power_limit_w"),
    ("power.default_limit", "power_default_w"),
    ("clocks_throttle_reasons.active", "throttle_reasons"),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected"),
    ("temperature.gpu", "temperature_c"),
)
_TIMEOUT_S = 30  # eight GPUs without persistence mode take several seconds to wake


def collect(host: Host, tool: Optional[str]) -> Facts:
    """Return ``gpus`` ({address: {...}}) and ``nvlink`` ({"links", "active"}) of the tool's answers."""
    reason = _reason_not_to(host, tool)
    if reason or not tool:
        lost = Unknown(reason)
        return {"gpus": lost, "nvlink": lost}
    query = ",".join(name for name, _fact in _FIELDS)
    answer = _run([tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    links = _run([tool, "nvlink", "--status"])
    return {
        "gpus": answer if isinstance(answer, Unknown) else parse_query(answer),
        "nvlink": links if isinstance(links, Unknown) else parse_nvlink(links),
    }


def of_gpu(smi: Facts, address: str) -> Union[Facts, Unknown]:
    """Return what the tool said about one GPU."""
    gpus = smi["gpus"]
    if isinstance(gpus, Unknown):
        return gpus
    found: Union[Facts, Unknown] = gpus.get(address, absent(f"nvidia-smi does not list {address}"))
    return found


def find_tool(host: Host) -> Optional[str]:
    """Return the tool's place on a live host; a recorded one has none that may run."""
    path = os.path.join(host.usr, "bin/nvidia-smi")
    return path if host.live and os.access(path, os.X_OK) else None


def _reason_not_to(host: Host, tool: Optional[str]) -> str:
    if not tool:
        return "nvidia-smi is not installed (or not asked on a recorded machine)"
    if not os.path.isfile(host.proc("driver/nvidia/version")):
        return "the NVIDIA driver is not loaded, and asking nvidia-smi would load it"
    if host.live and not os.path.exists(os.path.join(host.dev, "nvidiactl")):
        return "/dev/nvidiactl is missing, and asking nvidia-smi would create it"
    return ""


def _run(arguments: list[str]) -> Union[str, Unknown]:
    """Return a command's output; one that hangs on a lost GPU is left behind, not waited for."""
    try:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        return Unknown(f"{arguments[0]} cannot be run: {error.strerror}")
    try:
        output, _errors = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # in an uninterruptible sleep it stays; waiting for it would hang the audit too
        return Unknown(f"{arguments[0]} gave no answer in {_TIMEOUT_S} s: a GPU may hang")
    if process.returncode:
        first = output.strip().splitlines()[:1]
        return Unknown(f"{arguments[0]} failed: {first[0] if first else process.returncode}")
    return output


def parse_query(text: str) -> Facts:
    """Return {address: facts} of the tool's CSV; "[N/A]" and the like become None."""
    gpus: Facts = {}
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(_FIELDS):
            continue
        facts = {fact: _value(value) for (_name, fact), value in zip(_FIELDS, values)}
        facts["persistence_mode"] = {"Enabled": True, "Disabled": False}.get(str(facts["persistence_mode"]))
        gpus[_address(str(facts.pop("address")))] = facts
    return gpus


def _address(text: str) -> str:
    """Return "00000000:01:00.0" as the kernel writes it: four digits of domain, lower case."""
    domain, _colon, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.match(r"^[0-9a-f]+$", domain) else text


def _value(text: str) -> Any:
    if text.startswith("[") or text in ("N/A", ""):
        return None
    try:
        return float(text) if "." in text and ":" not in text else int(text)
    except ValueError:
        return text


def parse_nvlink(text: str) -> Facts:
    """Return how many NVLinks the tool lists, and how many of them carry data ("<n> GB/s")."""
    links = re.findall(r"^\s+Link \d+: (.*)$", text, re.MULTILINE)
    return {"links": len(links), "active": sum("GB/s" in link for link in links)}
