# SPDX-License-Identifier: GPL-3.0-or-later
"""Character device majors: /proc/devices now, a recorded copy of it, and the GPU drivers' device nodes.

Facts: fs/char_dev.c of the kernel (dynamic majors are searched from 254 down to 234, then from 511
down to 384, first free wins; 512 and more are refused) and the NVIDIA open kernel modules (195 is
static; nvidia-uvm, nvidia-caps, nvidia-nvlink, nvidia-nvswitch and others are dynamic).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import Any, Optional

#: The highest character major the kernel hands out (CHRDEV_MAJOR_MAX is 512).
MAX_MAJOR = 511
#: Ranges of dynamically allocated character majors, both ends included.
DYNAMIC_RANGES = ((234, 254), (384, MAX_MAJOR))

#: Several names of /proc/devices share the static major 195; driver 535 and older say nvidia-frontend.
_ALIASES = {"nvidia-frontend": "nvidia", "nvidiactl": "nvidia", "nvidia-modeset": "nvidia"}
#: Drivers whose major is assigned once for all.
STATIC_CLASSES = frozenset({"nvidia", "drm", "accel"})
_OTHER_GPU_CLASSES = frozenset({"drm", "kfd", "accel", "apex"})

#: Node path below /dev -> (driver name in /proc/devices, minor or None), most specific first.
_NODE_CLASSES: tuple[tuple[re.Pattern[str], str, Optional[int]], ...] = tuple(
    (re.compile(pattern), name, minor)
    for pattern, name, minor in (
        (r"nvidia-uvm", "nvidia-uvm", 0),
        (r"nvidia-uvm-tools", "nvidia-uvm", 1),
        (r"nvidia-caps-imex-channels(/.*)?", "nvidia-caps-imex-channels", None),
        (r"nvidia-caps(/.*)?", "nvidia-caps", None),
        (r"nvidia-nvlink.*", "nvidia-nvlink", None),
        (r"nvidia-nvswitch.*", "nvidia-nvswitch", None),
        (r"nvidia-vgpu.*", "nvidia-vgpu-vfio", None),
        (r"nvidia-modeset", "nvidia", 254),
        (r"nvidiactl", "nvidia", 255),
        (r"nvidia\d+", "nvidia", None),
        (r"dri(/.*)?", "drm", None),
        (r"accel(/.*)?", "accel", None),
        (r"kfd", "kfd", None),
        (r"apex_\d+", "apex", None),
    )
)


class RecordError(ValueError):
    """A recorded copy of /proc/devices that cannot be read as one; the text is one sentence."""


def canonical(name: str) -> str:
    """Return the driver name that stands for ``name``: ``nvidiactl`` and the like are ``nvidia``."""
    return _ALIASES.get(name, name)


def is_dynamic(major: int) -> bool:
    """Return whether the kernel gives this character major out dynamically."""
    return any(low <= major <= high for low, high in DYNAMIC_RANGES)


def is_gpu_class(name: str) -> bool:
    """Return whether a driver name of /proc/devices belongs to a GPU or accelerator."""
    return name.startswith("nvidia") or name in _OTHER_GPU_CLASSES


@dataclasses.dataclass(frozen=True)
class Majors:
    """The character section of /proc/devices: driver name -> its majors, by whole names."""

    by_name: Mapping[str, tuple[int, ...]]

    def majors(self, name: str) -> tuple[int, ...]:
        """Return the majors of one driver, ascending; empty when it is not registered."""
        return self.by_name.get(name, ())

    def owners(self, major: int) -> tuple[str, ...]:
        """Return the drivers that own a major, in the order of their names."""
        return tuple(sorted(name for name, majors in self.by_name.items() if major in majors))

    def digest(self) -> str:
        """Return a fingerprint of the map: equal maps, equal digests."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_dict(self) -> dict[str, list[int]]:
        """Return the map as JSON-ready data."""
        return {name: list(majors) for name, majors in sorted(self.by_name.items())}


def _collect(pairs: Iterable[tuple[str, int]]) -> Majors:
    found: dict[str, set[int]] = {}
    for name, major in pairs:
        found.setdefault(canonical(name), set()).add(major)
    return Majors({name: tuple(sorted(majors)) for name, majors in found.items()})


def parse_proc_devices(text: str) -> Majors:
    """Return the character majors of a /proc/devices text; block devices and foreign lines are skipped."""
    pairs = []
    in_characters = False
    for line in text.split("\n"):
        if line.rstrip().endswith("devices:"):
            in_characters = line.strip() == "Character devices:"
            continue
        match = re.fullmatch(r"\s*([0-9]{1,9})\s+(\S.*?)\s*", line)
        if in_characters and match:
            pairs.append((match.group(2), int(match.group(1))))
    return _collect(pairs)


def parse_recorded(text: str, where: str) -> Majors:
    """Return the majors of a recorded map: a saved copy of /proc/devices, or the JSON this project writes.

    Raises :class:`RecordError` when the text is neither, or names a major that is no decimal number
    or is over 511.
    """
    if text.lstrip().startswith("{"):
        return _parse_json(text, where)
    if "Character devices:" not in text:
        raise RecordError(
            f"{where} is no copy of /proc/devices: it has no line 'Character devices:'; save one with "
            f"'cp /proc/devices FILE' before the next kernel or driver upgrade"
        )
    section = text.split("Character devices:", 1)[1].split("Block devices:", 1)[0]
    for line in section.split("\n"):
        _check_recorded_line(line, where)
    return parse_proc_devices(text)


