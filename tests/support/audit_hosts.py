# SPDX-License-Identifier: GPL-3.0-or-later
"""Recorded hosts for the audit: the generator's options, small edits, and two hosts with a PCIe switch.

tests/fixtures/audit/variants.yml says what each variant is. A tree of 16,000 files is built once per set of
options; an edit is made in it, the facts are read, and the edit is undone.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import host_images as images
import yaml
from gpu_tuning.facts import collect
from gpu_tuning.facts.reader import Host
from host_pci import PciFunction, PciWriter
from host_topology import Topology
from host_tree import HostTree
from pci_image import Express, PciImage

from .play import REPO
from .tree import make_recorded_host

sys.path.insert(0, str(REPO / "plugin_utils"))

from host_audit import document, drawing, evaluate, reports, rules

__all__ = ["document", "drawing", "evaluate", "reports", "rules"]

VARIANTS: dict[str, dict[str, Any]] = yaml.safe_load(
    (REPO / "tests/fixtures/audit/variants.yml").read_text(encoding="utf-8")
)
RULES_DIR = REPO / "roles/host_audit/rules"
RULES = rules.load([str(RULES_DIR)])
UPSTREAM, DOWNSTREAM = 5, 6
SWITCH_LINK = 0x00466905  # 32 GT/s x16
Facts = evaluate.HostFacts


class AuditHosts:
    """Builds variants below a directory, and remembers what was read of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._trees: dict[str, Path] = {}
        self._facts: dict[str, Facts] = {}
        self.evaluator = evaluate.Evaluator()

    def facts(self, variant: str) -> Facts:
        """Return a variant's facts."""
        if variant not in self._facts:
            with self.host(variant) as root:
                tool = root / "usr/bin/nvidia-smi"
                host = Host.from_options({"sysfs_root": str(root / "sys")})
                self._facts[variant] = Facts(*collect(host, (), str(tool) if tool.exists() else None))
        return self._facts[variant]

    def rows(self, variant: str) -> list[dict[str, Any]]:
        """Return what the audit's own rules say about a variant."""
        return self.evaluator.rows(RULES, self.facts(variant))

    @contextlib.contextmanager
    def host(self, variant: str) -> Iterator[Path]:
        """Give a variant's tree for the time of a with block."""
        spec = VARIANTS[variant]
        root = self._tree(
            spec.get("machine", "recorded"), [str(option) for option in spec.get("options", [])]
        )
        with contextlib.ExitStack() as undo:
            for kind, what in spec.items():
                if kind in EDITS:
                    EDITS[kind](root, what, undo)
            yield root

    def _tree(self, machine: str, options: list[str]) -> Path:
        key = " ".join([machine, *options])
        if key not in self._trees:
            root = self._directory / f"tree{len(self._trees)}"
            if machine == "recorded":
                make_recorded_host(root, *options)
            else:
                _small_host(root, machine)
            self._trees[key] = root
        return self._trees[key]


