"""Rule evaluation: measurements and rules in, alerts out. Nothing else is looked at.

A non-finite value never passes: a rule that meets one breaches, whatever its threshold, unless the
rule leaves that to the rule `nonfinite`. What could not be measured gives an alert of the kind
`missing`, what is not clear one of the kind `inconclusive`; both make the verdict inconclusive.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from quantwatch.alerts.changes import Change, Finding, comparison_of, weigh
from quantwatch.alerts.drift import drift_alert
from quantwatch.alerts.estimated import unsupported
from quantwatch.alerts.limits import Limit, NoiseFloor, limits_of
from quantwatch.alerts.nonfinite import nonfinite_alert
from quantwatch.alerts.readings import Reading, readings, sign
from quantwatch.alerts.words import kind_sign, number, title
from quantwatch.config.rules import COUNTED, DRIFT, RuleConfig
from quantwatch.domain import MODEL, Alert, CandidateResult, Scope, Severity

MOST_MISSING = 0.01
"""Share of the positions that may be missing where a rule passes: the others stand for them."""


def evaluate(
    candidate: CandidateResult,
    rules: Sequence[RuleConfig],
    *,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None = None,
) -> tuple[Alert, ...]:
    """Return one alert per rule and scope that breaches or is not clear, critical ones first.

    Rules of kind `baseline` are silent without a baseline, and when the candidate could not be
    measured in it. A `Baseline` brings paired tests; they decide wherever there is one.
    """
    before = baseline if baseline is not None and baseline.measurements else None
    alerts = [
        alert
        for rule in rules
        if rule.enabled and (rule.kind != "baseline" or before is not None)
        for alert in _evaluate_rule(candidate, rule, noise_floor, before)
    ]
    return tuple(sorted(alerts, key=lambda alert: alert.severity != Severity.CRITICAL))


def _evaluate_rule(
    candidate: CandidateResult,
    rule: RuleConfig,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None,
) -> Iterator[Alert]:
    if rule.metric in COUNTED:
        yield from (drift_alert if rule.metric == DRIFT else nonfinite_alert)(candidate, rule)
        return
    found = list(readings(candidate, rule))
    limits = limits_of(candidate, rule, noise_floor, baseline)
    if all(reading.is_missing for reading in found):
        yield _missing(candidate, rule)
    for reading in found:
        if reading.is_missing:
            continue
        if reading.num_bad and rule.non_finite != "ignore":
            yield _not_finite(candidate, rule, reading, limits.at(reading))
            continue
        change = _change(rule, reading, noise_floor, baseline)
        if change is not None:
            alerts = [*_judge_change(candidate, rule, reading, change)]
        else:
            alerts = [*_judge(candidate, rule, reading, limits.at(reading))]
        yield from alerts or _incomplete(candidate, rule, reading)


def _change(
    rule: RuleConfig, reading: Reading, noise_floor: NoiseFloor, before: CandidateResult | None
) -> Change | None:
    """Return the paired change of a reading, None when its rule or baseline has none."""
    if rule.kind != "baseline":
        return None
    comparison = comparison_of(rule, reading.scope, before)
    return None if comparison is None else weigh(rule, comparison, noise_floor)


def _judge(
    candidate: CandidateResult, rule: RuleConfig, reading: Reading, limit: Limit | None
) -> Iterator[Alert]:
    """Yield the alert of a reading that breaches. A baseline without the value sets no limit."""
    if limit is not None and reading.value is not None and _beyond(rule, reading.value, limit):
        doubt = unsupported(candidate, reading, limit)
        words = f"{_said(rule, reading)}{limit.words}{doubt or ''}"
        found = _alert(candidate, rule, reading, limit, words)
        yield found if doubt is None else _undecided(found)


def _judge_change(
    candidate: CandidateResult, rule: RuleConfig, reading: Reading, change: Change
) -> Iterator[Alert]:
    """Yield the alert of a change for the worse, or of one that is not clear."""
    limit = Limit(change.threshold, change.words)
    reading = replace(reading, value=change.value)
    if change.finding in (Finding.BREACH, Finding.UNPROVEN, Finding.UNCLEAR):
        found = _alert(candidate, rule, reading, limit, f"{_said(rule, reading)}{change.words}")
        yield found if change.finding is Finding.BREACH else _undecided(found)


def _not_finite(
    candidate: CandidateResult, rule: RuleConfig, reading: Reading, limit: Limit | None
) -> Alert:
    """Return the alert of values that never pass, by the rule's policy."""
    decides = rule.non_finite == "breach"
    end = "never passes" if decides else f"rule {rule.name} can't decide"
    words = (
        f"{title(rule.metric)} at {reading.scope} has {reading.num_bad} non-finite of "
        f"{reading.row.n} values ({kind_sign(reading.kind)}): {end}"
    )
    found = _alert(candidate, rule, reading, limit, words)
    return found if decides else _undecided(found)


def _incomplete(candidate: CandidateResult, rule: RuleConfig, reading: Reading) -> Iterator[Alert]:
    """Yield that a rule can't pass: too many of the positions that it judges are missing."""
    missing, asked = reading.row.n_missing, reading.row.n + reading.row.n_missing
    if missing > MOST_MISSING * asked:
        words = (
            f"{title(rule.metric)} at {reading.scope} is missing at {missing:,} of {asked:,} "
            f"positions: rule {rule.name} can't decide"
        )
        yield _undecided(_alert(candidate, rule, reading, None, words))


def _undecided(alert: Alert) -> Alert:
    return replace(alert, value=None, value_kind="inconclusive")


def _said(rule: RuleConfig, reading: Reading) -> str:
    value = "–" if reading.value is None else number(reading.value)
    return f"{title(rule.metric, rule.statistic)} {value} at {reading.scope}"


def _beyond(rule: RuleConfig, value: float, limit: Limit) -> bool:
    return (value - limit.threshold) * sign(rule) > 0


def _alert(
    candidate: CandidateResult,
    rule: RuleConfig,
    reading: Reading,
    limit: Limit | None,
    words: str,
) -> Alert:
    kind = reading.kind if reading.num_bad and rule.non_finite != "ignore" else _kind(reading)
    return Alert(
        rule=rule.name,
        candidate=candidate.name,
        metric=rule.metric,
        statistic=rule.statistic,
        scope=reading.scope,
        value=reading.value if kind == "finite" else None,
        value_kind=kind,
        threshold=0.0 if limit is None else limit.threshold,
        severity=rule.severity,
        words=words,
    )


def _kind(reading: Reading) -> str:
    """A derived number may be beyond float64 although every value is finite."""
    return "finite" if reading.value is not None and math.isfinite(reading.value) else "posinf"


def _missing(candidate: CandidateResult, rule: RuleConfig) -> Alert:
    """Say that a rule found nothing to judge; where it looked is in the words."""
    places = ", ".join(rule.globs)
    concrete = rule.globs[0] if len(rule.globs) == 1 and "*" not in rule.globs[0] else MODEL
    return Alert(
        rule=rule.name,
        candidate=candidate.name,
        metric=rule.metric,
        statistic=rule.statistic,
        scope=Scope(concrete),
        value=None,
        value_kind="missing",
        threshold=rule.threshold or 0.0,
        severity=rule.severity,
        words=f"{title(rule.metric)} was not measured at {places}: rule {rule.name} can't decide",
    )
