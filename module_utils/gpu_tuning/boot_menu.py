# SPDX-License-Identifier: GPL-3.0-or-later
"""The way back in the boot menu: an entry of its own, the default until a new kernel has proved itself.

The entry boots the old kernel with the command line it was running with: what is configured for all entries
reaches the old kernel's ordinary entry too, and may be what is wrong.
"""

from __future__ import annotations

import abc
import contextlib
import fnmatch
import os
import re
from collections.abc import Iterator
from typing import Optional

from . import bls, grub_defaults
from .bls import BlsEntry
from .boot_config import WAY_BACK
from .boot_esp import mounted
from .boot_files import BootError, content, encoded, lines, replace, replace_all, run, text
from .boot_loader import GRUB, PROXMOX_BOOT_TOOL, SYSTEMD_BOOT, UUIDS, Detected, Roots, config, efi_text
from .cmdline import CommandLine, Token, parse
from .grub import Grub
from .grub_menu import MenuEntry

SCRIPT = "grub.d/42_gpu_tuning"
DEFAULT = "default/grub.d/zz-gpu-tuning-default.cfg"


class BootMenu(abc.ABC):
    """One loader's menu, as far as an upgrade has to do with it. Every method raises BootError."""

    @abc.abstractmethod
    def guard(self, release: str, line: CommandLine) -> bool:
        """Make the way back and the default that boots it; return whether something changed."""

    @abc.abstractmethod
    def guarded(self) -> bool:
        """Tell whether the next ordinary boot is the way back."""

    @abc.abstractmethod
    def line_of(self, release: str) -> Optional[CommandLine]:
        """Return the command line of a kernel's ordinary entry, None without one."""

    @abc.abstractmethod
    def arm(self, release: str) -> None:
        """Have a kernel's ordinary entry boot once, next time."""

    @abc.abstractmethod
    def prefer(self, release: str) -> None:
        """Have a kernel's ordinary entry boot from now on, the way back staying in the menu."""

    @abc.abstractmethod
    def promote(self, release: str) -> None:
        """Have a kernel boot from now on and take the way back out of the menu."""


def menu(detected: Detected, roots: Roots, regenerate: Optional[list[str]] = None) -> BootMenu:
    """Return the menu of a loader. Raises BootError for one that upgrades are not supported with."""
    if detected.loader == GRUB:
        backend = config(GRUB, roots, regenerate)
        assert isinstance(backend, Grub)
        return GrubMenu(backend)
    if detected.loader in (SYSTEMD_BOOT, PROXMOX_BOOT_TOOL):
        return SystemdBootMenu(roots, detected.loader == PROXMOX_BOOT_TOOL)
    raise BootError(f"kernel upgrades are not supported with {detected.loader} entries")


