"""Rule evaluation: measurements and rules in, alerts out. Nothing else is looked at.

A non-finite value never passes: a rule that meets one breaches, whatever its threshold. What could
not be measured gives an alert of the kind `missing`, which makes the verdict inconclusive.
"""

from collections.abc import Callable, Iterator, Sequence

from quantwatch.alerts import limits
from quantwatch.alerts.limits import Limit, NoiseFloor
from quantwatch.alerts.nonfinite import nonfinite_alert
from quantwatch.alerts.readings import Reading, readings, sign
from quantwatch.alerts.words import kind_sign, number, title
from quantwatch.config.rules import NONFINITE, RuleConfig
from quantwatch.domain import MODEL, Alert, CandidateResult, Scope, Severity

LimitOf = Callable[[Reading], Limit | None]


def evaluate(
    candidate: CandidateResult,
    rules: Sequence[RuleConfig],
    *,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None = None,
) -> tuple[Alert, ...]:
    """Return one alert per rule and scope that breaches, critical ones first.

    Rules of kind `baseline` are silent without a baseline, and when the candidate could not be
    measured in it.
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
    if rule.metric == NONFINITE:
        yield from nonfinite_alert(candidate, rule)
        return
    found = list(readings(candidate, rule))
    limit_of = _limits(candidate, rule, noise_floor, baseline)
    if all(reading.is_missing for reading in found):
        yield _missing(candidate, rule)
    for reading in found:
        if not reading.is_missing:
            yield from _judge(candidate, rule, reading, limit_of(reading))


def _limits(
    candidate: CandidateResult,
    rule: RuleConfig,
    noise_floor: NoiseFloor,
    before: CandidateResult | None,
) -> LimitOf:
    """Return how a rule finds the limit of a reading."""
    if rule.kind == "absolute":
        return lambda _: limits.absolute(rule)
    if rule.kind == "median_ratio":
        layers = list(readings(candidate, rule.model_copy(update={"scope": "layers.*"})))
        return lambda reading: limits.median_ratio(rule, reading, layers, noise_floor)
    assert before is not None
    values = {reading.scope: reading.value for reading in readings(before, rule)}

    def against_baseline(reading: Reading) -> Limit | None:
        known = values.get(reading.scope)
        return None if known is None else limits.baseline(rule, reading, known, noise_floor)

    return against_baseline


def _judge(
    candidate: CandidateResult, rule: RuleConfig, reading: Reading, limit: Limit | None
) -> Iterator[Alert]:
    """Yield the alert of a reading that breaches. A baseline without the value sets no limit."""
    where = f"at {reading.scope}"
    if reading.num_bad:
        words = (
            f"{title(rule.metric)} {where} has {reading.num_bad} non-finite of "
            f"{reading.row.n} values ({kind_sign(reading.kind)}): never passes"
        )
        yield _alert(candidate, rule, reading, limit, words)
    elif limit is not None and reading.value is not None and _beyond(rule, reading.value, limit):
        said = f"{title(rule.metric, rule.statistic)} {number(reading.value)} {where}"
        yield _alert(candidate, rule, reading, limit, f"{said}{limit.words}")


def _beyond(rule: RuleConfig, value: float, limit: Limit) -> bool:
    return (value - limit.threshold) * sign(rule) > 0


def _alert(
    candidate: CandidateResult,
    rule: RuleConfig,
    reading: Reading,
    limit: Limit | None,
    words: str,
) -> Alert:
    kind = reading.kind
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
