"""How small a change each rule of a candidate would have found tonight, at its worst scope.

`baselines/power.py` has the arithmetic. What an unchanged night reads is the baseline's value for a
rule on a baseline, and tonight's value for every other rule.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantwatch.alerts.changes import allowed_by, comparison_of
from quantwatch.alerts.estimated import margin
from quantwatch.alerts.limits import Limits, NoiseFloor, floor_of, limits_of
from quantwatch.alerts.readings import Reading, readings, sign
from quantwatch.alerts.words import number
from quantwatch.baselines.power import POWER, fixed_effort, paired_effort
from quantwatch.config.rules import COUNTED, RuleConfig
from quantwatch.domain import (
    MIN_SAMPLES,
    NO_BASELINE,
    CandidateResult,
    Comparison,
    Detectable,
    Scope,
)
from quantwatch.metrics.registry import METRICS

_NOTHING = "nothing was measured where the rule looks"
_NO_LIMIT = {
    "baseline": "the baseline has no value to compare with",
    "median_ratio": "no whole layer was measured, so there is no median",
    "absolute": _NOTHING,
}


@dataclass(frozen=True, slots=True)
class Family:
    """Among how many comparisons a run decides, and at what rate of false discoveries."""

    num_judged: int
    rate: float


class _At(NamedTuple):
    """What one scope takes. Where no change would be found `change` is None; `reason` says why."""

    scope: Scope
    expected: float | None
    limit: float | None
    change: float | None
    reason: str = ""


def detectable(
    candidate: CandidateResult,
    rules: Sequence[RuleConfig],
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None,
    family: Family,
) -> tuple[Detectable, ...]:
    """Return one record per rule that is enabled and measures something, in the rules' order."""
    judge = _Judge(candidate, noise_floor, baseline, family)
    chosen = (rule for rule in rules if rule.enabled and rule.metric not in COUNTED)
    return tuple(_of_rule(rule, judge) for rule in chosen)


def _of_rule(rule: RuleConfig, judge: "_Judge") -> Detectable:
    if rule.kind == "baseline" and (judge.baseline is None or not judge.baseline.measurements):
        return _record(rule, [], NO_BASELINE)
    at = judge.of(rule)
    known = [r for r in readings(judge.candidate, rule) if not r.is_missing]
    found = [each for reading in known if (each := _effort_at(rule, reading, at)) is not None]
    return _record(rule, found, _NO_LIMIT[rule.kind] if known else _NOTHING)


def _effort_at(
    rule: RuleConfig, reading: Reading, of: Callable[[Reading], _At | None]
) -> _At | None:
    """Return the effort at a reading: none where values that never pass decide already."""
    if not reading.num_bad:
        return of(reading)
    expected = reading.value if reading.value is not None and math.isfinite(reading.value) else None
    if rule.non_finite == "breach":
        return _At(reading.scope, expected, None, 0.0)
    return _At(reading.scope, expected, None, None, "values that aren't finite: it can't decide")


def _record(rule: RuleConfig, found: Sequence[_At], nothing: str) -> Detectable:
    worst = max(found, key=_need, default=_At(Scope(""), None, None, None, nothing))
    return Detectable(
        rule=rule.name,
        metric=rule.metric,
        statistic=rule.statistic,
        scope=worst.scope or None,
        num_scopes=len(found),
        expected=worst.expected,
        limit=worst.limit,
        value=worst.change,
        power=POWER,
        reason=worst.reason,
    )


def _need(at: _At) -> float:
    return math.inf if at.change is None else at.change


@dataclass(frozen=True, slots=True)
class _Judge:
    """What a candidate's rules judge by."""

    candidate: CandidateResult
    floor: NoiseFloor
    baseline: CandidateResult | None
    family: Family

    def of(self, rule: RuleConfig) -> Callable[[Reading], _At | None]:
        """Return how the effort at a reading is found; None there: the rule sets it no limit."""
        known = limits_of(self.candidate, rule, self.floor, self.baseline)
        return lambda reading: self._at(known, reading)

    def _at(self, known: Limits, reading: Reading) -> _At | None:
        rule, scope = known.rule, reading.scope
        if rule.kind == "baseline":
            comparison = comparison_of(rule, scope, self.baseline)
            if comparison is not None:
                return self._paired(rule, comparison)
        # A layer that gets worse than the others moves the median that it is held against.
        limit = known.at(reading, as_worst=True)
        if limit is None:
            return None
        if rule.kind == "absolute":
            return self._absolute(rule, reading, limit.threshold)
        if rule.kind == "baseline":
            return self._fixed(rule, scope, known.before[scope], limit.threshold)
        if not math.isfinite(limit.threshold):
            few = "too few layers: a worse one is the median itself"
            return _At(scope, reading.value, None, None, few)
        return self._fixed(rule, scope, reading.value, limit.threshold)

    def _absolute(self, rule: RuleConfig, reading: Reading, limit: float) -> _At:
        if METRICS[rule.source].estimated:
            beyond = margin(self.candidate, reading.scope)
            if beyond is None:
                return _At(reading.scope, reading.value, limit, None, "no exact sample supports it")
            limit += sign(rule) * beyond
        return self._fixed(rule, reading.scope, reading.value, limit)

    def _fixed(self, rule: RuleConfig, scope: Scope, expected: float | None, limit: float) -> _At:
        if expected is None or not math.isfinite(expected):
            return _At(scope, None, limit, None, "what was measured is not finite")
        noise = floor_of(rule, scope, self.floor)
        change = fixed_effort(sign(rule) * (limit - expected), noise)
        return _At(scope, expected, limit, change)

    def _paired(self, rule: RuleConfig, comparison: Comparison) -> _At:
        scope, expected, se = comparison.scope, comparison.baseline, comparison.se
        allowed = allowed_by(rule, comparison, self.floor)
        if comparison.lost:
            count = len(comparison.lost)
            return _At(
                scope,
                _finite(expected),
                None,
                None,
                f"{count} prompts have values in only one of the runs",
            )
        if not comparison.is_enough:
            missing = MIN_SAMPLES - comparison.num_prompts
            few = f"too few prompts ({comparison.num_prompts}): {missing} more needed"
            return _At(scope, _finite(expected), None, None, few)
        if not all(map(math.isfinite, (expected, se, allowed))):
            words = f"the baseline's {number(expected)} and its error {number(se)} give no limit"
            return _At(scope, _finite(expected), None, None, words)
        family = self.family
        effort = paired_effort(
            allowed, se, comparison.num_prompts, max(1, family.num_judged), family.rate
        )
        return _At(scope, expected, expected + sign(rule) * effort.limit, effort.change)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
