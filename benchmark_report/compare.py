# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare two measurements so that noise is not called an improvement.

The unit of replication is the run. The interval is Welch's on logarithms below ten runs per arm and a
percentile bootstrap of the ratio of medians from there on (at n=3 a bootstrap is wrong in 7 to 11 % of
cases). A verdict needs all of: an interval that excludes 1, Welch's p after Holm's correction over the
headline metrics, an exact rank test, and an effect of at least max(floor, 2 x CV). "No change" needs the
whole interval inside the floor; everything else is "inconclusive", and says how many runs would tell.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Optional

import numpy as np
from scipy import stats

from .metrics import Metric, metrics

IMPROVED, REGRESSED, NO_CHANGE, INCONCLUSIVE = "improved", "regressed", "no change", "inconclusive"
ALPHA = 0.05
BOOTSTRAP_FROM = 10
RESAMPLES = 4000
_POWER = float((stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(0.8)) ** 2)


@dataclasses.dataclass
class Comparison:
    """One metric in two arms. ``ratio`` is after / before, ``interval`` at 95 %, None for single runs."""

    metric: Metric
    before: list[float]
    after: list[float]
    ratio: float
    interval: Optional[tuple[float, float]]
    p: Optional[float]
    p_exact: Optional[float]
    p_adjusted: Optional[float]
    least_effect: float
    verdict: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        own = {key: value for key, value in vars(self).items() if key != "metric"}
        named = ("id", "section", "family", "label", "unit", "higher_is_better", "headline", "level", "floor")
        medians = {
            "before_median": statistics.median(self.before),
            "after_median": statistics.median(self.after),
        }
        return {**{key: getattr(self.metric, key) for key in named}, **own, **medians}


def variation(samples: list[float]) -> float:
    """Return the coefficient of variation, 0 for a single run."""
    return statistics.stdev(samples) / statistics.mean(samples) if len(samples) > 1 else 0.0


def interval_and_p(before: list[float], after: list[float]) -> tuple[tuple[float, float], float]:
    """Return the 95 % interval of after / before and Welch's p on logarithms; both arms need two runs."""
    one, other = np.log(before), np.log(after)
    ratio = statistics.median(after) / statistics.median(before)
    if np.ptp(one) == 0 and np.ptp(other) == 0:  # a machine without noise: the ratio is what it is
        return (ratio, ratio), 1.0 if ratio == 1 else 0.0
    test = stats.ttest_ind(other, one, equal_var=False)
    if min(len(before), len(after)) < BOOTSTRAP_FROM:
        bounds = test.confidence_interval(1 - ALPHA)
        return (math.exp(bounds.low), math.exp(bounds.high)), float(test.pvalue)
    drawn = stats.bootstrap(
        (np.asarray(before), np.asarray(after)),
        lambda x, y, axis: np.median(y, axis=axis) / np.median(x, axis=axis),
        method="percentile", n_resamples=RESAMPLES, vectorized=True, rng=np.random.default_rng(0),
    )  # fmt: skip
    low, high = drawn.confidence_interval
    return (float(low), float(high)), float(test.pvalue)


def exact_p(before: list[float], after: list[float]) -> float:
    """Return the exact two-sided rank test's p; ties make it a permutation test of the mean logarithm."""
    if len(set(before + after)) == len(before) + len(after):
        return float(stats.mannwhitneyu(before, after, method="exact").pvalue)
    test = stats.permutation_test(
        (np.log(before), np.log(after)),
        lambda x, y, axis: np.mean(y, axis=axis) - np.mean(x, axis=axis),
        vectorized=True, n_resamples=20000, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


def holm(values: list[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def runs_needed(cv: float, effect: float) -> int:
    """Return the runs per arm that see an effect of this size in four of five tries."""
    return max(5, math.ceil(2 * _POWER * (cv / effect) ** 2) + 1)


def _single(metric: Metric, before: list[float], after: list[float]) -> str:
    ratio = statistics.median(after) / statistics.median(before)
    text = f"{len(before)} and {len(after)} runs: a single run is never significant"
    many = before if len(before) > 1 else after if len(after) > 1 else []
    lone = after if many is before else before
    if not many:
        return f"{text}; the ratio {ratio:.2f} is what was seen once"
    inside = min(many) <= lone[0] <= max(many)
    return f"{text}; it is {'inside' if inside else 'outside'} the spread of the other arm's runs"


def percent(ratio: float) -> str:
    """Return a ratio as a signed change in percent."""
    change = round(100 * (ratio - 1), 1)
    return f"{change:+.1f} %" if change else "0.0 %"


def compare_metric(metric: Metric, before: list[float], after: list[float]) -> Comparison:
    """Return the comparison before the correction for multiple tests; see ``judge``."""
    ratio = statistics.median(after) / statistics.median(before)
    cv = max(variation(before), variation(after))
    least = max(metric.floor, 2 * cv)
    base = Comparison(metric, before, after, ratio, None, None, None, None, least, INCONCLUSIVE, "")
    if min(len(before), len(after)) < 2:
        base.reason = _single(metric, before, after)
        return base
    base.interval, base.p = interval_and_p(before, after)
    base.p_exact = exact_p(before, after)
    return base


def judge(found: Comparison) -> None:
    """Set verdict and reason; ``p_adjusted`` is set by now for every headline metric."""
    if found.interval is None or found.p is None or found.p_exact is None:
        return
    low, high = found.interval
    floor = found.metric.floor
    said = f"{percent(found.ratio)}, 95 % interval {percent(low)} to {percent(high)}"
    p = found.p if found.p_adjusted is None else found.p_adjusted
    if 1 - floor <= low and high <= 1 + floor:
        found.verdict, found.reason = NO_CHANGE, f"{said}: inside the floor of {100 * floor:g} %"
        return
    outside = not low <= 1 <= high
    enough = abs(found.ratio - 1) >= found.least_effect
    if outside and enough and p < ALPHA and found.p_exact < ALPHA:
        better = (found.ratio > 1) == found.metric.higher_is_better
        found.verdict = IMPROVED if better else REGRESSED
        found.reason = f"{said}, p {p:.3g} after correction, exact test p {found.p_exact:.3g}"
        return
    found.reason = f"{said}: {_doubt(found, outside, enough, p)}"


def _doubt(found: Comparison, outside: bool, enough: bool, p: float) -> str:
    cv = max(variation(found.before), variation(found.after))
    if not outside:
        wanted = runs_needed(cv, found.metric.floor)
        floor = f"{100 * found.metric.floor:g} %"
        return f"it holds 1 and reaches beyond the floor; about {wanted} runs per arm would see {floor}"
    if not enough:
        return (
            f"less than the least effect of {100 * found.least_effect:.1f} % that this noise allows to call"
        )
    runs = min(len(found.before), len(found.after))
    if found.p_exact is not None and found.p_exact >= ALPHA:
        return f"the exact test (p {found.p_exact:.3g}) does not confirm it with {runs} runs per arm"
    return f"p {p:.3g} after the correction for several tests"


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Comparison]:
    """Return the comparison of every metric that both measurements have, headline metrics first."""
    old, new = metrics(before), metrics(after)
    found = [compare_metric(new[name], old[name].samples, new[name].samples) for name in new if name in old]
    for section in ("fabric", "inference"):
        family = [
            one
            for one in found
            if one.metric.headline and one.metric.section == section and one.p is not None
        ]
        for one, adjusted in zip(family, holm([one.p for one in family if one.p is not None])):
            one.p_adjusted = adjusted
    for one in found:
        judge(one)
    return sorted(found, key=lambda one: (one.metric.section, not one.metric.headline))
