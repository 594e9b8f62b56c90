#!/usr/bin/env python3
# Copyright: (c) 2026, the project contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure what the PCIe fabric between GPUs and host memory carries, with the CUDA driver alone.

Needs Python 3.9 and ``libcuda.so.1`` (it comes with the driver), no toolkit and no torch. ``--engine torch``
runs the same copies through an installed torch instead, and ``--cross-check`` runs both and compares them.

Measured, each figure in GB/s = 1e9 bytes per second, with all samples kept:

* host to device and device to host, pinned memory, for every GPU and NUMA node;
* every ordered GPU pair, peer access on: push (the source's engine writes), pull (the destination's reads);
* every GPU pair both ways at once (the figure is the sum of the two directions);
* every ordered pair with peer access off (staged through host memory);
* the time of a 16 byte and of a 12 KiB copy, launch included, in microseconds.

Every payload is read back and compared: peer copies under a translating IOMMU can corrupt silently.

The measuring happens in a child process, so that the parent can end a copy that never returns (ACS on the
path of a peer copy does that) and say which pair it was.

Exit code: 0 measured; 1 a CUDA or file error; 2 usage; 3 nothing to measure with (no driver, no device, no
torch); 4 a copy hung; 5 a payload came back wrong. What was measured is written in every case, marked
``complete``, ``partial`` or ``failed``.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import ctypes
import errno
import itertools
import json
import os
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

SCHEMA = "gpu_benchmark/p2p/1"
MIB = 1 << 20
LATENCY_BYTES = (16, 12288)  # a doorbell, and one token's hidden state in BF16 at hidden size 6144
LATENCY_BATCH, LATENCY_SAMPLES = 100, 20
POISON = 0xA5
UPSTREAM = re.compile(r"/(pci[0-9a-f]{4}:[0-9a-f]{2}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)")
EXIT_ERROR, EXIT_NOTHING, EXIT_HANG, EXIT_CORRUPT = 1, 3, 4, 5

Json = dict[str, Any]


class Fatal(RuntimeError):
    """Ends the run: one sentence for the user, and the exit code."""

    def __init__(self, message: str, code: int = EXIT_ERROR) -> None:
        """Keep the sentence as the exception's text."""
        super().__init__(message)
        self.code = code


class CudaError(RuntimeError):
    """A driver call that returned an error; ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        """Make the text from the function's name and the driver's name of the error."""
        super().__init__(f"{call} returned {name} ({code})")
        self.call, self.code = call, code


# --- the machine: NUMA nodes, PCI topology -------------------------------------------------------------


def read_text(path: str) -> Optional[str]:
    """Return the stripped text of a sysfs file, or None where it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as handle:
            return handle.read().strip()
    except OSError:
        return None


def parse_cpulist(text: str) -> set[int]:
    """Return the CPUs of a kernel list ("0-3,8"), the empty set for an empty one."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_nodes(sysfs: str) -> dict[int, set[int]]:
    """Return the CPUs of every NUMA node that has any."""
    base = f"{sysfs}/devices/system/node"
    nodes = {}
    for entry in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        match = re.fullmatch(r"node(\d+)", entry)
        cpus = parse_cpulist(read_text(f"{base}/{entry}/cpulist") or "") if match else set()
        if match and cpus:
            nodes[int(match.group(1))] = cpus
    return nodes


def pcie_device_control(config: bytes) -> Optional[tuple[int, int]]:
    """Return (MaxPayload, MaxReadReq) in bytes from a config space dump, None where not readable.

    PCI Express capability id 0x10, Device Control at offset 8: bits 7:5 and 14:12 (PCIe Base, 7.5.3.4).
    Without CAP_SYS_ADMIN the kernel gives 64 bytes only, which hold no capability.
    """
    pointer = config[0x34] & 0xFC if len(config) >= 256 else 0
    for _ in range(48):
        if pointer < 0x40:
            return None
        if config[pointer] == 0x10:
            control = int.from_bytes(config[pointer + 8 : pointer + 10], "little")
            return 128 << (control >> 5 & 7), 128 << (control >> 12 & 7)
        pointer = config[pointer + 1] & 0xFC
    return None


def link(sysfs: str, bdf: str) -> Json:
    """Return the link as sysfs tells it now; an idle GPU reports 2.5 GT/s, so read it under load."""
    device = f"{sysfs}/bus/pci/devices/{bdf}"
    width = read_text(f"{device}/current_link_width")
    return {
        "speed": read_text(f"{device}/current_link_speed"),
        "width": int(width) if width and width.isdigit() else None,
    }


def topology(sysfs: str, bdf: str) -> Json:
    """Return where a GPU sits: node, link, payload sizes, IOMMU mode and the ports above it."""
    device = f"{sysfs}/bus/pci/devices/{bdf}"
    node = read_text(f"{device}/numa_node")
    try:
        with open(f"{device}/config", "rb") as handle:
            control = pcie_device_control(handle.read(256))
    except OSError:
        control = None
    return {
        "bdf": bdf,
        "numa_node": int(node) if node and int(node) >= 0 else None,
        "link": link(sysfs, bdf),
        "max_payload_size": control[0] if control else None,
        "max_read_request_size": control[1] if control else None,
        "iommu": read_text(f"{device}/iommu_group/type"),
        "upstream": UPSTREAM.findall(os.path.realpath(device))[:-1],
    }


def relation(one: Json, other: Json) -> Optional[str]:
    """Name the path between two GPUs as ``nvidia-smi topo -m`` does; None where it is not known."""
    above, beside = one["upstream"], other["upstream"]
    shared = len(list(itertools.takewhile(lambda ports: ports[0] == ports[1], zip(above, beside))))
    if not above or not beside:
        return None
    if shared > 1:
        return "PIX" if shared == len(above) == len(beside) else "PXB"
    if shared == 1:
        return "PHB"
    if one["numa_node"] is None or other["numa_node"] is None:
        return None
    return "NODE" if one["numa_node"] == other["numa_node"] else "SYS"


@contextlib.contextmanager
def on_node(node: Optional[int], nodes: dict[int, set[int]]) -> Iterator[list[str]]:
    """Run on a node's CPUs and take new pages from it; yields what of that was refused."""
    allowed = os.sched_getaffinity(0)
    cpus = nodes.get(node, set()) & allowed if node is not None else set()
    refused = [] if cpus or node is None else [f"no CPU of node {node} is allowed here"]
    if cpus:
        os.sched_setaffinity(0, cpus)
    if node is not None and not _memory_policy(node):
        refused.append("set_mempolicy refused")
    try:
        yield refused
    finally:
        os.sched_setaffinity(0, allowed)
        _memory_policy(None)


