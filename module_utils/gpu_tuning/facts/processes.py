# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes: tuning daemons by name, and those that use a GPU with what they run on and in.

Everything is read from procfs, so that a container's Python packages, limits and environment are seen
from its host without a command in the container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Optional, Union

from .reader import (
    Facts,
    Host,
    Unknown,
    absent,
    colon_fields,
    names_in,
    numbers_in,
    parse_ranges,
    read_bytes,
    read_text,
)

#: Environment variables that decide how GPUs talk; nothing else of an environment is reported, since
#: environments hold secrets.
_ENVIRONMENT = re.compile(
    r"^(NCCL_\w+|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING"
    r"|PYTORCH_CUDA_ALLOC_CONF|PYTORCH_ALLOC_CONF|OMP_NUM_THREADS|SGLANG_ENABLE_\w+|VLLM_ATTENTION_BACKEND)$"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
_PACKAGES = re.compile(r"^(torch|sglang|vllm|triton|flashinfer_python|nvidia_nccl_cu\d+)-([^-]+)\.dist-info$")
_GPU_NODE = re.compile(r"^/dev/(nvidia\d+|nvidiactl|nvidia-uvm|dri/renderD\d+|kfd)$")
_CONTAINER_FORMS = (
    re.compile(r"/lxc/(?P<lxc>[^/]+)"),
    re.compile(r"/lxc\.payload\.(?P<lxc>[^/]+)"),
    re.compile(r"/(?:docker[/-]|libpod-)(?P<docker>[0-9a-f]{12})"),
)
_USUAL_VENVS = ("/root/venv", "/root/.venv", "/venv", "/sgl-workspace/.venv")
_MOST = 64  # processes with a GPU that are described


def pids(host: Host) -> list[int]:
    """Return the process ids."""
    try:
        return sorted(int(name) for name in os.listdir(host.procfs) if name.isdecimal())
    except OSError:
        return []


def commands(host: Host, numbers: list[int]) -> Union[dict[str, int], Unknown]:
    """Return {command name, at most 15 characters: how many processes}."""
    counts: dict[str, int] = {}
    if not numbers:
        return Unknown(f"{host.procfs} shows no processes (a recorded machine)")
    for pid in numbers:
        name = read_text(host.proc(str(pid), "comm"))
        if not isinstance(name, Unknown):
            counts[name] = counts.get(name, 0) + 1
    return counts


def container_of(host: Host, pid: Union[int, str]) -> Optional[str]:
    """Return "lxc:<name>" or "docker:<id>" of a process's cgroup, None for the host's own."""
    text = read_text(host.proc(str(pid), "cgroup"))
    if isinstance(text, Unknown):
        return None
    for form in _CONTAINER_FORMS:
        match = form.search(text)
        if match:
            kind, name = next((kind, name) for kind, name in match.groupdict().items() if name)
            return f"{kind}:{name}"
    return None


def gpu_processes(host: Host, numbers: list[int]) -> Union[list[Facts], Unknown]:
    """Return the processes that hold a GPU's node open; unknown when none may be looked into."""
    found: list[Facts] = []
    refused = looked = 0
    if not numbers:
        return Unknown(f"{host.procfs} shows no processes (a recorded machine)")
    for pid in numbers:
        nodes = _open_gpu_nodes(host, pid)
        if nodes is None:
            refused += 1
            continue
        looked += 1
        if nodes and len(found) < _MOST:
            found.append(describe(host, pid, nodes))
    if refused and not found:
        return Unknown(
            f"{refused} of {refused + looked} processes can be looked into with root's rights only"
        )
    return found


def _open_gpu_nodes(host: Host, pid: int) -> Optional[list[str]]:
    folder = host.proc(str(pid), "fd")
    try:
        names = os.listdir(folder)
    except PermissionError:
        return None
    except OSError:
        return []
    nodes = set()
    for name in names:
        try:
            match = _GPU_NODE.match(os.readlink(os.path.join(folder, name)))
        except OSError:
            continue
        if match:
            nodes.add(match.group(1))
    return sorted(nodes)


def describe(host: Host, pid: Union[int, str], nodes: list[str]) -> Facts:
    """Return what one GPU process runs on and in; see the module's RETURN for the fields."""
    arguments = _arguments(host, pid)
    environment = _environment(host, pid)
    status = read_text(host.proc(str(pid), "status"))
    fields = {} if isinstance(status, Unknown) else colon_fields(status)
    cpus = fields.get("Cpus_allowed_list")
    lost = status if isinstance(status, Unknown) else Unknown(f"{host.proc(str(pid), 'status')} lacks it")
    return {
        "pid": pid,
        "program": read_text(host.proc(str(pid), "comm")),
        "container": container_of(host, pid),
        "gpu_nodes": nodes,
        "cpus": cpus or lost,
        "cpu_count": len(parse_ranges(cpus)) if cpus else lost,
        "memory_nodes": fields.get("Mems_allowed_list") or lost,
        "memory_node_list": parse_ranges(fields.get("Mems_allowed_list", "")),
        "memlock_bytes": _limit(host, pid, "Max locked memory"),
        "open_files": _limit(host, pid, "Max open files"),
        "shm_bytes": _shm_bytes(host, pid),
        "environment": environment,
        **_python(host, pid, arguments),
        "options": _options(arguments),
    }


def this_process(host: Host) -> Union[Facts, Unknown]:
    """Return what the audit's own process runs on and in.

    Inside a container that is the container: its affinity, limits, /dev/shm, and the packages that are
    installed in the usual places, also while no server runs.
    """
    if not os.path.isdir(host.proc("self")):
        return absent(f"{host.proc('self')} does not exist (a recorded machine)")
    top = os.path.dirname(host.usr)
    homes = [os.path.join("/opt", name) for name in names_in(os.path.join(top, "opt"))]
    found = packages(top, [*homes, *_USUAL_VENVS])
    return {**describe(host, "self", []), "packages": found}


def place(process: Facts, gpus: dict[str, Facts], nodes: list[Facts]) -> Facts:
    """Return which GPUs a process holds, their NUMA nodes, and the nodes whose CPUs it may use.

    ``gpus`` maps a node's name ("nvidia0") to the GPU's facts.
    """
    held = [gpus[name] for name in process["gpu_nodes"] if name in gpus]
    cpus = process["cpus"]
    allowed = set() if isinstance(cpus, Unknown) else set(parse_ranges(cpus))
    return {
        "gpus": [gpu["address"] for gpu in held],
        "gpu_numa_nodes": sorted({gpu["numa_node"] for gpu in held if isinstance(gpu["numa_node"], int)}),
        "cpu_numa_nodes": [node["id"] for node in nodes if allowed & set(parse_ranges(str(node["cpus"])))],
    }


def _arguments(host: Host, pid: Union[int, str]) -> list[str]:
    content = read_bytes(host.proc(str(pid), "cmdline"))
    return [] if isinstance(content, Unknown) else content.decode("utf-8", "replace").split("\0")[:-1]


def _environment(host: Host, pid: Union[int, str]) -> Union[dict[str, str], Unknown]:
    content = read_bytes(host.proc(str(pid), "environ"))
    if isinstance(content, Unknown):
        return content
    pairs = (part.partition("=") for part in content.decode("utf-8", "replace").split("\0"))
    return {
        name: value for name, _equals, value in pairs if _ENVIRONMENT.match(name) and not _SECRET.search(name)
    }


def _options(arguments: list[str]) -> Facts:
    """Return the server's parallelism out of its arguments; no other argument is reported."""
    wanted = {
        "--tp": "tensor_parallel",
        "--tp-size": "tensor_parallel",
        "--tensor-parallel-size": "tensor_parallel",
    }
    wanted.update({"--pp-size": "pipeline_parallel", "--pipeline-parallel-size": "pipeline_parallel"})
    found: Facts = {}
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals and place + 1 < len(arguments):
            value = arguments[place + 1]
        if name in wanted and value.isdecimal():
            found[wanted[name]] = int(value)
    found["cuda_graphs_disabled"] = bool({"--disable-cuda-graph", "--enforce-eager"} & set(arguments))
    return found


def _limit(host: Host, pid: Union[int, str], name: str) -> Union[int, Unknown]:
    """Return a soft limit; "unlimited" is -1."""
    path = host.proc(str(pid), "limits")
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    for line in text.splitlines():
        if line.startswith(name):
            soft = line[len(name) :].split()[:1]
            return -1 if soft == ["unlimited"] else next(iter(numbers_in(" ".join(soft))), -1)
    return Unknown(f"{path} has no {name!r}")


def _shm_bytes(host: Host, pid: Union[int, str]) -> Union[int, Unknown]:
    """Return the size of the process's /dev/shm; without a size option a tmpfs takes half the memory."""
    path = host.proc(str(pid), "mounts")
    text = read_text(path)
    if isinstance(text, Unknown):
        return text
    mounts = [line.split() for line in text.splitlines() if len(line.split()) >= 4]
    options = [fields[3] for fields in mounts if fields[1] == "/dev/shm"]
    if not options:
        return absent(f"{path} has no /dev/shm of its own")
    size = re.search(r"\bsize=(\d+)([kmg]?)", options[-1])
    if not size:
        return absent("/dev/shm has no size of its own: it may take half of the memory")
    return int(size.group(1)) << {"": 0, "k": 10, "m": 20, "g": 30}[size.group(2)]


def _python(host: Host, pid: Union[int, str], arguments: list[str]) -> Facts:
    """Return the Python version and the packages that decide performance, as installed for a process."""
    root = host.proc(str(pid), "root")
    try:
        program = os.readlink(host.proc(str(pid), "exe"))
    except OSError as error:
        lost = Unknown(f"{host.proc(str(pid), 'exe')} cannot be read: {error.strerror}")
        return {"python": lost, "packages": lost}
    version = re.search(r"python(\d+\.\d+)", program)
    homes = [
        os.path.dirname(os.path.dirname(path)) for path in ([*arguments[:1], program]) if path.startswith("/")
    ]
    return {
        "python": version.group(1) if version else absent(f"{program} is not a Python"),
        "packages": packages(root, homes),
    }


def packages(root: str, homes: Iterable[str] = ()) -> dict[str, str]:
    """Return {package: version} found below a root; ``homes`` are prefixes such as /opt/venv."""
    found: dict[str, str] = {}
    for home in dict.fromkeys([*homes, "/usr/local", "/usr"]):
        for folder in _package_folders(root, home):
            for name in list_below(root, folder):
                match = _PACKAGES.match(name)
                if match:
                    found.setdefault(match.group(1), match.group(2))
    return found


def _package_folders(root: str, home: str) -> list[str]:
    lib = f"{home.strip('/')}/lib"
    pythons = [name for name in list_below(root, lib) if re.match(r"python3(\.\d+)?$", name)]
    return [f"{lib}/{name}/{kind}" for name in pythons for kind in ("site-packages", "dist-packages")]


def list_below(root: str, path: str) -> list[str]:
    """Return the entries of a directory below ``root``, following no link on the way.

    A container's owner can put a link anywhere; followed from outside it would lead through the host.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        handle = os.open(root, flags)
    except OSError:
        return []
    try:
        for part in path.split("/"):
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        return sorted(os.listdir(handle))
    except OSError:
        return []
    finally:
        os.close(handle)
