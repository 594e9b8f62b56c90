# SPDX-License-Identifier: GPL-3.0-or-later
"""Who else sets a host up: TuneD and its like, and the sysctl.d files of Proxmox and of cloud images.

Sources: tuned.conf(5), tuned-main.conf(5), tuned-profiles(7); the package lists of pve-manager,
pve-container, cloud-init and Google's guest configuration.
"""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Optional

from . import sysctl_d
from .kernel_files import read_line, read_text
from .persist_places import DROP_IN, Places

#: Units that set governors, idle states or sysctls of their own accord.
UNITS = (
    "tuned",
    "power-profiles-daemon",
    "tlp",
    "auto-cpufreq",
    "cpufrequtils",
    "cpupower",
    "ktune",
    "nvidia-persistenced",
)
#: Whose a sysctl.d file is, by its name.
_OWNERS = (
    (re.compile(r"(^|[-_])pve([-_.]|$)|proxmox"), "Proxmox"),
    (re.compile(r"cloudimg|cloud-init|gce|google|amazon|aws|azure|hetzner|digitalocean"), "a cloud image"),
    (re.compile(r"^99-sysctl\.conf$"), "the administrator (/etc/sysctl.conf)"),
)
_PROFILE_FOLDERS = ("tuned", "tuned/profiles")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A value that a TuneD profile sets: section of the profile, key, value, file and line."""

    section: str
    key: str
    value: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class Tuned:
    """TuneD's active profiles, whether it lets sysctl.d have the last word, and what they set."""

    profile: str
    starts: bool
    reapply_sysctl: bool
    assignments: tuple[Assignment, ...]

    def sets(self, section: str, key: str) -> Optional[Assignment]:
        """Return what the profile sets a key to, the last one of several."""
        found = [each for each in self.assignments if (each.section, each.key) == (section, key)]
        return found[-1] if found else None


def tuned(places: Places) -> Optional[Tuned]:
    """Return TuneD as it is set up, None without an active profile."""
    profile = read_line(os.path.join(places.etc, "tuned/active_profile"))
    if not profile:
        return None
    main = _ini(os.path.join(places.etc, "tuned/tuned-main.conf"), "main")
    # On by default; switches as TuneD's own configuration parser reads them.
    reapply = main.get("reapply_sysctl", "1").strip().lower() in ("1", "true", "yes", "y", "t")
    assignments: list[Assignment] = []
    for name in profile.split():
        assignments += _profile(places, name, ())
    return Tuned(profile, "tuned" in enabled_units(places), reapply, tuple(assignments))


def _ini(path: str, section: str) -> dict[str, str]:
    """Return a section of a file that may have options before its first header."""
    parser = configparser.ConfigParser(interpolation=None, strict=False, default_section="\0")
    try:
        parser.read_string(f"[{section}]\n{read_text(path)}")
    except (OSError, configparser.Error):
        return {}
    return dict(parser[section])


def _profile(places: Places, name: str, seen: tuple[str, ...]) -> list[Assignment]:
    """Return a profile's assignments after those of the profiles it includes."""
    path = _profile_file(places, name)
    if path is None or name in seen:
        return []
    own: list[Assignment] = []
    included: list[Assignment] = []
    section = ""
    for number, raw in enumerate(read_text(path).splitlines(), 1):
        line = raw.strip()
        if line.startswith("["):
            section = line.strip("[]")
        elif line and line[0] not in "#;" and "=" in line:
            key, value = (part.strip() for part in line.split("=", 1))
            if (section, key) == ("main", "include"):
                for each in re.split(r"[\s,;]+", value):
                    included += _profile(places, each, (*seen, name))
            else:
                key = sysctl_d.key_path(key) if section == "sysctl" else key
                own.append(Assignment(section, key, value.strip('"'), path, number))
    return included + own


def _profile_file(places: Places, name: str) -> Optional[str]:
    if not re.match(r"[\w.+-]+\Z", name) or name.startswith("."):
        return None
    bases = (places.etc, os.path.join(places.usr, "lib"))
    candidates = (
        os.path.join(base, folder, name, "tuned.conf")
        for base in bases
        for folder in reversed(_PROFILE_FOLDERS)
    )
    return next((path for path in candidates if os.path.isfile(path)), None)


def enabled_units(places: Places) -> set[str]:
    """Return UNITS that a target wants, without ".service"; a masked one is not."""
    base = os.path.join(places.etc, "systemd/system")
    wanted = set()
    for folder in _names(base):
        if folder.endswith((".wants", ".requires")):
            wanted |= {name.partition(".service")[0] for name in _names(os.path.join(base, folder))}
    return {
        unit
        for unit in wanted.intersection(UNITS)
        if os.path.realpath(os.path.join(base, f"{unit}.service")) != "/dev/null"
    }


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def named(places: Places, sysctls: Iterable[str]) -> list[str]:
    """Return one sentence per program or file that sets up what we set up, too."""
    sentences = []
    active = tuned(places)
    units = enabled_units(places)
    if active:
        order = (
            "sysctl.d is applied again after its profile"
            if active.reapply_sysctl
            else "reapply_sysctl is off, so its profile's sysctls replace those of sysctl.d"
        )
        starts = "starts at boot" if active.starts else "does not start at boot"
        sentences.append(f"tuned {starts} with profile {active.profile}: {order}")
    sentences += [f"{unit} starts at boot" for unit in sorted(units - {"tuned"})]
    return sentences + _sysctl_files(places, sysctls)


def _sysctl_files(places: Places, sysctls: Iterable[str]) -> list[str]:
    assignments, unreadable = sysctl_d.read(places.sysctl_directories())
    keys: dict[str, list[str]] = {}
    for name in sysctls:
        for each in sysctl_d.setters(assignments, name):
            keys.setdefault(each.file, []).append(f"{name} = {each.value} (line {each.line})")
    sentences = [
        f"{path}{_owner(path)} sets {', '.join(found)}"
        for path, found in keys.items()
        if os.path.basename(path) != DROP_IN
    ]
    sentences += [
        f"{path}{_owner(path)} sets none of our keys"
        for path in sysctl_d.config_files(places.sysctl_directories())
        if path not in keys and _owner(path)
    ]
    return sentences + [f"{path} cannot be read" for path in unreadable]


def _owner(path: str) -> str:
    name = os.path.basename(path)
    return next((f" of {owner}" for pattern, owner in _OWNERS if pattern.search(name)), "")