def _memory_policy(node: Optional[int]) -> bool:
    number = {"x86_64": 238, "aarch64": 237}.get(os.uname().machine)
    if number is None:
        return False
    mask = ctypes.c_ulong(0 if node is None else 1 << node)
    mode = 0 if node is None else 1  # MPOL_DEFAULT, MPOL_PREFERRED
    bits = ctypes.c_ulong(0 if node is None else 8 * ctypes.sizeof(mask))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(ctypes.c_long(number), ctypes.c_long(mode), ctypes.byref(mask), bits) == 0)


# --- engines -------------------------------------------------------------------------------------------


class Lane(NamedTuple):
    """One copy that can be put on a stream again and again; ``device`` owns the stream."""

    device: int
    enqueue: Callable[[], None]


class Host(NamedTuple):
    """A pinned host buffer: its address, and what the engine needs to copy with and to free it."""

    address: int
    handle: Any


class Engine(abc.ABC):
    """What both engines can do: two buffers of ``size`` bytes on each device, ``out`` and ``into``."""

    name = ""
    can_switch_peer = True

    def __init__(self, size: int) -> None:
        """Subclasses start the driver here; raises Fatal with exit code 3 where there is nothing to use."""
        self.size = size
        self.bdfs: list[str] = []
        self.names: list[str] = []
        self.version = ""

    def one_way(self, lane: Lane, count: int, under_load: Callable[[], None]) -> list[float]:
        """Return the milliseconds of each of ``count`` copies, by events on the copy's own stream."""
        events = [self.event(lane.device) for _ in range(count + 1)]
        self.record(events[0], lane.device)
        for event in events[1:]:
            lane.enqueue()
            self.record(event, lane.device)
        under_load()
        self.wait(events[-1])
        return [self.elapsed(*pair) for pair in zip(events, events[1:])]

    def both_ways(self, one: Lane, other: Lane, count: int) -> list[float]:
        """Return the milliseconds of ``count`` rounds; a round starts both copies and ends with the later."""
        rounds = []
        for _ in range(count):
            start, joined = self.event(one.device), self.event(one.device)
            done = self.event(other.device)
            self.record(start, one.device)
            self.stream_wait(other.device, start)
            one.enqueue()
            other.enqueue()
            self.record(done, other.device)
            self.stream_wait(one.device, done)
            self.record(joined, one.device)
            rounds.append((start, joined))
        self.wait(rounds[-1][1])
        return [self.elapsed(*pair) for pair in rounds]

    @abc.abstractmethod
    def event(self, device: int) -> Any:
        """Return a new timing event in the device's context."""

    @abc.abstractmethod
    def record(self, event: Any, device: int) -> None:
        """Record an event on the device's stream."""

    @abc.abstractmethod
    def stream_wait(self, device: int, event: Any) -> None:
        """Let the device's stream wait for an event of any stream."""

    @abc.abstractmethod
    def wait(self, event: Any) -> None:
        """Block until the event has happened."""

    @abc.abstractmethod
    def elapsed(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two recorded events."""

    @abc.abstractmethod
    def synchronize(self, device: int) -> None:
        """Block until the device's stream is empty."""

    @abc.abstractmethod
    def can_access(self, device: int, peer: int) -> bool:
        """Return whether the driver offers peer access."""

    @abc.abstractmethod
    def set_peer(self, device: int, peer: int, on: bool) -> None:
        """Switch a device's access to a peer's memory."""

    @abc.abstractmethod
    def host_buffer(self, size: int) -> Host:
        """Return pinned host memory, on the node that the caller runs on."""

    @abc.abstractmethod
    def free_host(self, host: Host) -> None:
        """Give pinned host memory back."""

    @abc.abstractmethod
    def poison(self, device: int) -> None:
        """Overwrite ``into``, so that stale data cannot pass as a good copy."""

    @abc.abstractmethod
    def upload(self, device: int, host: Host) -> None:
        """Fill ``out`` and wait for it."""

    @abc.abstractmethod
    def h2d(self, device: int, host: Host) -> Lane:
        """Return the copy from host memory to ``into``."""

    @abc.abstractmethod
    def d2h(self, device: int, host: Host, source: str) -> Lane:
        """Return the copy of ``out`` or ``into`` to host memory."""

    @abc.abstractmethod
    def d2d(self, source: int, target: int, direction: str, size: int) -> Lane:
        """Return the copy from one device's ``out`` to the other's ``into``."""


_U32, _I32, _SIZE, _PTR, _DEV = ctypes.c_uint, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64
_REF = ctypes.c_void_p  # a pointer to the result, passed with byref()
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U32,),
    "cuDriverGetVersion": (_REF,),
    "cuDeviceGetCount": (_REF,),
    "cuDeviceGet": (_REF, _I32),
    "cuDeviceGetName": (_REF, _I32, _I32),
    "cuDeviceGetPCIBusId": (_REF, _I32, _I32),
    "cuDeviceCanAccessPeer": (_REF, _I32, _I32),
    "cuDevicePrimaryCtxRetain": (_REF, _I32),
    "cuCtxSetCurrent": (_PTR,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (_PTR, _U32),
    "cuCtxDisablePeerAccess": (_PTR,),
    "cuStreamCreate": (_REF, _U32),
    "cuStreamSynchronize": (_PTR,),
    "cuStreamWaitEvent": (_PTR, _PTR, _U32),
    "cuEventCreate": (_REF, _U32),
    "cuEventDestroy_v2": (_PTR,),
    "cuEventRecord": (_PTR, _PTR),
    "cuEventSynchronize": (_PTR,),
    "cuEventElapsedTime": (_REF, _PTR, _PTR),
    "cuMemAlloc_v2": (_REF, _SIZE),
    "cuMemHostAlloc": (_REF, _SIZE, _U32),
    "cuMemFreeHost": (_PTR,),
    "cuMemsetD8_v2": (_DEV, ctypes.c_ubyte, _SIZE),
    "cuMemcpyHtoDAsync_v2": (_DEV, _PTR, _SIZE, _PTR),
    "cuMemcpyDtoHAsync_v2": (_PTR, _DEV, _SIZE, _PTR),
    "cuMemcpyPeerAsync": (_DEV, _PTR, _DEV, _PTR, _SIZE, _PTR),
}
NO_DEVICE, OUT_OF_MEMORY, PEER_ENABLED, PEER_NOT_ENABLED = 100, 2, 704, 705
STREAM_NON_BLOCKING, HOST_PORTABLE = 1, 1


