# SPDX-License-Identifier: GPL-3.0-or-later
"""What the repair does beside files: load drivers, create nodes, change running containers, look inside them.

Commands are argv lists. They act on the real host whatever roots are given, so callers ask for them one
by one and leave them off for a recorded machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Optional

from . import lxc_config as grammar
from . import lxc_devices as logic
from . import lxc_messages as messages
from . import proc_devices as devices
from . import rows as status
from .lxc_config import DevicePath
from .lxc_devices import DeviceRow, Plan
from .lxc_readings import MOVED, Container
from .lxc_rules import Rule

COMMAND_TIMEOUT_SECONDS = 60
DRIVER_KIND = "lxc_driver"
_LOADABLE = ("nvidia", "nvidia-uvm")
_HELPER = "nvidia-modprobe"

NOT_ASKED, NOT_RUNNING, APPLIED = "not_asked", "not_running", "applied"
NOT_APPLIED, NOTHING_TO_APPLY = "not_applied", "nothing_to_apply"


def run(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command in the C locale; return its exit status (127: no such command) and what it wrote."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError:
        return 127, f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} did not end within {COMMAND_TIMEOUT_SECONDS} s"
    except OSError as error:
        return 126, f"{argv[0]} cannot be run: {error.strerror}"
    return done.returncode, done.stdout.decode("utf-8", "replace")


# --- drivers and nodes ----------------------------------------------------------------------------------


def missing_drivers(plans: Iterable[Plan], now: devices.Majors) -> list[str]:
    """Return the NVIDIA drivers that containers need and the kernel has not registered, in load order."""
    wanted = {name for plan in plans for name in plan.classes}
    # nvidia-caps and its like come with the nvidia module.
    if any(name.startswith("nvidia-") for name in wanted):
        wanted.add("nvidia")
    return [name for name in _LOADABLE if name in wanted and not now.majors(name)]


def missing_nodes(plans: Iterable[Plan], dev_root: str) -> list[str]:
    """Return the GPU nodes that configs name and the host lacks, by path."""
    named = {path.path for plan in plans for path in grammar.device_paths(plan.container.config)}
    return sorted(
        path
        for path in named
        if (devices.class_of_node(path)[0] or "").startswith("nvidia")
        and devices.stat_node(dev_root, path).kind == "missing"
    )


def load_driver(name: str, check: bool, gpu_found: bool) -> DeviceRow:
    """Load one driver with modprobe; the row says what came of it.

    ``gpu_found``: the host's NVIDIA driver is there, so that a failure is one. Without it the host may
    have no such GPU, and only a helper script's rules ask for it.
    """
    row = _host_row(name, "not registered", "registered")
    if check:
        reason = f"{name} would be loaded; its new major is known only then"
        return row.replaced(status=status.WOULD_CHANGE, reason=reason)
    code, output = run(["modprobe", name])
    if code == 0:
        return row.replaced(status=status.CHANGED, after="registered")
    reason = (
        f"modprobe {name} failed: {_last_line(output)}; rules of {name} stay as they are until it is loaded"
    )
    state = status.REJECTED if gpu_found else status.NOT_APPLICABLE
    return row.replaced(status=state, finding=logic.DRIVER_NOT_LOADED, reason=reason)


def create_nodes(paths: Sequence[str], dev_root: str, check: bool) -> list[DeviceRow]:
    """Create missing nodes with nvidia-modprobe, in one call; a row for each node."""
    rows = [
        _host_row(path.lstrip("/"), "missing", "present").replaced(finding=logic.NODE_MISSING)
        for path in paths
    ]
    flags = helper_flags(paths)
    if shutil.which(_HELPER) is None:
        reason = (
            f"nvidia-modprobe is not installed, so {{}} was not created; install it ({_HELPER}) or run "
            "nvidia-smi once"
        )
        return [
            row.replaced(status=status.NOT_APPLICABLE, reason=reason.format(path))
            for row, path in zip(rows, paths)
        ]
    if check:
        reason = f"nvidia-modprobe {' '.join(flags)} would create it"
        return [row.replaced(status=status.WOULD_CHANGE, reason=reason) for row in rows]
    code, output = run([_HELPER, *flags]) if flags else (0, "")
    return [_node_row(row, path, dev_root, code, output) for row, path in zip(rows, paths)]


def _node_row(row: DeviceRow, path: str, dev_root: str, code: int, output: str) -> DeviceRow:
    if devices.stat_node(dev_root, path).kind == "char":
        return row.replaced(status=status.CHANGED, finding=logic.FINDING_OK, after="present")
    said = (
        f"nvidia-modprobe ended with {code}: {_last_line(output)}"
        if code
        else "nvidia-modprobe did not create it"
    )
    reason = f"{path} is still missing: {said}; is the driver loaded, and is there such a GPU?"
    return row.replaced(status=status.NOT_APPLICABLE, after="missing", reason=reason)


def helper_flags(paths: Iterable[str]) -> list[str]:
    """Return the arguments of nvidia-modprobe that create these nodes (man nvidia-modprobe)."""
    flags: list[str] = []
    for path in paths:
        name, minor = devices.class_of_node(path)
        if path == "/dev/nvidia-modeset":
            flags += ["-m"]
        elif name == "nvidia":
            flags += ["-c", str(0 if path == "/dev/nvidiactl" else minor)]
        else:
            flags += {"nvidia-uvm": ["-u"], "nvidia-nvswitch": ["-s"], "nvidia-nvlink": ["-l"]}.get(
                name or "", []
            )
    pairs = list(dict.fromkeys(re.findall(r"-c \d+|-[a-z]", " ".join(flags))))
    return " ".join(pairs).split()


def _host_row(what: str, before: str, desired: str) -> DeviceRow:
    return DeviceRow(f"{DRIVER_KIND}:{what}", DRIVER_KIND, what, before=before, desired=desired, after=before)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


# --- running containers ---------------------------------------------------------------------------------


def lxc_arguments(container: Container) -> list[str]:
    """Return the arguments that name a container to LXC's tools."""
    directory, base = os.path.split(os.path.abspath(container.path))
    if container.config.format == grammar.LXC and base == "config":
        return ["-P", os.path.dirname(directory), "-n", os.path.basename(directory)]
    return ["-n", container.name]


