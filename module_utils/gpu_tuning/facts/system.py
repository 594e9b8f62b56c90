# SPDX-License-Identifier: GPL-3.0-or-later
"""The machine as a whole: firmware, distribution, kernel, command line and boot loader."""

from __future__ import annotations

import os
import re
import shlex
from typing import Optional, Union

from .reader import Facts, Host, Unknown, absent, names_in, read_bytes, read_text

#: Parameters that the boot loader adds of itself.
_LOADERS_OWN = ("BOOT_IMAGE=", "root=", "initrd=", "ro", "rw", "boot=zfs")
_DMI = (
    "sys_vendor",
    "product_name",
    "board_vendor",
    "board_name",
    "bios_vendor",
    "bios_version",
    "bios_date",
)


def collect(host: Host) -> Facts:
    """Return ``firmware``, ``os``, ``kernel`` and ``boot``."""
    facts: Facts = {"firmware": firmware(host), "os": distribution(host), "kernel": kernel(host)}
    facts["boot"] = boot(host, facts["kernel"]["tokens"])
    return facts


def firmware(host: Host) -> Facts:
    """Return vendor, product and version; ``bios_year`` as a number."""
    facts: Facts = {name: read_text(host.sys("class/dmi/id", name)) for name in _DMI}
    date = facts["bios_date"]
    match = None if isinstance(date, Unknown) else re.match(r"\d\d/\d\d/(\d{4})$", date)
    lost = date if isinstance(date, Unknown) else Unknown(f"the firmware's date {date!r} is not MM/DD/YYYY")
    facts["bios_year"] = int(match.group(1)) if match else lost
    facts["uefi"] = os.path.isdir(host.sys("firmware/efi"))
    facts["secure_boot"] = _secure_boot(host)
    return facts


def _secure_boot(host: Host) -> Union[bool, Unknown]:
    folder = host.sys("firmware/efi/efivars")
    names = [name for name in names_in(folder) if name.startswith("SecureBoot-")]
    if not names:
        return absent(f"{folder} has no SecureBoot variable (BIOS boot, or not readable)")
    content = read_bytes(f"{folder}/{names[0]}")
    # Four bytes of attributes come before the value.
    return content if isinstance(content, Unknown) else content[4:5] == b"\x01"


def distribution(host: Host) -> Facts:
    """Return the distribution of /etc/os-release, and Proxmox VE's version where it is installed."""
    text = read_text(os.path.join(host.etc, "os-release"))
    facts: Facts = {}
    fields = {} if isinstance(text, Unknown) else _shell_values(text)
    for name in ("ID", "VERSION_ID", "PRETTY_NAME"):
        lost = text if isinstance(text, Unknown) else absent(f"os-release has no {name}")
        facts[name.lower()] = fields.get(name, lost)
    facts["proxmox"] = _package_version(host, "pve-manager")
    facts["container"] = read_text(os.path.join(host.run, "systemd/container"))
    return facts


def _shell_values(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, _eq, value in pairs}


def _package_version(host: Host, package: str) -> Union[str, Unknown]:
    """Return an installed Debian package's version out of dpkg's own file."""
    path = os.path.join(host.var, "lib/dpkg/status")
    content = read_bytes(path, limit=1 << 26)
    if isinstance(content, Unknown):
        return content
    start = content.find(b"\nPackage: " + package.encode() + b"\n")
    if start < 0:
        return absent(f"the package {package} is not installed")
    stanza = content[start : content.find(b"\n\n", start + 1)].decode("utf-8", "replace")
    version = re.search(r"^Version: (\S+)", stanza, re.MULTILINE)
    return version.group(1) if version else Unknown(f"{path} has no version of {package}")


def kernel(host: Host) -> Facts:
    """Return release, version as numbers, the running command line's tokens, installed kernels."""
    release = _release(host)
    line = read_text(host.proc("cmdline"))
    return {
        "release": release,
        "version": release if isinstance(release, Unknown) else version_numbers(release),
        "cmdline": line,
        "tokens": line if isinstance(line, Unknown) else tokens(line),
        "installed": _installed(host),
        "newest_installed": _newest(_installed(host)),
    }


def _release(host: Host) -> Union[str, Unknown]:
    release = read_text(host.proc("sys/kernel/osrelease"))
    if not isinstance(release, Unknown):
        return release
    text = read_text(host.proc("version"))
    match = None if isinstance(text, Unknown) else re.match(r"Linux version (\S+)", text)
    return match.group(1) if match else release


