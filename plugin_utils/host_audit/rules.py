# SPDX-License-Identifier: GPL-3.0-or-later
"""Load rule files, and say in one sentence what is wrong with one.

A rule file is YAML: ``topic`` and a list of ``rules``. roles/host_audit/rules/README.md explains each field;
roles/host_audit/files/rules.schema.json is the same for machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import yaml

Rule = dict[str, Any]

#: The safe loader in C where PyYAML has it: eight times faster, and each host's rules are read anew.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

SEVERITIES = ("P0", "P1", "P2", "info")
FIXES = ("runtime", "reboot", "firmware")
REQUIRED = (
    "id",
    "title",
    "severity",
    "when",
    "evidence",
    "remedy",
    "fix",
    "effect",
    "will_not",
    "cost",
    "source",
)
OPTIONAL = ("for_each", "target", "applies", "not_applicable", "desired", "found", "status", "proof")


class RuleError(Exception):
    """A rule that cannot be used: file, rule and cause in one sentence."""


def load(folders: Iterable[str], skip: Iterable[str] = ()) -> list[Rule]:
    """Return the rules of every *.yml in the folders, each with its ``topic``; ids in ``skip`` are left out.

    Raises RuleError for a file that is no rule file, and for an id that is there twice.
    """
    found: dict[str, Rule] = {}
    for folder in folders:
        for name in _rule_files(folder):
            for rule in _load_file(os.path.join(folder, name)):
                if rule["id"] in found:
                    raise RuleError(
                        f"{rule['file']}: the rule {rule['id']} is also in {found[rule['id']]['file']}"
                    )
                found[rule["id"]] = rule
    _check_skipped(found, skip)
    return [rule for ident, rule in found.items() if ident not in set(skip)]


def _rule_files(folder: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".yml", ".yaml")))
    except OSError as error:
        raise RuleError(f"the rules directory {folder} cannot be read: {error.strerror}") from error
    return names


def _load_file(path: str) -> list[Rule]:
    try:
        with open(path, encoding="utf-8") as handle:
            content = yaml.load(handle, Loader=_LOADER)
    except (OSError, yaml.YAMLError) as error:
        raise RuleError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rules"), list) or "topic" not in content:
        raise RuleError(f"{path} needs a topic and a list of rules")
    return [_checked(rule, str(content["topic"]), path) for rule in content["rules"]]


def _checked(rule: Any, topic: str, path: str) -> Rule:
    if not isinstance(rule, dict):
        raise RuleError(f"{path}: a rule is a mapping, not {type(rule).__name__}")
    name = rule.get("id", "without an id")
    missing = [field for field in REQUIRED if field not in rule]
    unknown = [field for field in rule if field not in REQUIRED + OPTIONAL]
    if missing or unknown:
        cause = f"lacks {', '.join(missing)}" if missing else f"has the unknown field {unknown[0]}"
        raise RuleError(f"{path}: the rule {name} {cause}")
    if rule["severity"] not in SEVERITIES or rule["fix"] not in FIXES:
        raise RuleError(f"{path}: the rule {name} needs a severity of {SEVERITIES} and a fix of {FIXES}")
    return {**rule, "topic": topic, "file": path}


def _check_skipped(found: dict[str, Rule], skip: Iterable[str]) -> None:
    unknown = [ident for ident in skip if ident not in found]
    if unknown:
        raise RuleError(f"host_audit_skip_rules names {unknown[0]}, which no rule file has")