class GrubMenu(BootMenu):
    """GRUB's: a script in /etc/grub.d makes the entry, a drop-in in /etc/default/grub.d the default."""

    def __init__(self, grub: Grub) -> None:
        """Take the back end that knows where the files are."""
        self.grub = grub
        self.script = os.path.join(grub.etc_root, SCRIPT)
        self.default = os.path.join(grub.etc_root, DEFAULT)

    def guard(self, release: str, line: CommandLine) -> bool:
        """Write the script and the drop-in, and make the menu."""
        entry = self._entry(release)
        body = "\n".join(_with_line(each, line) for each in entry.body.split("\n"))
        changed = self._write(way_back_script(release, body), _default_drop_in(WAY_BACK))
        if changed or not self.guarded():
            self._refresh()
            if not self.guarded():
                raise BootError(
                    f"the boot menu's default is {self.grub.menu().default}, not the way back: "
                    f"a file after {self.default} sets GRUB_DEFAULT; take that out of it"
                )
            return True
        return False

    def _write(self, script: Optional[str], default: Optional[str]) -> bool:
        new = {
            self.script: None if script is None else encoded(script),
            self.default: None if default is None else encoded(default),
        }
        changed = any(content(path) != data for path, data in new.items())
        replace_all(new, {self.script: 0o755})
        return changed

    def _refresh(self) -> None:
        self.grub.refresh()

    def _entry(self, release: str) -> MenuEntry:
        entry = self.grub.menu().for_release(release)
        if entry is None:
            raise BootError(f"{self.grub.menu_path} has no entry for kernel {release}")
        return entry

    def guarded(self) -> bool:
        """Tell whether the menu's default is the way back and its entry is there."""
        found = self.grub.menu()
        entry = found.find(found.default)
        return entry is not None and entry.path == WAY_BACK

    def line_of(self, release: str) -> Optional[CommandLine]:
        """Return the command line of the kernel's entry in the submenu."""
        entry = self.grub.menu().for_release(release)
        return entry.line if entry else None

    def arm(self, release: str) -> None:
        """Set next_entry, which GRUB clears before it boots the entry."""
        path = self._entry(release).path
        run(["grub-reboot", path])
        if f"next_entry={path}" not in run(["grub-editenv", "list"]).splitlines():
            raise BootError(f"grub-reboot {path} left no next_entry in GRUB's environment block")

    def prefer(self, release: str) -> None:
        """Name the kernel in the drop-in."""
        self._write(text(self.script), _default_drop_in(self._entry(release).path))
        self._refresh()

    def promote(self, release: str) -> None:
        """Take script and drop-in away, unless the administrator's own default is another kernel."""
        path = self._entry(release).path
        chosen = self._own_default()
        drop_in = None
        if chosen == "saved":
            run(["grub-set-default", path])
        else:
            entry = self.grub.menu().find(chosen) if chosen is not None else None
            drop_in = None if entry and entry.release == release else _default_drop_in(path)
        self._write(None, drop_in)
        self._refresh()
        run(["grub-editenv", "-", "unset", "next_entry"])

    def _own_default(self) -> Optional[str]:
        """Return GRUB_DEFAULT as it is without our drop-in; None when only a shell could know it."""
        files = [each for each in self.grub.defaults() if each.path != self.default]
        found = grub_defaults.last(files).get("GRUB_DEFAULT")
        if found is None:
            return "0"
        return None if found.dynamic else found.value


def way_back_script(release: str, body: str) -> str:
    """Return the script for /etc/grub.d whose output is the entry."""
    return (
        "#!/bin/sh\n"
        "# Written by gpu-tuning for the time of a kernel upgrade.\n"
        "cat <<'GPU_TUNING_WAY_BACK'\n"
        f"menuentry 'Way back: Linux {release} as it was' --class gnu-linux --id {WAY_BACK} {{\n"
        f"{body}\n}}\nGPU_TUNING_WAY_BACK\n"
    )


def _default_drop_in(path: str) -> str:
    return f"# Written by gpu-tuning (kernel_boot).\nGRUB_DEFAULT='{path}'\n"


def _with_line(body_line: str, line: CommandLine) -> str:
    """Return a line of an entry's body, with another command line if it is the one that names the kernel."""
    match = re.match(r"(\s*linux(?:16|efi)?\s+\S+)[ \t]", f"{body_line} ")
    return f"{match.group(1)} {' '.join(map(_for_grub, line.tokens))}" if match else body_line


def _for_grub(token: Token) -> str:
    """Return a token as GRUB's script language must have it to pass it on as it is."""
    bare = token.text.replace('"', "")
    if re.fullmatch(r"[A-Za-z0-9_.,:=/@%+~^*?!#()\[\]-]+", bare) and bare == token.text:
        return bare
    return "'" + bare.replace("'", "'\\''") + "'"


