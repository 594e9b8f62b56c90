# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel packages as apt and dpkg know them: from a name to a release, and what installing does."""

from __future__ import annotations

import dataclasses
import re
from typing import Optional

from .boot_files import BootError, run

#: Images carry three numbers (6.12.9-amd64, 6.8.0-45-generic, 6.8.12-9-pve), metapackages two or none.
_IMAGE = re.compile(
    r"(?:linux-image(?:-unsigned)?|proxmox-kernel|pve-kernel)-(\d+\.\d+\.\d+\S*?)(?:-signed)?\Z"
)
_KERNEL_NAME = re.compile(r"(?:linux-|proxmox-|pve-)")


class PackageError(BootError):
    """The sources do not have what is wanted, or apt would not do it: one sentence."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An image package and the release it installs; ``size_kib``: its Installed-Size."""

    package: str
    release: str
    size_kib: int = 0


def image_release(package: str) -> Optional[str]:
    """Return the release that an image package's name carries, None for a metapackage."""
    match = _IMAGE.match(package)
    return match.group(1) if match else None


def resolve(package: str) -> Kernel:
    """Return the image that a package, metapackages followed, would install now. Raises PackageError."""
    seen = [package]
    while image_release(package) is None:
        following = [name for name in _depends(package) if _KERNEL_NAME.match(name) and name not in seen]
        images = [name for name in following if image_release(name)] or [
            n for n in following if "headers" not in n
        ]
        if not images:
            raise PackageError(f"{seen[0]} leads to no kernel image: its dependencies end at {package}")
        package = images[0]
        seen.append(package)
    size = _fields(package).get("Installed-Size", "0")
    return Kernel(package, image_release(package) or "", int(size) if size.isdigit() else 0)


def _depends(package: str) -> list[str]:
    """Return the first alternative of every dependency."""
    depends = _fields(package).get("Depends", "")
    return [part.split("|")[0].split()[0] for part in depends.split(",") if part.strip()]


def _fields(package: str) -> dict[str, str]:
    """Return the fields of the candidate version's record. Raises PackageError."""
    version = candidate(package)
    if version is None:
        raise PackageError(
            f"no configured source has {package}, or its pin forbids every version: "
            "correct the name or the sources, and run apt-get update"
        )
    shown = run(["apt-cache", "show", "--no-all-versions", f"{package}={version}"])
    fields: dict[str, str] = {}
    for line in shown.partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(": ")
        if colon and not line.startswith(" "):
            fields[name] = value.strip()
    return fields


def candidate(package: str) -> Optional[str]:
    """Return the version that apt would install, pins respected; None when there is none."""
    match = re.search(r"^\s+Candidate: (\S+)", run(["apt-cache", "policy", package]), re.M)
    return None if not match or match.group(1) == "(none)" else match.group(1)


def installed(package: str) -> Optional[str]:
    """Return the installed version, None when the package is not (wholly) installed."""
    try:
        said = run(["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Version}", package])
    except BootError:
        return None
    status, _, version = said.partition(" ")
    return version.strip() if status == "installed" else None


def held() -> list[str]:
    """Return the packages on hold."""
    return run(["apt-mark", "showhold"]).split()


def owner(path: str) -> Optional[str]:
    """Return the package that a file belongs to."""
    try:
        return run(["dpkg-query", "--search", path]).partition(":")[0]
    except BootError:
        return None


def headers_package(kernel: Kernel) -> str:
    """Return the name of the package with a kernel's headers."""
    family = kernel.package.partition("-")[0]
    return f"{'linux' if family == 'linux' else family}-headers-{kernel.release}"


def simulated(packages: list[str]) -> tuple[list[str], list[str]]:
    """Return what installing would install and remove, nothing being done. Raises PackageError."""
    try:
        said = run(["apt-get", "--simulate", "--option", "Debug::NoLocking=1", "install", *packages])
    except BootError as error:
        raise PackageError(f"apt would not install {' '.join(packages)}: {error}") from error
    actions = [line.split()[:2] for line in said.splitlines() if line.startswith(("Inst ", "Remv "))]
    new = [name for action, name in actions if action == "Inst"]
    return new, [name for action, name in actions if action == "Remv"]
