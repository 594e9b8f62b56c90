# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the rules about a host's facts: conditions are Jinja expressions in a sandbox, over the facts.

A condition that reads a fact nobody could read has no answer: the rule's outcome is "unknown" with that
fact's reason. One that reads what this host has not makes the rule "not_applicable", with that reason. A
name that no host's facts have (a typing mistake) is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

import jinja2
import jinja2.meta
import jinja2.sandbox

from .rules import SEVERITIES, Rule, RuleError

FINDING, CLEAR, NOT_APPLICABLE, UNKNOWN = "finding", "clear", "not_applicable", "unknown"

#: What a rule says about itself, carried into each of its rows.
CARRIED = ("title", "severity", "topic", "remedy", "effect", "will_not", "cost", "source")


class UnknownFact(Exception):
    """A null fact was read; the message says why it is null, ``outcome`` what that makes of the rule."""

    def __init__(self, reason: str, outcome: str) -> None:
        """Keep the outcome beside the reason."""
        super().__init__(reason)
        self.outcome = outcome


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What gpu_host_facts returned: JSON-ready facts, and the reasons of their nulls by path."""

    facts: dict[str, Any]
    unknown: dict[str, str]
    absent: dict[str, str]


class FactEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja over one host's facts. ``strict``: reading a null that has a reason raises UnknownFact.

    Dictionary entries come before methods, so that ``item.copy`` is a fact and never dict.copy.
    """

    def __init__(self, strict: bool) -> None:
        """Start without facts; ``use`` gives them."""
        super().__init__(undefined=jinja2.StrictUndefined, autoescape=False, finalize=_shown)
        self._host = HostFacts({}, {}, {})
        self._strict = strict
        self._places: dict[int, str] = {}
        self.filters.update(FILTERS)
        self.globals["known"] = self.known

    def use(self, host: HostFacts) -> None:
        """Take a host's facts, and remember where in them each container is."""
        self._host = host
        self._places = dict(_places(host.facts, "")) if self._strict else {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an entry or attribute; see the class."""
        if isinstance(obj, dict) and attribute in obj:
            return self._entry(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an entry by key or index; see the class."""
        if isinstance(obj, dict) and argument in obj:
            return self._entry(obj, argument)
        return super().getitem(obj, argument)

    def _entry(self, obj: dict[str, Any], name: str) -> Any:
        value = obj[name]
        if value is None and self._strict:
            self.check(self._places.get(id(obj)), name)
        return value

    def known(self, path: str) -> bool:
        """Tell whether the fact at a dotted path could be read."""
        return path not in self._host.unknown and path not in self._host.absent

    def check(self, place: Optional[str], name: str) -> None:
        """Raise UnknownFact if the null at place.name has a reason."""
        path = f"{place}.{name}" if place else name
        if place is not None and path in self._host.unknown:
            raise UnknownFact(self._host.unknown[path], UNKNOWN)
        if place is not None and path in self._host.absent:
            raise UnknownFact(self._host.absent[path], NOT_APPLICABLE)


def _places(value: Any, path: str) -> Iterator[tuple[int, str]]:
    if isinstance(value, (dict, list)):
        yield id(value), path
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(part, f"{path}.{key}" if path else str(key))


def _shown(value: Any) -> Any:
    return "unknown" if value is None else value


def clean(text: str) -> str:
    """Return text in one line without control characters: facts come from hosts we do not trust."""
    return re.sub(r"[^\x20-\x7e\xa0-\u2027\u202f-\ud7ff\uf900-\uffef]+", " ", text).strip()


def gib(size: float) -> str:
    """Return bytes as "128 GiB" or "256 MiB"."""
    mib = size / (1 << 20)
    return f"{mib:.0f} MiB" if mib < 1024 else f"{round(mib / 1024, 1):g} GiB"


def _numbers(ranges: str) -> list[int]:
    numbers: list[int] = []
    for part in str(ranges).split(","):
        first, _dash, last = part.partition("-")
        if first.strip().isdigit():
            numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


#: What rules have besides Jinja's own filters.
FILTERS: dict[str, Callable[..., Any]] = {"gib": gib, "numbers": _numbers, "clean": clean}


def _cannot(rule: Rule, error: Exception) -> RuleError:
    return RuleError(f"{rule['file']}: the rule {rule['id']} cannot be evaluated: {error}")


class Evaluator:
    """Evaluates rules over hosts' facts; each expression is compiled once."""

    def __init__(self) -> None:
        """Start without facts."""
        self._strict = FactEnvironment(strict=True)
        self._lenient = FactEnvironment(strict=False)
        self._names: dict[str, Any] = {}
        self._expressions: dict[str, tuple[set[str], Callable[..., Any]]] = {}
        self._templates: dict[str, jinja2.Template] = {}

    def compile(self, rules: Iterable[Rule]) -> None:
        """Compile all that the rules hold, so that a later question finds it compiled."""
        for rule in rules:
            try:
                for field in ("for_each", "applies", "when"):
                    self._compiled(str(rule.get(field, True)))
                for field in ("target", "evidence", "found", "desired"):
                    self._template(str(rule.get(field, "")))
            except jinja2.TemplateError as error:
                raise _cannot(rule, error) from error

    def rows(self, rules: Iterable[Rule], host: HostFacts) -> list[dict[str, Any]]:
        """Return findings, worst first, then one row for each rule that found nothing."""
        found = [row for rule in rules for row in self.rule_rows(rule, host)]
        order = {FINDING: 0, UNKNOWN: 1, CLEAR: 2, NOT_APPLICABLE: 3}
        return sorted(found, key=lambda row: (order[row["outcome"]], SEVERITIES.index(row["severity"])))

    def rule_rows(self, rule: Rule, host: HostFacts) -> list[dict[str, Any]]:
        """Return one row per finding; else a single row that says clear, unknown or not applicable.

        Raises RuleError for an expression that cannot be evaluated.
        """
        self._use(host)
        try:
            items = self._items(rule)
            outcomes = [self._outcome(rule, item) for item in items]
            return self._summary(rule, outcomes)
        except UnknownFact as reason:
            return [self._row(rule, {}, reason.outcome, str(reason))]
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _cannot(rule, error) from error

    def _use(self, host: HostFacts) -> None:
        if self._names is not host.facts:
            self._names = host.facts
            self._strict.use(host)
            self._lenient.use(host)

    def _summary(self, rule: Rule, outcomes: list[tuple[Any, str, str]]) -> list[dict[str, Any]]:
        findings = [self._row(rule, item, kind, reason) for item, kind, reason in outcomes if kind == FINDING]
        unknown = [reason for _item, kind, reason in outcomes if kind == UNKNOWN]
        if unknown:
            count = f"{len(unknown)} of {len(outcomes)}: " if len(outcomes) > 1 else ""
            findings.append(self._row(rule, {}, UNKNOWN, count + unknown[0]))
        if findings:
            return findings
        if any(kind == CLEAR for _item, kind, _reason in outcomes):
            return [self._row(rule, {}, CLEAR, None)]
        reasons = [reason for _item, _kind, reason in outcomes if reason]
        why = rule.get("not_applicable") or next(iter(reasons), "there is nothing of the kind on this host")
        return [self._row(rule, {}, NOT_APPLICABLE, str(why))]

    def _items(self, rule: Rule) -> list[dict[str, Any]]:
        """Return the names each evaluation adds: ``item`` for a rule with for_each."""
        if "for_each" not in rule:
            return [{}]
        return [{"item": item} for item in self._value(rule["for_each"], {}) or []]

    def _outcome(self, rule: Rule, item: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
        try:
            if "applies" in rule and not self._value(rule["applies"], item):
                return item, NOT_APPLICABLE, ""
            if not self._value(rule["when"], item):
                return item, CLEAR, ""
        except UnknownFact as reason:
            return item, reason.outcome, str(reason)
        return item, FINDING, self._text(rule["evidence"], item)

    def _value(self, expression: Any, item: dict[str, Any]) -> Any:
        """Return the value of an expression; a fact that is itself unknown has no value."""
        names, value = self._compiled(str(expression))
        known = {**self._names, **item}
        for name in names:
            if known.get(name, "") is None:
                self._strict.check("", name)
        return value(**known)

    def _compiled(self, expression: str) -> tuple[set[str], Callable[..., Any]]:
        """Return (facts an expression names, the expression as a function); compiled once for all items."""
        if expression not in self._expressions:
            names = jinja2.meta.find_undeclared_variables(self._strict.parse("{{ " + expression + " }}"))
            value = self._strict.compile_expression(expression, undefined_to_none=False)
            self._expressions[expression] = (names, value)
        return self._expressions[expression]

    def _text(self, template: Any, item: dict[str, Any]) -> str:
        return clean(self._template(str(template)).render({**self._names, **item}))

    def _template(self, text: str) -> jinja2.Template:
        if text not in self._templates:
            self._templates[text] = self._lenient.from_string(text)
        return self._templates[text]

    def _row(self, rule: Rule, item: dict[str, Any], outcome: str, reason: Optional[str]) -> dict[str, Any]:
        """Return a setting row with what the rule adds to it."""
        found = outcome == FINDING
        default = "{{ item.address }}" if "address" in item.get("item", {}) else ""
        target = self._text(rule.get("target", default), item) if found else ""
        status = {FINDING: rule.get("status", "would_change"), CLEAR: "ok"}.get(outcome, "not_applicable")
        return {
            "id": f"finding:{rule['id']}" + (f":{target}" if target else ""),
            "kind": "finding",
            "target": target,
            "before": self._text(rule["found"], item) if found and "found" in rule else None,
            "desired": self._text(rule["desired"], item) if found and "desired" in rule else None,
            "after": None,
            "status": status,
            "reason": clean(reason) if reason else None,
            "fix": rule["fix"],
            "rule": rule["id"],
            "outcome": outcome,
            **{name: " ".join(str(rule[name]).split()) for name in CARRIED},
        }
