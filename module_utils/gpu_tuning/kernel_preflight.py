# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that could go wrong with a kernel upgrade and can be known before anything is changed."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

from . import boot_loader, kernel_dkms
from .boot_facts import inapplicable
from .boot_files import BootError, run
from .boot_loader import Detected, Roots, secure_boot
from .boot_menu import menu
from .boot_once import obstacle, watchdog
from .cmdline import Token, parse, removals, wanted_tokens
from .journal import CannotStart, boot_id
from .kernel_files import read_line
from .kernel_packages import Kernel, headers_package, held, installed, owner, resolve, simulated
from .kernel_state import ARMED, State
from .kernel_state import load as load_state
from .rows import FAILED, NOT_APPLICABLE, OK, Row

#: Space that an upgrade leaves free on /boot and the ESP, in MiB.
_MARGIN_MIB = 32


@dataclasses.dataclass
class Wanted:
    """What the caller wants, as far as it is known. ``kernel`` None: the running kernel stays."""

    running: str
    parameters: list[Token]
    removed: list[Token]
    kernel: Optional[Kernel] = None
    headers: Optional[str] = None

    @property
    def release(self) -> str:
        """The release to be running in the end."""
        return self.kernel.release if self.kernel else self.running


class Preflight:
    """One look at one host. ``rows`` grows; nothing is changed."""

    def __init__(self, arguments: dict[str, Any], roots: Roots) -> None:
        """Check the arguments. Raises CannotStart."""
        self.arguments, self.roots = arguments, roots
        self.rows: list[Row] = []
        try:
            parameters = wanted_tokens(arguments["parameters"] or ())
            removed = removals(arguments["remove"] or (), parameters)
        except ValueError as error:
            raise CannotStart(f"{error}; nothing was changed") from error
        release = read_line(os.path.join(roots.procfs, "sys/kernel/osrelease")) or ""
        self.wanted = Wanted(release, parameters, removed)
        self.state: State = load_state(arguments["state_root"])

    def run(self) -> dict[str, Any]:
        """Return the module's result."""
        self._check("package", self._package)
        if self.rows[-1].status == OK:
            self._applicable()
        detected = self._check("boot_loader", self._loader)
        if not self.settled() and not self.unfinished():
            self._come_back_from_a_panic()
            self._check_upgrade(detected)
        return self._result(detected)

    def settled(self) -> bool:
        """Tell whether the host is what is wanted already, so that no upgrade has to be checked."""
        line = parse(read_line(os.path.join(self.roots.procfs, "cmdline")) or "")
        wanted = self.wanted
        return (
            wanted.release == wanted.running
            and all(line.has(token) for token in wanted.parameters)
            and all(line.lacks(removal) for removal in wanted.removed)
        )

    def _come_back_from_a_panic(self) -> None:
        """Add panic=, without which a host that panics stays so; what is configured already stays."""
        line = parse(read_line(os.path.join(self.roots.procfs, "cmdline")) or "")
        known = [*line.named("panic"), *(t for t in self.wanted.parameters if t.name == "panic")]
        if self.arguments["panic_seconds"] > 0 and not any(t.value not in (None, "0") for t in known):
            self.wanted.parameters.append(Token(f"panic={int(self.arguments['panic_seconds'])}"))

    def unfinished(self) -> bool:
        """Tell whether a new kernel was booked for a boot that has been and was not judged yet."""
        booked = (self.state.get("before") or {}).get("boot_id")
        return self.state.get("phase") == ARMED and booked != boot_id(self.roots.procfs)

    def _check_upgrade(self, detected: Optional[Detected]) -> None:
        self._check("earlier_failure", self._earlier_failure)
        self._check("way_back", self._way_back)
        self._check("held", self._held)
        self._check("simulation", self._simulation)
        self._check("space", self._space)
        self._check("dkms", self._dkms)
        self._check("secure_boot", self._secure_boot)
        self._check("guests", self._guests)
        self._check("watchdog", self._watchdog)
        if detected:
            self._check("one_time_boot", lambda: self._one_time(detected))

    def _check(self, name: str, look: Callable[[], Any]) -> Any:
        """Add a row: what ``look`` returns is (status, reason, ...) or a reason; BootError is a failure."""
        row = Row(f"preflight:{name}", "preflight", name, fix="reboot")
        try:
            found = look()
        except BootError as error:
            self.rows.append(row.with_status(FAILED, str(error)))
            return None
        if isinstance(found, Detected):
            self.rows.append(row.with_status(OK, "; ".join(found.evidence), before=found.loader))
            return found
        status, reason = found if isinstance(found, tuple) else (OK, found)
        self.rows.append(row.with_status(status, reason))
        return None

    def _package(self) -> str:
        package = self.arguments["package"]
        if not package:
            return f"no package is named: kernel {self.wanted.running} stays"
        self.wanted.kernel = resolve(package)
        if kernel_dkms.modules() or self.arguments["headers"]:
            self.wanted.headers = headers_package(self.wanted.kernel)
        return f"{package} is {self.wanted.kernel.package}, kernel {self.wanted.kernel.release}"

    def _applicable(self) -> None:
        """Leave out, with a row each, parameters that can do nothing on this host."""
        kept = []
        for token in self.wanted.parameters:
            reason = inapplicable(token, self.roots, self.wanted.release)
            if reason is None:
                kept.append(token)
                continue
            target = f"parameter {token.text}"
            row = Row(f"preflight:{target}", "preflight", target, fix="reboot")
            self.rows.append(row.with_status(NOT_APPLICABLE, reason))
        self.wanted.parameters = kept

    def _loader(self) -> Detected:
        if self.arguments["loader"] != "auto":
            return Detected(self.arguments["loader"], ("named by the option loader",))
        return boot_loader.detect(self.roots)

    def _earlier_failure(self) -> str:
        state, wanted = self.state, self.wanted
        tried = state.get("phase") == "failed" and state.get("release") == wanted.release
        if tried and state.get("parameters") == [t.text for t in wanted.parameters]:
            if not self.arguments["retry"]:
                raise BootError(
                    f"kernel {wanted.release} was tried and given up: {state.get('failure')}; "
                    "to try it again, set kernel_upgrade_retry"
                )
            return f"tried before: {state.get('failure')}; to be tried again, as told"
        return "no failed attempt at this is known"

    def _way_back(self) -> str:
        release = (self.state.get("way_back") or {}).get("release") or self.wanted.running
        image = os.path.join(self.roots.boot, f"vmlinuz-{release}")
        if not os.path.exists(image):
            raise BootError(f"{image} is not there: no kernel to come back to")
        package = owner(image) if self.roots.live else None
        return f"kernel {release}{f' of package {package}' if package else ''} stays installed"

    def _held(self) -> str:
        packages = [name for name in self._packages() if name in held()]
        if packages:
            raise BootError(f"{' and '.join(packages)} on hold: apt-mark unhold, or choose another kernel")
        return "nothing of it is on hold"

    def _packages(self) -> list[str]:
        kernel = self.wanted.kernel
        if kernel is None:
            return []
        named = [self.arguments["package"], kernel.package, self.wanted.headers or ""]
        return list(dict.fromkeys(name for name in named if name))

    def missing(self) -> list[str]:
        """Return the packages that are still to be installed."""
        return [name for name in self._packages() if installed(name) is None]

    def _simulation(self) -> str:
        packages = self.missing()
        if not packages:
            return "nothing to install"
        new, removed = simulated(packages)
        if removed:
            raise BootError(
                f"installing {' '.join(packages)} would remove {' '.join(removed)}: "
                "resolve that by hand first"
            )
        return f"apt would install {' '.join(new)} and remove nothing"

    def _space(self) -> str:
        """The old kernel's files say how large the new one's will be; ESPs get a copy of two of them."""
        if self.wanted.kernel is None or installed(self.wanted.kernel.package):
            return "nothing to install"
        boot = self.roots.boot
        sizes = [os.path.getsize(p) for p in glob.glob(os.path.join(boot, f"*-{self.wanted.running}"))]
        # An initrd of another configuration may be larger; half as much again has been enough.
        needed = int(sum(sizes) * 1.5 / 2**20) + _MARGIN_MIB
        places = {boot: needed, "/": self.wanted.kernel.size_kib // 1024 + needed if self.roots.live else 0}
        places.update({os.path.dirname(os.path.dirname(d)): needed for d in self.roots.loader_entries()})
        said = []
        for place, mib in places.items():
            free = _free_mib(place)
            if free < mib:
                raise BootError(f"{place} has {free} MiB free and the kernel needs {mib}: make room there")
            said.append(f"{place}: {free} MiB free, {mib} needed")
        return "; ".join(said)

    def _dkms(self) -> tuple[str, str]:
        kernel = self.wanted.kernel
        modules = kernel_dkms.unbuilt(kernel.release) if kernel else []
        if kernel is None or not modules:
            return NOT_APPLICABLE, "no module of DKMS is to be built"
        named = " ".join(f"{m.name}/{m.version}" for m in modules)
        if not self.arguments["dkms_trial"]:
            return OK, f"{named} to be built; not tried, as told"
        kernel_dkms.trial_build(modules, kernel.release, self.wanted.headers or "")
        return OK, f"{named} built for {kernel.release} in a scratch directory"

    def _secure_boot(self) -> str:
        if not secure_boot(self.roots):
            return "off" if secure_boot(self.roots) is False else "no EFI, so none"
        kernel = self.wanted.kernel
        if kernel and "unsigned" in kernel.package:
            raise BootError(f"Secure Boot is on, and {kernel.package} is not signed")
        if kernel_dkms.modules() and not _key_enrolled():
            raise BootError(
                "Secure Boot is on, and the key that DKMS signs with is not enrolled: "
                "mokutil --import /var/lib/dkms/mok.pub, then confirm it at the next boot"
            )
        return "on, and what is to be booted is signed"

    def _guests(self) -> str:
        guests = running_guests(self.roots)
        return f"a reboot stops {', '.join(guests)}" if guests else "none is running"

    def _watchdog(self) -> tuple[str, str]:
        found = watchdog(self.roots)
        if found is None:
            return NOT_APPLICABLE, (
                "no hardware watchdog: a kernel that hangs without a panic stays so until someone resets "
                "the host"
            )
        return OK, (
            f"{found}: armed for the first boot; a hang before the new kernel's systemd has started is "
            "caught only where the watchdog goes on counting through a reset"
        )

    def _one_time(self, detected: Detected) -> tuple[str, str]:
        reason = obstacle(detected, self.roots, os.path.join(self.roots.boot, "grub"))
        if reason is None:
            menu(detected, self.roots, self.arguments["regenerate"])
            return OK, "a failed kernel is tried once, and the way back boots after it"
        words = f"{reason}: a kernel that crashes would be tried again and again"
        if not self.arguments["accept_no_fallback"]:
            return FAILED, f"{words}; to go on without a way back, set kernel_upgrade_accept_no_fallback"
        return NOT_APPLICABLE, f"{words}; accepted, or no reboot is asked for"

    def _result(self, detected: Optional[Detected]) -> dict[str, Any]:
        failing = [row for row in self.rows if row.status == FAILED]
        said = "; ".join(f"{row.target}: {row.reason}" for row in failing)
        failure = {"msg": f"nothing was changed: {said}"} if failing else {}
        once = [row for row in self.rows if row.target == "one_time_boot"]
        return {
            "changed": False,
            "failed": bool(failing),
            **failure,
            "rows": [row.as_dict() for row in self.rows],
            "running_release": self.wanted.running,
            "release": self.wanted.release,
            "parameters": [token.text for token in self.wanted.parameters],
            "packages": [] if self.settled() or self.unfinished() or failing else self.missing(),
            "loader": detected.loader if detected else None,
            "one_time_boot": all(row.status == OK for row in once),
            "guests": running_guests(self.roots),
            "settled": self.settled(),
            "unfinished": self.unfinished(),
            "phase": self.state.get("phase"),
        }


def _free_mib(path: str) -> int:
    status = os.statvfs(path)
    return int(status.f_bavail * status.f_frsize // 2**20)


def _key_enrolled() -> bool:
    try:
        return "is already enrolled" in run(["mokutil", "--test-key", "/var/lib/dkms/mok.pub"])
    except BootError as error:
        # mokutil says so with status 1.
        return "is already enrolled" in str(error)


def running_guests(roots: Roots) -> list[str]:
    """Return what runs on the host and stops with it, by what their managers leave in the file system."""
    top = os.path.join(roots.sysfs, "fs/cgroup")
    guests = [
        f"container {p.rpartition('lxc.payload.')[2]}"
        for p in glob.glob(f"{top}/**/lxc.payload.*", recursive=True)
    ]
    guests += [f"container {os.path.basename(p)}" for p in glob.glob(f"{top}/lxc/[0-9]*")]
    if roots.live:
        guests += _pid_files("virtual machine", ("/run/qemu-server/*.pid", "/run/libvirt/qemu/*.pid"))
    guests += [
        f"container {os.path.basename(p)}" for p in glob.glob(f"{top}/**/docker-*.scope", recursive=True)
    ]
    return sorted(dict.fromkeys(guests))


def _pid_files(kind: str, patterns: Iterable[str]) -> list[str]:
    paths: Sequence[str] = [path for pattern in patterns for path in glob.glob(pattern)]
    return [f"{kind} {os.path.basename(path)[: -len('.pid')]}" for path in paths]