class SystemdBootMenu(BootMenu):
    """systemd-boot's: an entry file on each ESP, and the variables LoaderEntryDefault and -OneShot."""

    def __init__(self, roots: Roots, proxmox: bool) -> None:
        """Take the roots; ``proxmox``: the ESPs are mounted only for a moment."""
        self.roots, self.proxmox = roots, proxmox

    @contextlib.contextmanager
    def _esps(self, writable: bool = False) -> Iterator[list[str]]:
        """Yield every loader/entries directory."""
        if not self.proxmox or self.roots.esps is not None:
            yield self.roots.loader_entries()
            return
        with contextlib.ExitStack() as stack:
            uuids = (text(os.path.join(self.roots.etc, UUIDS)) or "").split()
            tops = [stack.enter_context(mounted(uuid, writable)) for uuid in uuids]
            yield [os.path.join(top, "loader/entries") for top in tops]

    def _read(self, directory: str) -> list[BlsEntry]:
        machine_id = (text(os.path.join(self.roots.etc, "machine-id")) or "").strip() or None
        return [e for e in bls.read(directory, None if self.proxmox else machine_id) if not bls.own(e.path)]

    def _entry(self, directory: str, release: str) -> BlsEntry:
        fitting = [entry for entry in self._read(directory) if entry.release == release]
        if not fitting:
            raise BootError(f"{directory} has no entry for kernel {release}")
        return fitting[0]

    def _identity(self, release: str) -> str:
        with self._esps() as directories:
            if not directories:
                raise BootError("no loader/entries directory on any mounted ESP")
            return self._entry(directories[0], release).identity

    def guard(self, release: str, line: CommandLine) -> bool:
        """Write the entry into every ESP and make it the default."""
        changed = False
        with self._esps(writable=True) as directories:
            if not directories:
                raise BootError("no loader/entries directory on any mounted ESP")
            for directory in directories:
                new = encoded(way_back_entry(self._entry(directory, release), line))
                path = os.path.join(directory, f"{WAY_BACK}.conf")
                if content(path) != new:
                    replace_all({path: new})
                    changed = True
        if efi_text(self.roots, "LoaderEntryDefault") != f"{WAY_BACK}.conf":
            run(["bootctl", "set-default", f"{WAY_BACK}.conf"])
            changed = True
        if not self.guarded():
            raise BootError("bootctl set-default did not make the way back the default")
        return changed

    def guarded(self) -> bool:
        """Tell whether the default is the way back and its entry is on every ESP."""
        with self._esps() as directories:
            there = all(os.path.exists(os.path.join(each, f"{WAY_BACK}.conf")) for each in directories)
        return there and efi_text(self.roots, "LoaderEntryDefault") == f"{WAY_BACK}.conf"

    def line_of(self, release: str) -> Optional[CommandLine]:
        """Return the command line of the kernel's entry."""
        with self._esps() as directories:
            found = [e for each in directories for e in self._read(each) if e.release == release]
        return found[0].line if found else None

    def arm(self, release: str) -> None:
        """Set the variable that systemd-boot deletes before it boots the entry."""
        identity = self._identity(release)
        run(["bootctl", "set-oneshot", identity])
        if efi_text(self.roots, "LoaderEntryOneShot") != identity:
            raise BootError(f"bootctl set-oneshot {identity} left no variable LoaderEntryOneShot")

    def prefer(self, release: str) -> None:
        """Name the kernel in the variable."""
        run(["bootctl", "set-default", self._identity(release)])

    def promote(self, release: str) -> None:
        """Name the kernel in the variable, unless it boots without; then take the entry away."""
        identity = self._identity(release)
        run(["bootctl", "set-default", "" if self._boots_by_itself(release, identity) else identity])
        with self._esps(writable=True) as directories:
            for directory in directories:
                replace(os.path.join(directory, f"{WAY_BACK}.conf"), None)

    def _boots_by_itself(self, release: str, identity: str) -> bool:
        """Tell whether loader.conf's default, or without one the order of versions, means this kernel."""
        with self._esps() as directories:
            loader = os.path.join(os.path.dirname(directories[0]), "loader.conf")
            patterns = [
                line.split(None, 1)[1].strip()
                for line in lines(text(loader) or "")
                if line.split()[:1] == ["default"] and len(line.split()) > 1
            ]
            releases = [entry.release or "" for entry in self._read(directories[0])]
        if patterns:
            return fnmatch.fnmatch(identity, patterns[-1])
        return max(releases, key=_version, default="") == release


def way_back_entry(entry: BlsEntry, line: CommandLine) -> str:
    """Return an entry's text with another title and command line."""
    result = ""
    for each in lines(entry.with_options(line)):
        title = re.match(r"[ \t]*title[ \t]", each)
        result += f"title Way back: Linux {entry.release} as it was\n" if title else each
    return result


def _version(release: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", release)]


def running_line(roots: Roots) -> CommandLine:
    """Return the command line that the running kernel was configured with."""
    return parse(text(os.path.join(roots.procfs, "cmdline")) or "").without_loader_words()