def is_running(container: Container) -> bool:
    """Return whether a container runs now (frozen counts as running)."""
    code, output = run(["lxc-info", *lxc_arguments(container), "-s", "-H"])
    return code == 0 and output.strip() in ("RUNNING", "FROZEN")


def apply_live(plan: Plan) -> tuple[str, str]:
    """Give a running container its new rules; return one of the outcomes above, and why not.

    Old rules are taken away before new ones are given, so that swapped majors end right.
    """
    moved = [reading for reading in plan.readings if reading.verdict == MOVED and reading.rule.line.number]
    if not moved or not plan.enforced:
        return NOTHING_TO_APPLY, ""
    if not all(reading.rule.allow for reading in moved):
        return NOT_APPLIED, "a deny rule changed, which only a restart applies"
    changes = [("devices.deny", _plain(reading.rule)) for reading in moved]
    changes += [("devices.allow", _plain(reading.rule, reading.target)) for reading in moved]
    for key, value in dict.fromkeys(changes):
        code, output = run(["lxc-cgroup", *lxc_arguments(plan.container), key, value])
        if code:
            return NOT_APPLIED, f"lxc-cgroup {key} '{value}' failed: {_last_line(output)}"
    return APPLIED, ""


def _plain(rule: Rule, major: Optional[int] = None) -> str:
    minor = "*" if rule.minor is None else rule.minor
    return f"{rule.type} {rule.major if major is None else major}:{minor} {rule.access}"


# --- the view from inside -------------------------------------------------------------------------------

# A container may have no interpreter but sh, and only a process inside it meets its rules, mounts and user
# namespace. The script is fixed, paths are its arguments; `test -c` comes first as <> would create a file.
_PROBE = r"""
for p do
  if [ ! -e "$p" ]; then printf '%s\tENOENT\n' "$p"
  elif [ ! -c "$p" ]; then printf '%s\tis not a character device\n' "$p"
  elif e=$( (exec 3<>"$p") 2>&1 ); then printf '%s\tok\n' "$p"
  else printf '%s\t%s\n' "$p" "$e"; fi
done
"""
_CUDA = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print("cuda none", error)
else:
    print("cuda", cuda.cuInit(0))
