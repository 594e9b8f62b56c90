# SPDX-License-Identifier: GPL-3.0-or-later
"""What persisting puts on a host: the files, as text, from a policy.

Sources: sysctl.d(5), modules-load.d(5), systemd.unit(5), systemd.timer(5), udev(7).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Optional

from . import agent_archive
from .owned_files import HEADER, MARK, OwnedFile
from .persist_places import APPLY_UNIT, BY_FILE, CHECK_TIMER, CHECK_UNIT, DEVICE_UNIT, POLICY, Places

VERSION = 1

_HARDENING = """\
# Configuration space beyond its header needs CAP_SYS_ADMIN, other users' directories CAP_DAC_OVERRIDE.
CapabilityBoundingSet=CAP_SYS_ADMIN CAP_DAC_OVERRIDE
NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict
RestrictAddressFamilies=AF_UNIX
SystemCallArchitectures=native
"""

_APPLY = """\
{header}
[Unit]
Description=Apply the recorded GPU host tuning{what}
ConditionPathExists={policy}
After=systemd-modules-load.service systemd-sysctl.service tuned.service
{before}
[Service]
Type=oneshot
ExecStart={command} apply{arguments}
# 75, a play holds the journal: try again. 1 and 2 would stay as they are.
Restart=on-failure
RestartPreventExitStatus=1 2
RestartSec=5
{state}{hardening}{install}"""

_CHECK = """\
{header}
[Unit]
Description=Check the GPU host tuning against the recorded policy
ConditionPathExists={policy}

[Service]
Type=oneshot
ExecStart={command} check
Nice=10
ReadWritePaths={writable}
# No ProtectKernelTunables: a value that cannot be written is told apart from one that has drifted.
ProtectKernelModules=yes
{hardening}"""

_TIMER = """\
{header}
[Unit]
Description=Check the GPU host tuning every {minutes} minutes

[Timer]
OnBootSec=2min
OnUnitActiveSec={minutes}min
AccuracySec=30s