def _check_recorded_line(line: str, where: str) -> None:
    fields = line.split()
    if not fields:
        return
    if not re.fullmatch(r"[0-9]{1,9}", fields[0]) or len(fields) < 2:
        raise RecordError(
            f"{where} holds the line {line.strip()[:60]!r}: a major must be a decimal number and a name"
        )
    _check_major(int(fields[0]), where)


def _check_major(major: int, where: str) -> None:
    if not 0 <= major <= MAX_MAJOR:
        raise RecordError(
            f"{where} names the major {major}: the kernel gives no character device one over {MAX_MAJOR}"
        )


def _parse_json(text: str, where: str) -> Majors:
    try:
        table = json.loads(text)["majors"]
        pairs = [(str(name), major) for name, majors in table.items() for major in majors]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{where} is no record of device majors: it has no readable table 'majors'"
        ) from error
    for _name, major in pairs:
        if not isinstance(major, int) or isinstance(major, bool):
            raise RecordError(f"{where} names the major {major!r}: a major must be a decimal number")
        _check_major(major, where)
    return _collect(pairs)


def below_dev(path: str) -> Optional[str]:
    """Return the part of a path below /dev, or None when it is not there ("/dev/../etc" is not)."""
    clean = os.path.normpath(path)
    return clean[len("/dev/") :] if clean.startswith("/dev/") else None


def class_of_node(path: str) -> tuple[Optional[str], Optional[int]]:
    """Return (driver name, minor) of a GPU node by its path in /dev; None where the path does not say."""
    below = below_dev(path)
    if below is None:
        return None, None
    for pattern, name, minor in _NODE_CLASSES:
        if pattern.fullmatch(below):
            return name, _numbered_minor(below) if minor is None else minor
    return None, None


def _numbered_minor(below: str) -> Optional[int]:
    match = re.fullmatch(
        r"(?:nvidia|nvidia-caps/nvidia-cap|nvidia-caps-imex-channels/channel|apex_)(\d+)", below
    )
    if not match:
        match = re.fullmatch(r"dri/(?:card|renderD)(\d+)", below)
    return int(match.group(1)) if match else None


def known_nodes(name: str, minor: Optional[int]) -> list[str]:
    """Return the node paths the vendor gives a driver's minor (None: every minor whose path is fixed)."""
    if name == "nvidia-uvm":
        paths = {0: "/dev/nvidia-uvm", 1: "/dev/nvidia-uvm-tools"}
        return list(paths.values()) if minor is None else [paths[minor]] if minor in paths else []
    if name == "nvidia-caps" and minor is not None:
        return [f"/dev/nvidia-caps/nvidia-cap{minor}"]
    if name == "nvidia-caps-imex-channels" and minor is not None:
        return [f"/dev/nvidia-caps-imex-channels/channel{minor}"]
    return []


@dataclasses.dataclass(frozen=True)
class Node:
    """What stands at a device path: kind is char, block, dir, other or missing."""

    path: str
    kind: str
    major: Optional[int] = None
    minor: Optional[int] = None
    mode: Optional[int] = None
    uid: Optional[int] = None
    gid: Optional[int] = None


def stat_node(dev_root: str, path: str) -> Node:
    """Return what stands at ``path`` (an absolute path below /dev) under ``dev_root``; links are followed."""
    below = below_dev(path)
    if below is None:
        return Node(path, "missing")
    try:
        found = os.stat(os.path.join(dev_root, below))
    except (OSError, ValueError):
        return Node(path, "missing")
    mode = found.st_mode
    kinds = (("char", stat.S_ISCHR), ("block", stat.S_ISBLK), ("dir", stat.S_ISDIR))
    kind = next((name for name, test in kinds if test(mode)), "other")
    is_device = kind in ("char", "block")
    return Node(
        path,
        kind,
        os.major(found.st_rdev) if is_device else None,
        os.minor(found.st_rdev) if is_device else None,
        stat.S_IMODE(mode),
        found.st_uid,
        found.st_gid,
    )


def nodes_of_major(dev_root: str, major: int) -> list[Node]:
    """Return the GPU nodes of one major in /dev and in its GPU directories, by path."""
    found = []
    for below in _gpu_node_paths(dev_root):
        node = stat_node(dev_root, f"/dev/{below}")
        if node.kind == "char" and node.major == major:
            found.append(node)
    return found


def _gpu_node_paths(dev_root: str) -> list[str]:
    paths = []
    for entry in _listdir(dev_root):
        if class_of_node(f"/dev/{entry}")[0] is None:
            continue
        inner = os.path.join(dev_root, entry)
        paths += [f"{entry}/{name}" for name in _listdir(inner)] if os.path.isdir(inner) else [entry]
    return paths


def char_nodes_below(dev_root: str, path: str) -> list[Node]:
    """Return the node at ``path``, or the character nodes directly in it when it is a directory."""
    node = stat_node(dev_root, path)
    if node.kind != "dir":
        return [node]
    inner = os.path.join(dev_root, below_dev(path) or "")
    children = [stat_node(dev_root, f"{path}/{name}") for name in _listdir(inner)]
    return [child for child in children if child.kind == "char"]


def _listdir(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def to_json(majors: Majors, **more: Any) -> str:
    """Return the recorded form of a map, with further top-level members."""
    return json.dumps({**more, "majors": majors.as_dict()}, indent=1, sort_keys=True) + "\n"