class _Event:
    """A CUDA event, destroyed with its last reference: a run makes tens of thousands."""

    def __init__(self, engine: _DriverEngine, handle: Any) -> None:
        self.engine, self.handle = engine, handle

    def __del__(self) -> None:
        self.engine.cuda.cuEventDestroy_v2(self.handle)


class _DriverEngine(Engine):
    """The CUDA driver API through ctypes."""

    name = "driver"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Fatal(
                f"No CUDA driver: libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver here, "
                "or in a container the same version's user-space libraries.",
                EXIT_NOTHING,
            ) from error
        for name, arguments in SIGNATURES.items():
            getattr(self.cuda, name).argtypes = arguments
        self._start()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function; raise CudaError unless it returns CUDA_SUCCESS."""
        code = getattr(self.cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"unknown error").decode())

    def get(self, kind: Any, name: str, *arguments: Any) -> Any:
        """Call a driver function whose first argument receives the result, and return that result."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments)
        return result

    def _start(self) -> None:
        try:
            self.call("cuInit", 0)
            count = self.get(_I32, "cuDeviceGetCount").value
        except CudaError as error:
            code = EXIT_NOTHING if error.code == NO_DEVICE else EXIT_ERROR
            hint = "see that nvidia-smi lists a GPU and that /dev/nvidia-uvm is open to this user"
            raise Fatal(f"No usable CUDA device: {error}; {hint}.", code) from error
        if count == 0:
            raise Fatal("No CUDA device: the driver is loaded and lists none.", EXIT_NOTHING)
        version = self.get(_I32, "cuDriverGetVersion").value
        self.version = f"{version // 1000}.{version % 1000 // 10}"
        self.devices = [self.get(_I32, "cuDeviceGet", index).value for index in range(count)]
        self.names = [self._text("cuDeviceGetName", device) for device in self.devices]
        self.bdfs = [self._text("cuDeviceGetPCIBusId", device).lower() for device in self.devices]
        self.contexts = [self.get(_PTR, "cuDevicePrimaryCtxRetain", device) for device in self.devices]
        self.streams = [self._on(i, _PTR, "cuStreamCreate", STREAM_NON_BLOCKING) for i in range(count)]
        self.out = [self._allocate(index) for index in range(count)]
        self.into = [self._allocate(index) for index in range(count)]

    def _text(self, name: str, device: int) -> str:
        buffer = ctypes.create_string_buffer(128)
        self.call(name, buffer, len(buffer), device)
        return buffer.value.decode(errors="replace")

    def use(self, device: int) -> None:
        """Make a device's primary context current, as torch and the runtime API do."""
        self.call("cuCtxSetCurrent", self.contexts[device])

    def _on(self, device: int, kind: Any, name: str, *arguments: Any) -> Any:
        self.use(device)
        return self.get(kind, name, *arguments)

    def _allocate(self, device: int) -> Any:
        try:
            return self._on(device, _DEV, "cuMemAlloc_v2", self.size)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            need = 2 * self.size // MIB
            raise Fatal(
                f"GPU {device} ({self.bdfs[device]}) has no {need} MiB free: stop what runs on it, "
                "or pass a smaller --size-mib."
            ) from error

    def event(self, device: int) -> _Event:
        return _Event(self, self._on(device, _PTR, "cuEventCreate", 0))

    def record(self, event: _Event, device: int) -> None:
        self.use(device)
        self.call("cuEventRecord", event.handle, self.streams[device])

    def stream_wait(self, device: int, event: _Event) -> None:
        self.use(device)
        self.call("cuStreamWaitEvent", self.streams[device], event.handle, 0)

    def wait(self, event: _Event) -> None:
        self.call("cuEventSynchronize", event.handle)

    def elapsed(self, start: _Event, end: _Event) -> float:
        return float(self.get(ctypes.c_float, "cuEventElapsedTime", start.handle, end.handle).value)

    def synchronize(self, device: int) -> None:
        self.use(device)
        self.call("cuStreamSynchronize", self.streams[device])

    def can_access(self, device: int, peer: int) -> bool:
        found = self.get(_I32, "cuDeviceCanAccessPeer", self.devices[device], self.devices[peer])
        return bool(found.value)

    def set_peer(self, device: int, peer: int, on: bool) -> None:
        self.use(device)
        try:
            if on:
                self.call("cuCtxEnablePeerAccess", self.contexts[peer], 0)
            else:
                self.call("cuCtxDisablePeerAccess", self.contexts[peer])
        except CudaError as error:
            if error.code not in (PEER_ENABLED, PEER_NOT_ENABLED):
                raise

    def host_buffer(self, size: int) -> Host:
        self.use(0)
        pointer = self.get(_PTR, "cuMemHostAlloc", size, HOST_PORTABLE)
        return Host(pointer.value, pointer)

    def free_host(self, host: Host) -> None:
        self.use(0)
        self.call("cuMemFreeHost", host.handle)

    def poison(self, device: int) -> None:
        self.use(device)
        self.call("cuMemsetD8_v2", self.into[device], POISON, self.size)
        self.call("cuCtxSynchronize")  # the streams do not wait for the default stream

    def _lane(self, device: int, name: str, *arguments: Any) -> Lane:
        def enqueue() -> None:
            self.use(device)
            self.call(name, *arguments, self.streams[device])

        return Lane(device, enqueue)

    def upload(self, device: int, host: Host) -> None:
        self._lane(device, "cuMemcpyHtoDAsync_v2", self.out[device], host.handle, self.size).enqueue()
        self.synchronize(device)

    def h2d(self, device: int, host: Host) -> Lane:
        return self._lane(device, "cuMemcpyHtoDAsync_v2", self.into[device], host.handle, self.size)

    def d2h(self, device: int, host: Host, source: str) -> Lane:
        pointer = self.out[device] if source == "out" else self.into[device]
        return self._lane(device, "cuMemcpyDtoHAsync_v2", host.handle, pointer, self.size)

    def d2d(self, source: int, target: int, direction: str, size: int) -> Lane:
        # The stream's device copies: the source's engine writes to the peer, the target's reads from it.
        owner = source if direction == "push" else target
        ends = self.into[target], self.contexts[target], self.out[source], self.contexts[source]
        return self._lane(owner, "cuMemcpyPeerAsync", *ends, size)