def finding_ids(rows: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the findings, without their common prefix."""
    return {row["id"].removeprefix("finding:") for row in rows if row["outcome"] == "finding"}


# ---------------------------------------------------------------- edits, each with its undoing
def _write(root: Path, files: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Write texts; a pattern writes every file that fits."""
    for pattern, text in files.items():
        for path in _matches(root, pattern):
            content = text if isinstance(text, bytes) else f"{text}\n".encode()
            _replace(path, content, undo)


def _substitute(root: Path, files: dict[str, list[str]], undo: contextlib.ExitStack) -> None:
    for name, (old, new) in files.items():
        text = (root / name).read_text(encoding="utf-8")
        assert old in text, f"{name} does not hold {old!r}"
        # The first CPU only, of those of a whole list: hosts with mixed microcode exist.
        count = 1 if new and name == "proc/cpuinfo" else -1
        _replace(root / name, text.replace(old, new, count).encode(), undo)


def _matches(root: Path, pattern: str) -> list[Path]:
    if "*" not in pattern:
        return [root / pattern]
    found = [Path(path) for path in glob.glob(str(root / pattern))]
    assert found, f"no file fits {pattern}"
    return found


def _replace(path: Path, content: bytes, undo: contextlib.ExitStack) -> None:
    if path.exists():
        undo.callback(_put, path, path.read_bytes())
        _put(path, content)
    else:
        _make_parents(path, undo)
        path.write_bytes(content)
        undo.callback(path.unlink)


def _put(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def _make_parents(path: Path, undo: contextlib.ExitStack) -> None:
    missing = [parent for parent in path.parents if not parent.exists()]
    if missing:
        undo.callback(shutil.rmtree, missing[-1])
        path.parent.mkdir(parents=True)


def _patch(root: Path, patches: list[dict[str, Any]], undo: contextlib.ExitStack) -> None:
    """Set the bits of a 16-bit register: ``mask`` is cleared, ``bits`` are set."""
    for patch in patches:
        for path in _matches(root, patch["file"]):
            content = bytearray(path.read_bytes())
            (old,) = struct.unpack_from("<H", content, patch["offset"])
            struct.pack_into("<H", content, patch["offset"], old & ~patch.get("mask", 0xFFFF) | patch["bits"])
            _replace(path, bytes(content), undo)


def _remove(root: Path, patterns: list[str], undo: contextlib.ExitStack) -> None:
    aside_folder = Path(tempfile.mkdtemp(dir=root.parent))
    for pattern in patterns:
        for path in _matches(root, pattern):
            aside = aside_folder / str(len(os.listdir(aside_folder)))
            os.rename(path, aside)
            undo.callback(os.rename, aside, path)


def _link(root: Path, links: dict[str, str], undo: contextlib.ExitStack) -> None:
    for name, target in links.items():
        path = root / name
        if path.is_symlink():
            undo.callback(os.symlink, os.readlink(path), path)
            path.unlink()
        else:
            _make_parents(path, undo)
        path.symlink_to(target)
        undo.callback(path.unlink)


def _processes(root: Path, specs: list[dict[str, Any]], undo: contextlib.ExitStack) -> None:
    for spec in specs:
        folder = f"proc/{spec['pid']}"
        environ = "".join(f"{name}={value}\0" for name, value in spec.get("environment", {}).items())
        files: dict[str, Any] = {
            "comm": spec["comm"],
            "cgroup": f"0::{spec.get('cgroup', '/system.slice')}",
            "cmdline": "".join(f"{word}\0" for word in spec.get("cmdline", [spec["comm"]])).encode(),
            "environ": environ.encode(),
            "status": f"Name:\t{spec['comm']}\nCpus_allowed_list:\t{spec.get('cpus', '0-127')}\n"
            f"Mems_allowed_list:\t{spec.get('nodes', '0-1')}",
            "limits": f"Limit  Soft  Hard\nMax locked memory {spec.get('memlock', 'unlimited')} x bytes\n"
            f"Max open files {spec.get('files', 1048576)} x files",
            "mounts": f"tmpfs /dev/shm tmpfs rw,nosuid,size={spec.get('shm', '16g')} 0 0",
        }
        files.update({f"root/{place}/METADATA": "" for place in spec.get("packages", [])})
        _write(root, {f"{folder}/{name}": text for name, text in files.items()}, undo)
        links = {f"{folder}/fd/{number}": node for number, node in enumerate(spec.get("opens", []), 3)}
        _link(root, {f"{folder}/exe": spec.get("exe", "/usr/bin/python3.12"), **links}, undo)


def _smbios(root: Path, spec: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Write an SMBIOS table with one Memory Device for each slot of two sockets with twelve channels."""
    table = b""
    for number in range(24):
        module = spec["modules"][number % len(spec["modules"])]
        place = f"P{number // 12} CHANNEL {chr(65 + number % 12)}"
        table += memory_device(f"DIMM {number}", place, **module)
    table += struct.pack("<BBH", 127, 4, 0xFFFF) + b"\0\0"
    _replace(root / "sys/firmware/dmi/tables/DMI", table, undo)


def memory_device(locator: str, bank: str, gib: int, rated: int, configured: int, part: str) -> bytes:
    """Return a Memory Device structure (SMBIOS 3.3, type 17)."""
    area = bytearray(0x5C)
    struct.pack_into("<BBH", area, 0, 17, len(area), 0x1000)
    struct.pack_into(
        "<HHH", area, 0x08, 80 if gib else 0, 64 if gib else 0, 0x7FFF if gib >= 32 else gib * 1024
    )
    area[0x10], area[0x11], area[0x12], area[0x1B] = 1, 2, 0x22, 2
    struct.pack_into("<HHH", area, 0x15, rated, 0, 0)
    struct.pack_into("<IH", area, 0x1C, gib * 1024, configured)
    area[0x1A] = 3
    return bytes(area) + b"".join(text.encode() + b"\0" for text in (locator, bank, part)) + b"\0"


def _nvidia_smi(root: Path, spec: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Write a stand-in for nvidia-smi that prints what the variant says."""
    lines = [", ".join(str(value) for value in values) for values in spec["gpus"]]
    links = "\n".join(f"\t Link {number}: {state}" for number, state in enumerate(spec.get("links", [])))
    script = f"#!/bin/sh\ncase $1 in\nnvlink) printf '%s\\n' 'GPU 0: x' '{links}' ;;\n"
    script += "*) printf '%s\\n' " + " ".join(f"'{line}'" for line in lines) + " ;;\nesac"
    path = root / "usr/bin/nvidia-smi"
    _write(root, {"usr/bin/nvidia-smi": script}, undo)
    path.chmod(0o755)


EDITS = {
    "remove": _remove,
    "write": _write,
    "replace": _substitute,
    "patch": _patch,
    "link": _link,
    "processes": _processes,
    "smbios": _smbios,
    "nvidia_smi": _nvidia_smi,
}


# ---------------------------------------------------------------- hosts with a switch
def _small_host(root: Path, machine: str) -> None:
    """Write a one-socket host whose GPUs hang below a switch, or carry one, or use a narrow slot."""
    tree = HostTree(str(root))
    pci = PciWriter(tree, Topology())
    tree.file("proc/sys/kernel/osrelease", "6.8.12-9-pve")
    tree.file("proc/sys/kernel/numa_balancing", 0)
    tree.file("proc/cmdline", "root=/dev/sda1 ro")
    tree.directory("sys/kernel/iommu_groups")
    tree.file("sys/devices/system/node/node0/cpulist", "0-127")
    tree.file("sys/devices/system/node/node0/distance", "10")
    tree.file("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 1048576 kB")
    top = pci.add(
        PciFunction("0000:00:01.1", images.root_port(0, 1, 9, link_status=0x7105), ROOT, 0, "pcieport")
    )
    {"switch": _behind_switch, "card_switch": _own_switch, "riser": _narrow_slot}[machine](pci, top)


ROOT = "sys/devices/pci0000:00"


def _behind_switch(pci: PciWriter, top: str) -> None:
    up = pci.add(PciFunction("0000:01:00.0", _port(UPSTREAM, 0x10B5, 1, 2, 9), top, 0, "pcieport"))
    for number in range(2):
        bus = 3 + number
        port = _port(DOWNSTREAM, 0x10B5, 2, bus, bus)
        down = pci.add(PciFunction(f"0000:02:{number:02x}.0", port, up, 0, "pcieport"))
        image = images.gpu(number, images.DEVICE_CONTROL, 0x1105, False, True)
        pci.add(PciFunction(f"0000:{bus:02x}:00.0", image, down, 0, "nvidia"))


def _own_switch(pci: PciWriter, top: str) -> None:
    """An Intel card with a switch of its own: the GPU itself says 2.5 GT/s x1."""
    up = pci.add(PciFunction("0000:01:00.0", _port(UPSTREAM, 0x8086, 1, 2, 3), top, 0, "pcieport"))
    down = pci.add(PciFunction("0000:02:01.0", _port(DOWNSTREAM, 0x8086, 2, 3, 3), up, 0, "pcieport"))
    express = Express(0, 0x00008022, images.DEVICE_CONTROL, 0x00000011, 0x0011)
    image = PciImage(0x8086, 0xE223, 0x030000).power_management(0x40).express(0x70, express)
    pci.add(PciFunction("0000:03:00.0", image, down, 0, "xe"))


def _narrow_slot(pci: PciWriter, top: str) -> None:
    """A GPU whose root port has four lanes."""
    narrow = images.root_port(0, 2, 2, link_status=0x7045, link_capabilities=0x00737845)
    port = pci.add(PciFunction("0000:00:03.1", narrow, ROOT, 0, "pcieport"))
    image = images.gpu(0, images.DEVICE_CONTROL, 0x1045, False, True)
    pci.add(PciFunction("0000:02:00.0", image, port, 0, "nvidia"))


def _port(kind: int, vendor: int, primary: int, secondary: int, subordinate: int) -> PciImage:
    """Return a switch port: 32 GT/s x16, ACS present and off on downstream ports."""
    express = Express(
        kind, 0x00008022, images.DEVICE_CONTROL, SWITCH_LINK, 0x1105, link_control=0x0040, link_control_2=5
    )
    image = PciImage(vendor, 0xC030, 0x060400, header=1, revision=1).buses(primary, secondary, subordinate)
    image.power_management(0x40).express(0x68, express)
    if kind == DOWNSTREAM:
        image.extended(0x100, 0x0D, 1, struct.pack("<HH", 0x005F, 0))
    return image