"""
_ERRORS = (
    ("ENOENT", "ENOENT"),
    ("No such file or directory", "ENOENT"),
    ("Operation not permitted", "EPERM"),
    ("Permission denied", "EACCES"),
    ("No such device or address", "ENXIO"),
    ("No such device", "ENODEV"),
    ("is not a character device", "ENOTCHR"),
)


def verify_inside(plan: Plan, dev_root: str) -> list[DeviceRow]:
    """Open each device meant for the container from inside it, and initialise CUDA where it is there."""
    wanted = expected_inside(plan)
    if not wanted:
        return []
    attach = ["lxc-attach", *lxc_arguments(plan.container), "--clear-env", "-v", "LC_ALL=C", "--"]
    code, output = run([*attach, "/bin/sh", "-c", _PROBE, "sh", *wanted])
    answers = dict(re.findall(r"^(/dev/\S+)\t(.*)$", output, re.MULTILINE))
    if code or not answers:
        reason = f"nothing could be opened from inside: lxc-attach ended with {code}: {_last_line(output)}"
        return [inside_row(plan, "open", logic.FINDING_OK, status.FAILED, reason)]
    rows = [
        _open_row(plan, path, optional, answers.get(path, ""), dev_root) for path, optional in wanted.items()
    ]
    return [row for row in rows if row] + [_cuda_row(plan, *run([*attach, "python3", "-c", _CUDA]))]


def expected_inside(plan: Plan) -> dict[str, bool]:
    """Return the device paths to open in the container -> whether it is no fault that one is not there.

    Nodes come from mount entries and devN lines; a class that only a rule gives is tried by the vendor's
    names, which may be absent.
    """
    paths: list[DevicePath] = grammar.device_paths(plan.container.config)
    named = {path.target: False for path in paths if _is_node(path)}
    by_rules = [node for name in plan.classes for node in devices.known_nodes(name, None)]
    if "nvidia" in plan.classes:
        by_rules += ["/dev/nvidiactl", "/dev/nvidia0"]
    return {**dict.fromkeys(by_rules, True), **named}


def _is_node(path: DevicePath) -> bool:
    name = devices.class_of_node(path.path)[0]
    directories = ("/dev/dri", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels", "/dev/accel")
    return name is not None and os.path.normpath(path.path) not in directories


def error_name(answer: str) -> str:
    """Return the errno name in what a shell said about a failed open, "" when there is none."""
    return next((name for words, name in _ERRORS if words in answer), "")


def _open_row(plan: Plan, path: str, optional: bool, answer: str, dev_root: str) -> Optional[DeviceRow]:
    what = f"open{path}"
    if answer == "ok":
        return inside_row(plan, what, logic.FINDING_OK, status.OK, None)
    error = error_name(answer)
    if error == "ENOENT" and optional:
        return None
    finding = {"EPERM": logic.MISSING, "EACCES": logic.NOT_ENFORCED, "ENXIO": logic.DRIVER_NOT_LOADED}.get(
        error, logic.DRIVER_NOT_LOADED if error == "ENODEV" else logic.NODE_MISSING
    )
    on_host = devices.stat_node(dev_root, path).kind == "char"
    # A node that the host has not got is the host's finding already, and may be of a GPU that is not there.
    state = status.NOT_APPLICABLE if error == "ENOENT" and not on_host else status.FAILED
    cure = messages.open_cure(error, path, devices.class_of_node(path)[0] or "", on_host)
    return inside_row(
        plan,
        what,
        finding,
        state,
        f"{path} cannot be opened in {plan.container.name}: {error or answer}: {cure}",
    )


def _cuda_row(plan: Plan, code: int, output: str) -> DeviceRow:
    match = re.search(r"^cuda (\d+)$", output, re.MULTILINE)
    if match and match.group(1) == "0":
        return inside_row(plan, "cuda", logic.FINDING_OK, status.OK, None)
    if match:
        reason = (
            f"cuInit gives {match.group(1)} in {plan.container.name}: "
            f"{messages.cuda_cure(int(match.group(1)))}"
        )
        return inside_row(plan, "cuda", logic.FINDING_OK, status.FAILED, reason)
    if "cuda none" in output:
        reason = f"there is no CUDA runtime in {plan.container.name} (libcuda.so.1), so none was initialised"
    else:
        reason = (
            f"CUDA was not initialised in {plan.container.name}: it has no python3 to call cuInit "
            f"({_last_line(output)})"
        )
    return inside_row(plan, "cuda", logic.FINDING_OK, status.NOT_APPLICABLE, reason)


def inside_row(plan: Plan, what: str, finding: str, state: str, reason: Optional[str]) -> DeviceRow:
    """Return a row about what was seen from inside a container."""
    target = f"{plan.container.name}/{what}"
    return DeviceRow(
        f"{logic.KIND}:{target}",
        logic.KIND,
        target,
        status=state,
        reason=reason,
        finding=finding,
        container=plan.container.name,
        path=plan.container.path,
    )
