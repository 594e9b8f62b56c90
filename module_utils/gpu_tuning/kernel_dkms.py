# SPDX-License-Identifier: GPL-3.0-or-later
"""DKMS modules must build for a kernel before that kernel is installed: a trial in a scratch directory."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import tempfile
from typing import NamedTuple

from .boot_files import BootError, run
from .kernel_packages import simulated


class Module(NamedTuple):
    """One module that DKMS looks after."""

    name: str
    version: str


_STATUS = re.compile(r"([^/,\s]+)[/,]\s*([^,:\s]+)(?:,\s*([^,]+),\s*[^:]+)?:\s*(\S+)")


def status(release: str = "") -> list[tuple[Module, str, str]]:
    """Return (module, kernel release, state) of each line of ``dkms status``; no DKMS means none."""
    if shutil.which("dkms") is None:
        return []
    said = run(["dkms", "status", *(["-k", release] if release else [])])
    found = [match for match in map(_STATUS.match, said.splitlines()) if match]
    return [(Module(m.group(1), m.group(2)), m.group(3) or "", m.group(4)) for m in found]


def modules() -> list[Module]:
    """Return what DKMS has, each once."""
    return sorted({module for module, _, _ in status()})


def unbuilt(release: str) -> list[Module]:
    """Return the modules that are not ready for a kernel."""
    ready = {module for module, _, state in status(release) if state in ("built", "installed")}
    return [module for module in modules() if module not in ready]


def trial_build(wanted: list[Module], release: str, headers: str) -> None:
    """Build modules against headers that are not installed yet; nothing outside a scratch directory changes.

    Raises BootError naming the module, with the end of its build log.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-tuning-dkms-") as scratch:
        source = _unpacked_headers(headers, release, scratch)
        for module in wanted:
            _build(module, release, source, scratch)


def _unpacked_headers(headers: str, release: str, scratch: str) -> str:
    """Fetch and unpack the headers' packages that are missing here; return the kernel's build directory."""
    build = f"/lib/modules/{release}/build"
    if os.path.isdir(build):
        return build
    packages = [name for name in simulated([headers])[0] if re.search(r"headers|kbuild", name)]
    debs, root = os.path.join(scratch, "debs"), os.path.join(scratch, "root")
    os.mkdir(debs)
    # It writes to the working directory, as a user of its own that could not write there.
    run(["apt-get", "download", "--option", "APT::Sandbox::User=root", *packages], cwd=debs)
    for deb in glob.glob(os.path.join(debs, "*.deb")):
        run(["dpkg-deb", "--extract", deb, root])
    source = os.path.join(root, "usr/src", f"linux-headers-{release}")
    if not os.path.isdir(source):
        raise BootError(f"the packages of {headers} hold no /usr/src/linux-headers-{release}")
    _relocate(source, root)
    return source


def _relocate(source: str, root: str) -> None:
    """Have an unpacked headers' Makefile include its own siblings, not those of the running system."""
    path = os.path.join(source, "Makefile")
    with contextlib.suppress(FileNotFoundError):
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(re.sub(r"^include /usr/src/", f"include {root}/usr/src/", text, flags=re.M))
    # With vmlinux there, the build wants pahole for type information, which a trial does not need.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(source, "vmlinux"))


def _build(module: Module, release: str, source: str, scratch: str) -> None:
    tree = os.path.join(scratch, "tree")
    place = os.path.join(tree, module.name, module.version)
    os.makedirs(place)
    os.symlink(f"/usr/src/{module.name}-{module.version}", os.path.join(place, "source"))
    try:
        run(
            [
                *("dkms", "build", "-m", module.name, "-v", module.version, "-k", release),
                *("--kernelsourcedir", source, "--dkmstree", tree),
            ]
        )
    except BootError as error:
        raise BootError(
            f"{module.name} {module.version} does not build for kernel {release}: {_log_end(place) or error}"
        ) from error


def _log_end(place: str) -> str:
    """Return the last lines of the build's log that name an error."""
    for path in glob.glob(os.path.join(place, "**/make.log"), recursive=True):
        with open(path, encoding="utf-8", errors="replace") as stream:
            wrong = [line.strip() for line in stream if re.search(r"error|fatal", line, re.I)]
        return " / ".join(wrong[:3])
    return ""