def version_numbers(release: str) -> list[int]:
    """Return the numbers of a kernel release: "6.8.12-9-pve" gives [6, 8, 12, 9]."""
    match = re.match(r"\d+(?:[.-]\d+)*", release)
    return [int(part) for part in re.split(r"[.-]", match.group(0))] if match else []


def tokens(line: str) -> dict[str, list[str]]:
    """Return the command line's parameters, each with all its values in order; a bare word has "".

    A dash in a name is an underscore to the kernel, and so it is here. Quotes group as the kernel's do.
    """
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    found: dict[str, list[str]] = {}
    for word in words:
        if word == "--":
            break  # what follows is for init
        name, _equals, value = word.partition("=")
        found.setdefault(name.replace("-", "_"), []).append(value)
    return found


def _installed(host: Host) -> list[str]:
    """Return the kernels that have an image in /boot, oldest first."""
    names = [name[8:] for name in names_in(host.boot) if name.startswith("vmlinuz-")]
    return sorted(names, key=version_numbers)


def _newest(installed: list[str]) -> Union[str, Unknown]:
    return installed[-1] if installed else absent("/boot holds no vmlinuz-* (another layout, or a container)")


def boot(host: Host, running: Union[dict[str, list[str]], Unknown]) -> Facts:
    """Return which loader starts this host, and the command line that its configuration asks for.

    Proxmox documents which file counts: with ESPs managed by proxmox-boot-tool and no GRUB it is
    /etc/kernel/cmdline, else /etc/default/grub.
    """
    grub = read_text(os.path.join(host.etc, "default/grub"))
    plain = read_text(os.path.join(host.etc, "kernel/cmdline"))
    managed = os.path.isfile(os.path.join(host.etc, "kernel/proxmox-boot-uuids"))
    has_grub = not isinstance(grub, Unknown)
    if not isinstance(plain, Unknown) and (managed or not has_grub):
        wanted = plain.splitlines()[0] if plain else ""
        return {"loader": "systemd-boot", "file": "/etc/kernel/cmdline", **_against(tokens(wanted), running)}
    if has_grub and not isinstance(grub, Unknown):
        wanted = _grub_line(host, grub)
        return {"loader": "grub", "file": "/etc/default/grub", **_against(tokens(wanted), running)}
    lost = absent("neither /etc/default/grub nor /etc/kernel/cmdline can be read")
    return dict.fromkeys(("loader", "file", "tokens", "pending", "not_persisted"), lost)


def _against(wanted: dict[str, list[str]], running: Union[dict[str, list[str]], Unknown]) -> Facts:
    """Return the tokens asked for, those the running kernel lacks, and those that it alone has."""
    if isinstance(running, Unknown):
        return {"tokens": wanted, "pending": running, "not_persisted": running}
    return {
        "tokens": wanted,
        "pending": _words(wanted, running),
        "not_persisted": [word for word in _words(running, wanted) if not word.startswith(_LOADERS_OWN)],
    }


def _words(these: dict[str, list[str]], those: dict[str, list[str]]) -> list[str]:
    """Return the parameters of the one as words that the other has not."""
    return [
        f"{name}={value}" if value else name
        for name, values in these.items()
        for value in values
        if value not in those.get(name, [])
    ]


def _grub_line(host: Host, text: str) -> str:
    """Return what GRUB_CMDLINE_LINUX and _DEFAULT come to, drop-ins of /etc/default/grub.d included."""
    values: dict[str, str] = {}
    folder = os.path.join(host.etc, "default/grub.d")
    drop_ins = [os.path.join(folder, name) for name in names_in(folder) if name.endswith(".cfg")]
    for content in [text, *(read_text(path) for path in drop_ins)]:
        if not isinstance(content, Unknown):
            for name, value in _assignments(content):
                values[name] = value.replace("$" + name, values.get(name, ""))
    return " ".join(values.get(name, "") for name in ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT"))


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return (name, value) of the command-line assignments; the file is shell, the last one wins."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)=(.*)", line)
        if match:
            found.append(
                (
                    match.group(1),
                    _unquote(match.group(2)).replace("${" + match.group(1) + "}", "$" + match.group(1)),
                )
            )
    return found


def _unquote(value: str) -> str:
    try:
        return "".join(shlex.split(value, comments=True))
    except ValueError:
        return value


def boot_id(host: Host) -> Union[str, Unknown]:
    """Return this boot's id."""
    return read_text(host.proc("sys/kernel/random/boot_id"))


def hostname(host: Host) -> Optional[str]:
    """Return the host's own name, None where it is not said."""
    name = read_text(host.proc("sys/kernel/hostname"))
    return None if isinstance(name, Unknown) else name