[Install]
WantedBy=timers.target
"""

_RULE = """\
{header}
# A driver's probe and a reset undo what was set in configuration space.
ACTION=="bind", SUBSYSTEM=="pci", {match}, \
RUN+="/usr/bin/systemctl --no-block start gpu-tuning-device@%k.service"
"""


def command(places: Places, python: str) -> str:
    """Return the agent's command line; -I keeps it to the archive and the standard library, -S off site's."""
    policy = "" if places.policy == POLICY else f" --policy {places.policy}"
    return f"{python} -IS {places.agent}{policy}"


def policy_document(
    sections: dict[str, Any],
    places: Places,
    textfile: str,
    gpus: list[str],
    directories: list[str],
) -> dict[str, Any]:
    """Return policy.json: what is to be, where, and what a check counts and an unpersist takes away."""
    return {
        "comment": f"{MARK}: changes made here are lost.",
        "version": VERSION,
        "sections": sections,
        "roots": places.as_options(),
        "textfile": textfile,
        "gpus": gpus,
        "directories": directories,
    }


def drop_in(settings: dict[str, str]) -> str:
    """Return the sysctl.d file."""
    return "\n".join([HEADER, *(f"{name} = {value}" for name, value in settings.items())]) + "\n"


def modules_load(names: Iterable[str]) -> str:
    """Return the modules-load.d file."""
    return "\n".join([HEADER, *names]) + "\n"


def udev_rule(section: dict[str, Any]) -> str:
    """Return the rule for the functions that a pcie_maxreadreq section selects."""
    return _RULE.format(header=HEADER, match=", ".join(_matches(section)))


def _matches(section: dict[str, Any]) -> list[str]:
    if section.get("devices"):
        return [f'KERNEL=="{"|".join(_full(each) for each in section["devices"])}"']
    found = [
        f'ATTR{{{name}}}=="{section[name].lower()}"' for name in ("vendor", "device") if section.get(name)
    ]
    if section.get("class"):
        found.append(f'ATTR{{class}}=="{"|".join(f"{each.lower()}*" for each in section["class"])}"')
    if section.get("driver"):
        found.append(f'DRIVER=="{section["driver"]}"')
    return found


def _full(address: str) -> str:
    return address.lower() if address.count(":") == 2 else f"0000:{address.lower()}"


def units(places: Places, python: str, minutes: int, textfile_directory: str, boot: bool) -> dict[str, str]:
    """Return {unit: text}: the check with its timer and, where ``boot`` has work, what applies."""
    common = {"header": HEADER, "policy": places.policy, "command": command(places, python)}
    apply = {**common, "hardening": _HARDENING, "state": _state(places)}
    texts = {
        CHECK_UNIT: _CHECK.format(
            # "-": it need not be there.
            writable=f"-{textfile_directory}",
            hardening=_HARDENING,
            **common,
        ),
        CHECK_TIMER: _TIMER.format(header=HEADER, minutes=minutes),
    }
    if boot:
        texts[APPLY_UNIT] = _APPLY.format(
            what="",
            arguments="",
            before="Before=lxc.service pve-guests.service docker.service\n",
            install="\n[Install]\nWantedBy=multi-user.target\n",
            **apply,
        )
        texts[DEVICE_UNIT] = _APPLY.format(
            what=" to %i", arguments=" --device %i", before="", install="", **apply
        )
    return texts


def _state(places: Places) -> str:
    """Let the service write the journal; systemd makes only what lies in /var/lib."""
    parent, name = os.path.split(places.state)
    if parent == "/var/lib":
        return f"StateDirectory={name}\nStateDirectoryMode=0700\n"
    return f"ReadWritePaths=-{places.state}\n"


def everything(
    places: Places,
    document: dict[str, Any],
    sysctls: dict[str, str],
    modules: list[str],
    python: str,
    minutes: int,
    archive: bytes,
) -> list[OwnedFile]:
    """Return every file that may be ours, in the order to write them; those without a purpose unwanted.

    ``archive`` is the agent. The policy comes first, since it names the directories that were made; what is
    enabled comes last.
    """
    sections = document["sections"]
    boot = [name for name in sections if name not in BY_FILE]
    mrrs = sections.get("pcie_maxreadreq")
    directory = document["textfile"].rpartition("/")[0]
    texts = units(places, python, minutes, directory, bool(boot))
    policy = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    return [
        OwnedFile(places.policy, policy, private=True),
        OwnedFile(places.agent, archive, private=True, mode=0o755, same=agent_archive.same),
        _text(places.drop_in, drop_in(sysctls) if sysctls else None),
        _text(places.modules, modules_load(modules) if modules else None),
        *(
            _text(places.unit(name), texts.get(name))
            for name in (APPLY_UNIT, DEVICE_UNIT, CHECK_UNIT, CHECK_TIMER)
        ),
        _text(places.udev_rule, udev_rule(mrrs) if mrrs else None),
        _enabled(places, APPLY_UNIT, "multi-user.target", bool(boot)),
        _enabled(places, CHECK_TIMER, "timers.target", True),
    ]


def nothing(places: Places, textfile: str) -> list[OwnedFile]:
    """Return every file that may be ours as unwanted, in the order to remove them."""
    plain = [
        places.udev_rule,
        *(places.unit(name) for name in (CHECK_TIMER, CHECK_UNIT, DEVICE_UNIT, APPLY_UNIT)),
        places.modules,
        places.drop_in,
        # Written by the check; left behind it would be scraped for ever.
        textfile,
    ]
    return [
        _enabled(places, CHECK_TIMER, "timers.target", False),
        _enabled(places, APPLY_UNIT, "multi-user.target", False),
        *(OwnedFile(path, wanted=False) for path in plain),
        OwnedFile(places.agent, wanted=False, private=True),
        # Last: it names what else is to be taken away, should this be interrupted.
        OwnedFile(places.policy, wanted=False, private=True),
    ]


def _text(path: str, text: Optional[str]) -> OwnedFile:
    return OwnedFile(path, (text or "").encode(), wanted=text is not None)


def _enabled(places: Places, unit: str, target: str, wanted: bool) -> OwnedFile:
    return OwnedFile(places.enabled(unit, target), target=f"/etc/systemd/system/{unit}", wanted=wanted)
