# SPDX-License-Identifier: GPL-3.0-or-later
"""One running virtual machine: QEMU without KVM, reached over ssh on a port of the loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Optional

MAC = "52:54:00:aa:00:01"
OVMF = Path("/usr/share/OVMF")
_SERIAL_TAIL = 4000


class DidNotBoot(AssertionError):
    """ssh did not answer in time; carries the end of the serial console."""


class Machine:
    """A disk image, booted on a copy-on-write overlay."""

    def __init__(self, directory: Path, image: Path, key: Path, acpi: list[str], efi: bool = False) -> None:
        """Prepare; nothing runs yet. ``acpi``: QEMU's arguments of vm.acpi."""
        self.directory, self.image, self.key, self.acpi, self.efi = directory, image, key, acpi, efi
        directory.mkdir(parents=True)
        # The name of a socket has at most 107 characters, of which ssh adds 17 while it makes one.
        self.sockets = Path(tempfile.mkdtemp(prefix="vm-"))
        self.port = _free_port()
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.serial = directory / "serial.log"

    def start(self) -> None:
        """Start QEMU; two CPUs on two NUMA nodes, 1 GiB."""
        overlay = self.directory / "disk.qcow2"
        backing = ["-F", "raw", "-b", str(self.image.resolve())]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *backing, overlay], check=True)
        argv = [*self._machine(), *self._devices(overlay), *self.acpi, *self._firmware()]
        with open(self.directory / "qemu.log", "wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _machine(self) -> list[str]:
        nodes = []
        for node in (0, 1):
            nodes += ["-object", f"memory-backend-ram,id=m{node},size=512M"]
            nodes += ["-numa", f"node,nodeid={node},cpus={node},memdev=m{node}"]
        return [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512"),
            *("-M", "q35,nvdimm=on", "-m", "1G,slots=2,maxmem=2G", "-smp", "2"),
            # A Zen 2: without a family that has it, the kernel ignores _CPC.
            *("-cpu", "max,family=23,model=49", *nodes, "-numa", "dist,src=0,dst=1,val=21"),
            *("-nodefaults", "-display", "none", "-vga", "none", "-serial", f"file:{self.serial}"),
        ]

    def _devices(self, overlay: Path) -> list[str]:
        forward = f"hostfwd=tcp:127.0.0.1:{self.port}-:22"
        return [
            *("-drive", f"file={overlay},if=none,id=hd,cache=unsafe,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=hd,bootindex=0,addr=0x3"),
            *("-netdev", f"user,id=n0,restrict=on,{forward}"),
            *("-device", f"virtio-net-pci,netdev=n0,addr=0x2,romfile=,mac={MAC}"),
            *("-device", "virtio-rng-pci,addr=0x4"),
        ]

    def _firmware(self) -> list[str]:
        if not self.efi:
            return []
        variables = self.directory / "vars.fd"
        shutil.copyfile(OVMF / "OVMF_VARS_4M.fd", variables)
        flash = "if=pflash,format=raw"
        return [
            *("-drive", f"{flash},readonly=on,file={OVMF / 'OVMF_CODE_4M.fd'}"),
            *("-drive", f"{flash},file={variables}"),
        ]

    def ssh_argv(self) -> list[str]:
        """Return ssh's arguments up to the command."""
        return [
            *("ssh", "-q", "-i", str(self.key), "-p", str(self.port), "-o", "BatchMode=yes"),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
            *("-o", "ConnectTimeout=60", "-o", "ControlMaster=auto", "-o", "ControlPersist=yes"),
            *("-o", f"ControlPath={self.sockets}/ssh", "root@127.0.0.1"),
        ]

    def disconnect(self) -> None:
        """Give up the connection that commands share: a boot ends it without telling this side."""
        argv = self.ssh_argv()
        subprocess.run([*argv[:-1], "-O", "exit", argv[-1]], check=False, stderr=subprocess.DEVNULL)

    def run(self, script: str, check: bool = True) -> str:
        """Run a shell script in the machine and return what it printed."""
        done = subprocess.run(
            [*self.ssh_argv(), "bash", "-s"], input=script, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"status {done.returncode} of {script!r}: {done.stdout}{done.stderr}")
        return done.stdout

    def put(self, source: Path, target: str) -> None:
        """Copy a file or folder into the machine."""
        pack = subprocess.Popen(["tar", "-C", source.parent, "-c", source.name], stdout=subprocess.PIPE)
        unpack = [*self.ssh_argv(), "tar", "-x", "--no-same-owner", "-C", target]
        subprocess.run(unpack, stdin=pack.stdout, check=True)
        pack.wait()

    def wait(self, timeout_s: float = 600) -> None:
        """Wait until ssh answers. Raises DidNotBoot."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise DidNotBoot(f"QEMU has ended: {(self.directory / 'qemu.log').read_text()}")
            if (
                subprocess.run([*self.ssh_argv(), "true"], check=False, stderr=subprocess.DEVNULL).returncode
                == 0
            ):
                return
            time.sleep(0.5)
        raise DidNotBoot(f"no ssh within {timeout_s:.0f} s; the console ended with: {self.console()}")

    def console(self) -> str:
        """Return the end of what the serial console showed."""
        return self.serial.read_text(errors="replace")[-_SERIAL_TAIL:]

    def cpu_seconds(self) -> float:
        """Return the CPU time that QEMU has used."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End QEMU."""
        self.disconnect()
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)  # ssh takes its own away as it ends


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
