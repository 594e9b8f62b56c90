# SPDX-License-Identifier: GPL-3.0-or-later
"""What the virtual machine is made of, fetched from the package sources that this machine has configured."""

from __future__ import annotations

import hashlib
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

#: Metapackages, so that a new point release of a kernel does not break the tests.
OLD_KERNEL, NEW_KERNEL = "linux-image-cloud-amd64", "linux-image-6.12-cloud-amd64"
SYSTEMD_BOOT = ("systemd-boot", "systemd-boot-efi")
ROOT_PACKAGES = (
    *("systemd-sysv", "systemd", "udev", "dbus", "kmod", "openssh-server", "python3", "python3-apt"),
    *("grub-pc-bin", "grub-common", "grub2-common", "initramfs-tools", "zstd", "lz4", "lxc", "iproute2"),
    *("procps", "pciutils", "e2fsprogs", "less", "ca-certificates", "linux-base", "busybox"),
)
#: What of it no test reads: manuals and translations.
_EXCLUDED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/info/*")


def refresh() -> None:
    """Renew apt's lists: the newer kernel is in the security suite, whose lists a bare machine may lack."""
    subprocess.run(["apt-get", "update", "-qq"], check=True)


def image_behind(metapackage: str) -> str:
    """Return the image package that a kernel metapackage depends on now."""
    said = _output("apt-cache", "depends", "--no-recommends", "--no-suggests", metapackage)
    match = re.search(r"Depends: (linux-image-\S+)", said)
    assert match, f"apt knows no {metapackage}"
    return match.group(1)


def release_of(image: str) -> str:
    """Return a kernel's release, which is the image's name less its head."""
    return image.removeprefix("linux-image-")


def headers_of(release: str) -> list[str]:
    """Return the packages that building a module for a kernel takes."""
    said = _output("apt-cache", "depends", f"linux-headers-{release}")
    return [f"linux-headers-{release}", *re.findall(r"Depends: (linux-(?:headers|kbuild)\S+)", said)]


def download(directory: Path, packages: Sequence[str]) -> list[Path]:
    """Fetch packages, those that are there already not again, and return their files."""
    directory.mkdir(parents=True, exist_ok=True)
    missing = [name for name in packages if not list(directory.glob(f"{name}_*.deb"))]
    if missing:
        argv = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *missing]
        subprocess.run(argv, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return [next(directory.glob(f"{name}_*.deb")) for name in packages]


def unpack(debs: Sequence[Path], directory: Path) -> Path:
    """Unpack packages into a directory, without installing them."""
    for deb in debs:
        subprocess.run(["dpkg-deb", "--extract", deb, directory], check=True)
    return directory


def root_tar(cache: Path) -> Path:
    """Return a tar of a minimal Debian 12; made anew when the list of packages or the month changes."""
    key = hashlib.sha256(f"{ROOT_PACKAGES} {time.strftime('%Y-%m')}".encode()).hexdigest()[:12]
    tar = cache / f"root-{key}.tar"
    if not tar.exists():
        partial = tar.with_suffix(".part.tar")
        options = [f"--dpkgopt=path-exclude={each}" for each in _EXCLUDED]
        argv = [
            *("mmdebstrap", "--mode=root", "--variant=minbase", "--components=main"),
            *(f"--include={','.join(ROOT_PACKAGES)}", "--skip=cleanup/apt/lists", "--quiet"),
            *('--aptopt=APT::Install-Recommends "false"', "--dpkgopt=force-unsafe-io", *options),
            *("bookworm", str(partial)),
        ]
        subprocess.run(argv, check=True)
        partial.rename(tar)
    return tar


def _output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
