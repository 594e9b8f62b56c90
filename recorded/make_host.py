#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the recorded host: sysfs and procfs of 2 EPYC 9335 with 8 RTX PRO 6000, before any tuning.

    make_host.py OUTDIR [--fault KIND=ADDRESS ...] [other options]

OUTDIR gets sys/, proc/ and etc/. VALUES.md beside this script says where each value comes from.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import tarfile
import uuid
from collections.abc import Sequence
from typing import Optional

from host_cpu import Cpus
from host_devices import Devices
from host_options import FAULTS, HostOptions
from host_proc import write_proc
from host_topology import CPU_COUNT, GPU_BUSES, Topology, cpu_list, parse_cpu_list
from host_tree import HostTree

GPU_ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in GPU_BUSES)


def build(out: str, options: HostOptions) -> None:
    """Write one recorded host into ``out``, a directory that is empty or does not exist yet."""
    tree = HostTree(out)
    topology = Topology(options.nodes_per_socket, options.offline_cpus)
    Devices(tree, topology, options).write()
    Cpus(tree, topology, options).write()
    write_proc(tree, options)


def pack(out: str, archive: str) -> None:
    """Pack a recorded host; the same host gives the same bytes."""
    with contextlib.ExitStack() as files:
        raw = files.enter_context(open(archive, "wb"))
        packed = files.enter_context(gzip.GzipFile("", "wb", 9, raw, mtime=0))
        tar = files.enter_context(tarfile.open(fileobj=packed, mode="w"))
        for name in sorted(os.listdir(out)):
            tar.add(os.path.join(out, name), name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = "root"
    return member


def parse_fault(text: str) -> tuple[str, str]:
    """Read KIND=ADDRESS."""
    kind, _, address = text.partition("=")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"no fault {kind!r}: there are {', '.join(FAULTS)}")
    if address not in GPU_ADDRESSES:
        raise argparse.ArgumentTypeError(f"no GPU {address!r}: there are {', '.join(GPU_ADDRESSES)}")
    return kind, address


def parse_offline_cpus(text: str) -> frozenset[int]:
    """Read a CPU list in the kernel's format; CPU 0 cannot be taken offline."""
    can_be_offline = range(1, CPU_COUNT)
    try:
        cpus = parse_cpu_list(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a CPU list such as 4,8-11") from None
    if not cpus.issubset(can_be_offline):
        raise argparse.ArgumentTypeError(f"{text!r} goes beyond {cpu_list(can_be_offline)}")
    return frozenset(cpus)


def parse_boot_id(text: str) -> str:
    """Read a UUID and write it as the kernel does."""
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a UUID") from None


def parse_cmdline(text: str) -> str:
    """Read kernel parameters: one line."""
    if len(text.splitlines()) != 1:
        raise argparse.ArgumentTypeError("the kernel's command line is one line")
    return text


def argument_parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", metavar="OUTDIR")
    add("--idle-links", action="store_true", help="GPU links at 2.5 GT/s, as they idle")
    add("--no-rebar", action="store_true", help="BAR1 of 256 MiB")
    add("--amd-pstate", choices=["active", "passive", "guided"], help="default: acpi-cpufreq")
    add("--governor", default="performance")
    add("--numa-nodes-per-socket", type=int, default=1, choices=[1, 2, 4])
    add("--c2-latency", type=int, default=100, metavar="US", help="exit latency of C2")
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in FAULTS.items())
    add("--fault", action="append", default=[], type=parse_fault, metavar="KIND=ADDRESS", help=kinds)
    add("--rdma", action="store_true", help="an RDMA device on the network card")
    add("--boot-id", type=parse_boot_id, metavar="UUID")
    add("--cmdline", type=parse_cmdline, metavar="TEXT", help="more kernel parameters")
    add("--offline-cpus", type=parse_offline_cpus, default=frozenset(), metavar="LIST")
    add("--tar", metavar="FILE", help="pack the result, too")
    return parser


def host_options(arguments: argparse.Namespace) -> HostOptions:
    """Return the host that the command line asks for."""
    faults: dict[str, set[str]] = {}
    for kind, address in arguments.fault:
        faults.setdefault(address, set()).add(kind)
    return HostOptions(
        idle_links=arguments.idle_links,
        resizable_bar=not arguments.no_rebar,
        amd_pstate=arguments.amd_pstate,
        governor=arguments.governor,
        nodes_per_socket=arguments.numa_nodes_per_socket,
        c2_latency=arguments.c2_latency,
        faults=faults,
        rdma=arguments.rdma,
        boot_id=arguments.boot_id,
        cmdline=arguments.cmdline,
        offline_cpus=arguments.offline_cpus,
    )


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command line; a bad one ends the program with a message."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if os.path.exists(arguments.out) and not os.path.isdir(arguments.out):
        parser.error(f"{arguments.out} is not a directory")
    if os.path.isdir(arguments.out) and os.listdir(arguments.out):
        parser.error(f"{arguments.out} is not empty")
    build(arguments.out, host_options(arguments))
    if arguments.tar:
        pack(arguments.out, arguments.tar)


if __name__ == "__main__":
    main()