class _TorchEngine(Engine):
    """The container's torch: streams, non_blocking copies, events, as the known figures were taken.

    Torch puts a copy between devices on the current stream of the *source* device, so there is no pull, and
    it enables peer access by itself, so that cannot be switched.
    """

    name = "torch"
    can_switch_peer = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        try:
            import torch  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise Fatal(
                f"No torch for {sys.executable} ({error}); use --engine driver, or run this program "
                "with the Python that has torch.",
                EXIT_NOTHING,
            ) from error
        self.torch: Any = torch
        count = torch.cuda.device_count()  # the only call that is safe before a device is known
        if count == 0:
            raise Fatal(f"No CUDA device: torch {torch.__version__} lists none.", EXIT_NOTHING)
        self.version = str(torch.__version__)
        self.where = [torch.device("cuda", index) for index in range(count)]
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        self.names = [found.name for found in properties]
        self.bdfs = [self._bdf(index, found) for index, found in enumerate(properties)]
        self.streams = [torch.cuda.Stream(device=device) for device in self.where]
        self.out = [self._empty(index) for index in range(count)]
        self.into = [self._empty(index) for index in range(count)]

    @staticmethod
    def _bdf(index: int, found: Any) -> str:
        if not hasattr(found, "pci_domain_id"):  # older torch does not tell; the topology stays unknown
            return f"cuda:{index}"
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def _empty(self, device: int) -> Any:
        return self.torch.empty(self.size, dtype=self.torch.uint8, device=self.where[device])

    def event(self, device: int) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def record(self, event: Any, device: int) -> None:
        event.record(self.streams[device])

    def stream_wait(self, device: int, event: Any) -> None:
        self.streams[device].wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def elapsed(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def synchronize(self, device: int) -> None:
        self.streams[device].synchronize()

    def can_access(self, device: int, peer: int) -> bool:
        return bool(self.torch.cuda.can_device_access_peer(device, peer))

    def set_peer(self, device: int, peer: int, on: bool) -> None:
        """Torch does this by itself."""

    def host_buffer(self, size: int) -> Host:
        tensor = self.torch.empty(size, dtype=self.torch.uint8, pin_memory=True)
        return Host(tensor.data_ptr(), tensor)

    def free_host(self, host: Host) -> None:
        """The tensor goes with its last reference."""

    def poison(self, device: int) -> None:
        self.into[device].fill_(POISON)
        self.torch.cuda.synchronize(self.where[device])

    def _lane(self, device: int, target: Any, source: Any) -> Lane:
        def enqueue() -> None:
            with self.torch.cuda.stream(self.streams[device]):
                target.copy_(source, non_blocking=True)

        return Lane(device, enqueue)

    def upload(self, device: int, host: Host) -> None:
        self._lane(device, self.out[device], host.handle).enqueue()
        self.synchronize(device)

    def h2d(self, device: int, host: Host) -> Lane:
        return self._lane(device, self.into[device], host.handle)

    def d2h(self, device: int, host: Host, source: str) -> Lane:
        return self._lane(device, host.handle, self.out[device] if source == "out" else self.into[device])

    def d2d(self, source: int, target: int, direction: str, size: int) -> Lane:
        return self._lane(source, self.into[target][:size], self.out[source][:size])


ENGINES: dict[str, Callable[[int], Engine]] = {"driver": _DriverEngine, "torch": _TorchEngine}


# --- the worker: measures, and tells the parent line by line ---------------------------------------------


class Step(NamedTuple):
    """One measurement to come. ``source`` and ``target`` are GPU indexes, None for the host."""

    kind: str  # h2d, d2h, d2d, d2d_both, latency
    source: Optional[int]
    target: Optional[int]
    node: Optional[int] = None
    direction: str = "push"
    peer: bool = True
    size: int = 0

    def label(self) -> str:
        """Name the step for progress lines and for the watchdog's sentence."""
        if self.kind in ("h2d", "d2h"):
            gpu = self.target if self.kind == "h2d" else self.source
            ends = f"host node {'any' if self.node is None else self.node}", f"GPU {gpu}"
            return " -> ".join(ends if self.kind == "h2d" else ends[::-1])
        arrow = "<->" if self.kind == "d2d_both" else "->"
        what = f"{self.size} byte copy" if self.kind == "latency" else self.direction
        peer = "on" if self.peer else "off"
        return f"GPU {self.source} {arrow} GPU {self.target}, {what}, peer access {peer}"


def plan(engine: Engine, nodes: list[Optional[int]], quick: bool) -> list[Step]:
    """Return all steps of a run; ``quick`` (the cross-check) takes the one-way pushes only."""
    count = len(engine.bdfs)
    steps = [Step("h2d", None, gpu, node) for node in nodes for gpu in range(count)]
    steps += [Step("d2h", gpu, None, node) for node in nodes for gpu in range(count)]
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    for one, other in pairs:
        if engine.can_access(one, other):
            steps += _pair_steps(engine, one, other, quick)
        if engine.can_switch_peer and not quick:
            steps += [Step("d2d", one, other, peer=False)]
            steps += [Step("latency", one, other, peer=False, size=size) for size in LATENCY_BYTES]
        elif not engine.can_access(one, other):
            steps += [Step("d2d", one, other, peer=False)]
    return steps


def _pair_steps(engine: Engine, one: int, other: int, quick: bool) -> list[Step]:
    steps = [Step("d2d", one, other)]
    if quick:
        return steps
    if engine.can_switch_peer:
        steps.append(Step("d2d", one, other, direction="pull"))
    steps += [Step("latency", one, other, size=size) for size in LATENCY_BYTES]
    if one < other:
        steps.append(Step("d2d_both", one, other))
    return steps


class _Worker:
    """Runs the steps on one engine and writes a JSON line for each start, result and note."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.sysfs = options.sysfs_root
        self.nodes = numa_nodes(self.sysfs)
        self.devices = [
            {"index": index, "name": engine.names[index], **topology(self.sysfs, bdf)}
            for index, bdf in enumerate(engine.bdfs)
        ]
        self.pattern = engine.host_buffer(engine.size)
        self.readback = engine.host_buffer(engine.size)
        self._fill(self.pattern)

    def _fill(self, host: Host) -> None:
        if host is self.pattern:
            for start in range(0, self.engine.size, MIB):
                chunk = os.urandom(min(MIB, self.engine.size - start))
                ctypes.memmove(host.address + start, chunk, len(chunk))
        else:
            ctypes.memmove(host.address, self.pattern.address, self.engine.size)

    def run(self) -> None:
        """Measure everything, telling each step before it starts."""
        nodes: list[Optional[int]] = [*self.nodes] or [None]
        for device in range(len(self.devices)):
            self.engine.upload(device, self.pattern)
        steps = plan(self.engine, nodes, self.options.quick)
        tell(devices=self.devices, **self._head())
        for number, step in enumerate(steps, 1):
            tell(step=step.label(), number=number, of=len(steps))
            tell(measurement=self.measure(step))
        tell(links=[link(self.sysfs, bdf) for bdf in self.engine.bdfs], done=True)

    def _head(self) -> Json:
        devices, count = self.devices, range(len(self.devices))
        return {
            "engine": {"name": self.engine.name, "version": self.engine.version},
            "peer_access": [[i != j and self.engine.can_access(i, j) for j in count] for i in count],
            "relations": [
                [relation(one, two) if one is not two else None for two in devices] for one in devices
            ],
        }

    def measure(self, step: Step) -> Json:
        """Return one measurement: what, samples in milliseconds, GB/s or microseconds, and the check."""
        lead = step.target if step.source is None else step.source
        node = step.node if step.kind in ("h2d", "d2h") else self.devices[lead or 0]["numa_node"]
        with on_node(node, self.nodes) as refused:
            result = self._host_copy(step) if step.kind in ("h2d", "d2h") else self._peer_copy(step)
        fields = {key: value for key, value in step._asdict().items() if key not in ("size", "direction")}
        return {**fields, **result, "pinned_to": node, "refused": refused}

    def _host_copy(self, step: Step) -> Json:
        gpu = step.source if step.target is None else step.target
        assert gpu is not None
        host = self.engine.host_buffer(self.engine.size)  # allocated on the node that is measured
        try:
            self._fill(host)
            if step.kind == "h2d":
                lane = self.engine.h2d(gpu, host)
                return self._bandwidth(gpu, lane, 1, lambda: self._check_device(gpu, step.label()))
            lane = self.engine.d2h(gpu, host, "out")
            self.engine.synchronize(gpu)
            ctypes.memset(host.address, POISON, self.engine.size)
            return self._bandwidth(gpu, lane, 1, lambda: self._check_host(host, step.label()))
        finally:
            self.engine.free_host(host)

    def _peer_copy(self, step: Step) -> Json:
        source, target = step.source, step.target
        assert source is not None
        assert target is not None
        for one, other in ((source, target), (target, source)):
            if self.engine.can_access(one, other):
                self.engine.set_peer(one, other, step.peer)
        try:
            if step.kind == "latency":
                return self._latency(self.engine.d2d(source, target, "push", step.size), step.size)
            lane = self.engine.d2d(source, target, step.direction, self.engine.size)
            if step.kind == "d2d":
                result = self._bandwidth(target, lane, 1, lambda: self._check_device(target, step.label()))
                return {**result, "direction": step.direction}
            return self._both(step, lane, self.engine.d2d(target, source, "push", self.engine.size))
        finally:
            if step.peer and self.engine.can_switch_peer:
                for one, other in ((source, target), (target, source)):
                    self.engine.set_peer(one, other, False)  # a device has room for few peers at a time

    def _both(self, step: Step, one: Lane, other: Lane) -> Json:
        source, target = one.device, other.device
        self.engine.poison(source)

        def check() -> list[Json]:
            return self._check_device(target, step.label()) + self._check_device(source, step.label())

        return self._bandwidth(target, one, 2, check, other)

    def _bandwidth(
        self, gpu: int, lane: Lane, ways: int, check: Callable[[], list[Json]], other: Optional[Lane] = None
    ) -> Json:
        """Copy once and check, warm up, measure, check again."""
        self.engine.poison(gpu)
        for one in filter(None, (lane, other)):
            one.enqueue()
            self.engine.synchronize(one.device)
        wrong = check()
        seen: list[Json] = []
        self._samples(lane, other, self.options.warmup, lambda: None)
        samples = self._samples(lane, other, self.options.iterations, lambda: seen.append(self._link(gpu)))
        wrong += check()
        return {
            "samples_ms": [round(sample, 6) for sample in samples],
            "median_gbps": round(ways * self.engine.size / statistics.median(samples) / 1e6, 3),
            "bytes": self.engine.size,
            "link_under_load": seen[0] if seen else None,
            "verified": not wrong,
            "corrupt": wrong,
        }

    def _samples(
        self, lane: Lane, other: Optional[Lane], count: int, under_load: Callable[[], None]
    ) -> list[float]:
        if count == 0:
            return []
        if other:
            samples = self.engine.both_ways(lane, other, count)
        else:
            samples = self.engine.one_way(lane, count, under_load)
        if any(not sample > 0 for sample in samples):
            raise Fatal("The CUDA events report a copy that took no time; its figures cannot be used.")
        return samples

    def _link(self, gpu: int) -> Json:
        return link(self.sysfs, self.engine.bdfs[gpu])

    def _latency(self, lane: Lane, size: int) -> Json:
        def batch() -> None:
            for _ in range(LATENCY_BATCH):
                lane.enqueue()

        many = Lane(lane.device, batch)
        self.engine.one_way(many, 2, lambda: None)
        samples = self.engine.one_way(many, LATENCY_SAMPLES, lambda: None)
        return {
            "samples_ms": [round(sample / LATENCY_BATCH, 7) for sample in samples],
            "median_us": round(1000 * statistics.median(samples) / LATENCY_BATCH, 3),
            "bytes": size,
        }

    def _check_device(self, gpu: int, what: str) -> list[Json]:
        """Return the first wrong byte of what arrived on a GPU, as a list of none or one."""
        ctypes.memset(self.readback.address, POISON ^ 0xFF, self.engine.size)
        self.engine.d2h(gpu, self.readback, "into").enqueue()
        self.engine.synchronize(gpu)
        return self._check_host(self.readback, what)

    def _check_host(self, host: Host, what: str) -> list[Json]:
        offset = first_difference(host.address, self.pattern.address, self.engine.size)
        return [] if offset is None else [{"what": what, "offset": offset}]


def first_difference(one: int, other: int, size: int) -> Optional[int]:
    """Return the offset of the first byte in which two memory areas differ, None where they are equal."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    if compare(one, other, size) == 0:
        return None
    start = 0
    while size > 1:
        half = size // 2
        if compare(one + start, other + start, half) == 0:
            start, size = start + half, size - half
        else:
            size = half
    return start


def tell(**message: Any) -> None:
    """Write one line of the worker's protocol."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def work(options: argparse.Namespace) -> int:
    """Run as the worker; every failure becomes one line to the parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    try:
        tell(step="start of the CUDA driver", number=0, of=0)
        _Worker(ENGINES[options.engine](options.size_mib * MIB), options).run()
        return 0
    except Fatal as error:
        tell(fatal=str(error), code=error.code)
    except Exception as error:  # the parent prints one sentence, whatever torch or ctypes raised
        tell(fatal=f"{type(error).__name__}: {error}".splitlines()[0], code=EXIT_ERROR)
    return EXIT_ERROR


# --- the parent: watches, collects, writes ----------------------------------------------------------------


class _Run:
    """One worker process, watched: collects what it tells and ends it when it hangs."""

    def __init__(self, options: argparse.Namespace, engine: str, quick: bool) -> None:
        self.options, self.engine = options, engine
        self.step, self.position, self.started = "start", (0, 0), time.monotonic()
        self.head: Json = {"devices": [], "engine": {"name": engine, "version": None}}
        self.measurements: list[Json] = []
        self.error: Optional[Fatal] = None
        self.finished = False
        command = [sys.executable, os.path.abspath(__file__), "--worker", "--engine", engine]
        for name in ("size_mib", "iterations", "warmup", "sysfs_root"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        command += ["--quick"] if quick else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)

    def watch(self) -> None:
        """Follow the worker to its end; afterwards ``error`` is None or says why it is not complete."""
        assert self.process.stdout is not None
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(self.options.timeout):
                    self._end_hang()
                    return
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        self._end()

    def _take(self, message: Json) -> None:
        if "step" in message:
            self.step, self.position = message["step"], (message["number"], message["of"])
        elif "measurement" in message:
            self.measurements.append(message["measurement"])
            self._progress(message["measurement"])
        elif "fatal" in message:
            self.error = Fatal(message["fatal"], message["code"])
        elif message.pop("done", False):
            self.finished = True
        else:
            self.head.update(message)
            self.started = time.monotonic()

    def _progress(self, found: Json) -> None:
        number, total = self.position
        left = (time.monotonic() - self.started) / number * (total - number)
        unit, value = ("us", found["median_us"]) if "median_us" in found else ("GB/s", found["median_gbps"])
        note = "" if found.get("verified", True) else "  WRONG PAYLOAD"
        say(f"[{number}/{total}] {value:8.2f} {unit}  {self.step}{note}  (about {left:.0f} s left)")

    def _end_hang(self) -> None:
        self.kill()
        self.error = Fatal(
            f"{self.step}: no answer within {self.options.timeout:g} s, so the run was ended; on a peer copy "
            "suspect ACS or the IOMMU on the path (see lspci -vv, ACSCtl), and check dmesg for Xid errors.",
            EXIT_HANG,
        )

    def _end(self) -> None:
        code = self.process.wait()
        if code < 0 and not self.error:
            name = signal.Signals(-code).name
            self.error = Fatal(
                f"{self.step}: the measuring process was ended by {name}; see dmesg for Xid errors."
            )
        elif not self.finished and not self.error:
            self.error = Fatal(f"{self.step}: the measuring process ended early with exit code {code}.")

    def kill(self) -> None:
        """End the worker; one that is stuck in the kernel is left to it after a moment."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)

    def result(self) -> Json:
        """Return the run as JSON-ready data."""
        complete = self.finished and not self.error
        status = "complete" if complete else "partial" if self.measurements else "failed"
        return {
            **self.head,
            "status": status,
            "error": {"message": str(self.error), "exit_code": self.error.code} if self.error else None,
            "measurements": self.measurements,
        }


def cross_check(one: Json, other: Json) -> list[Json]:
    """Return, for every copy that both engines measured, both figures and their ratio."""

    def key(found: Json) -> Optional[tuple[Any, ...]]:
        if found["kind"] not in ("h2d", "d2h", "d2d") or found.get("direction", "push") != "push":
            return None
        return found["kind"], found["source"], found["target"], found["node"], found["peer"]

    figures = {key(found): found["median_gbps"] for found in one["measurements"] if key(found)}
    return [
        {
            **dict(zip(("kind", "source", "target", "node", "peer"), key(found) or ())),
            one["engine"]["name"]: figures[key(found)],
            other["engine"]["name"]: found["median_gbps"],
            "ratio": round(found["median_gbps"] / figures[key(found)], 4),
        }
        for found in other["measurements"]
        if key(found) in figures
    ]


def say(text: str) -> None:
    """Write a progress line; a reader that has gone away does not end the run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def write_result(path: Optional[str], result: Json) -> None:
    """Write the result beside its target and rename it there, or to standard output without a path."""
    text = json.dumps(result, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text if result["measurements"] else "")
        return
    folder = os.path.dirname(os.path.abspath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".p2p.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        sys.stdout.write(text)  # the measurement took minutes: do not lose it to a full disk
        cause = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        message = f"The result cannot be written to {path}: {cause}; it is on standard output instead."
        raise Fatal(message) from error


def measure(options: argparse.Namespace) -> Json:
    """Run the chosen engine, and torch beside it for the cross-check; return the whole result."""
    run = _Run(options, options.engine, quick=False)
    runs = [run]

    def interrupted(number: int, _frame: Any) -> None:
        for one in runs:
            one.kill()
        name = signal.Signals(number).name
        runs[-1].error = Fatal(f"Interrupted by {name} at {runs[-1].step}.", 128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    run.watch()
    result = {
        "schema": SCHEMA,
        "tool": {"name": "p2p_bandwidth.py", "engine": options.engine},
        "bytes": options.size_mib * MIB,
        "iterations": options.iterations,
        "warmup": options.warmup,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **run.result(),
    }
    if options.cross_check and not run.error:
        runs.append(_Run(options, "torch" if options.engine == "driver" else "driver", quick=True))
        runs[1].watch()
        second = runs[1].result()
        result["cross_check"] = {"error": second["error"], "pairs": cross_check(result, second)}
    return result


def conclude(result: Json) -> int:
    """Say the one sentence that matters and return the exit code."""
    if result["error"]:
        say(result["error"]["message"])
        return int(result["error"]["exit_code"])
    wrong = [found for one in result["measurements"] for found in one.get("corrupt", [])]
    if wrong:
        first = wrong[0]
        say(
            f"WRONG PAYLOAD: {first['what']}: byte {first['offset']} differs from what was sent "
            f"({len(wrong)} checks failed); use no peer copies here before the IOMMU or ACS fault is fixed."
        )
        return EXIT_CORRUPT
    if len(result["devices"]) == 1:
        say("One CUDA device: host to device and device to host only, there is no pair to measure.")
    return 0


def parse_arguments(arguments: Optional[list[str]] = None) -> argparse.Namespace:
    """Return the options; sizes and counts below 1 are refused."""

    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise ValueError(text)
        return value

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), default="driver")
    parser.add_argument("--cross-check", action="store_true", help="run the other engine too and compare")
    parser.add_argument("--size-mib", type=positive, default=256, help="bytes of one copy, in MiB")
    parser.add_argument("--iterations", type=positive, default=50, help="copies measured per figure")
    parser.add_argument("--warmup", type=positive, default=5, help="copies before those")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds after which a step counts as hung"
    )
    parser.add_argument("--output", help="file for the JSON result (default: standard output)")
    parser.add_argument("--sysfs-root", default="/sys", help="where topology is read")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, write, conclude."""
    options = parse_arguments()
    if options.worker:
        return work(options)
    result = measure(options)
    try:
        write_result(options.output, result)
    except Fatal as error:
        say(str(error))
        return error.code
    return conclude(result)


if __name__ == "__main__":
    sys.exit(main())
