"""What each rule says of a candidate: breach, clear, between the two, undecided, or missing.

A rule is left where it is entered, moved by `leave_factor` towards what is best: towards the best
value for `absolute` (an infinite best value is approached by division), towards 0 for
`median_ratio`, and towards the baseline itself for `baseline`. The noise floor moves with it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from quantwatch.alerts.changes import Finding, comparison_of, weigh
from quantwatch.alerts.limits import NoiseFloor
from quantwatch.alerts.readings import Reading, best_value, readings, sign
from quantwatch.alerts.rules import evaluate
from quantwatch.config.rules import COUNTED, DRIFT, RuleConfig
from quantwatch.domain import Alert, CandidateResult, RuleOutcome
from quantwatch.telemetry import canonical_sha

Outcome = Literal["breach", "between", "clear", "undecided", "missing"]


def outcomes(
    candidate: CandidateResult,
    rules: Sequence[RuleConfig],
    *,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None = None,
) -> tuple[RuleOutcome, ...]:
    """Return one outcome per rule that is enabled, in the order of the rules."""
    return tuple(_outcome(candidate, rule, noise_floor, baseline) for rule in rules if rule.enabled)


def unmeasured(
    candidate: CandidateResult, rules: Sequence[RuleConfig], why: str
) -> tuple[RuleOutcome, ...]:
    """Return the outcomes for a candidate of which there is nothing to judge: all missing."""
    return tuple(_unjudged(candidate, rule, why) for rule in rules if rule.enabled)


def rule_sha(rule: RuleConfig) -> str:
    """Return the digest that tells an edited condition from the one before.

    Not of the severity: raising it escalates what is open. Not of defaults: a field that a later
    version adds must not close every alert.
    """
    return canonical_sha(rule.model_dump(mode="json", exclude_defaults=True, exclude={"severity"}))


def relaxed(rule: RuleConfig) -> RuleConfig:
    """Return the rule that a value must not breach either to be clear."""
    factor = rule.leave_factor
    if rule.threshold is not None:
        return rule.model_copy(update={"threshold": _towards_best(rule, rule.threshold)})
    if rule.factor is not None:
        return rule.model_copy(update={"factor": rule.factor * factor})
    if rule.min_effect is not None:
        return rule.model_copy(update={"min_effect": rule.min_effect * factor})
    return rule


def _towards_best(rule: RuleConfig, threshold: float) -> float:
    best = best_value(rule)
    if math.isfinite(best):
        return best + (threshold - best) * rule.leave_factor
    return threshold - sign(rule) * abs(threshold) * (1 / rule.leave_factor - 1)


def _outcome(
    candidate: CandidateResult,
    rule: RuleConfig,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None,
) -> RuleOutcome:
    if rule.kind == "baseline" and (baseline is None or not baseline.measurements):
        return _unjudged(candidate, rule, "there is no baseline to compare with")
    if rule.metric == DRIFT and baseline is None and not candidate.baseline_differences:
        return _unjudged(candidate, rule, "there is no baseline to have drifted from")
    found = evaluate(candidate, [rule], noise_floor=noise_floor, baseline=baseline)
    if found:
        said = _alerted(rule, found, "breach")
        tested = _were_tested(found, rule, noise_floor, baseline)
        return replace(said, was_tested=said.outcome == "undecided" and tested)
    softer = {key: floor * rule.leave_factor for key, floor in noise_floor.items()}
    found = evaluate(candidate, [relaxed(rule)], noise_floor=softer, baseline=baseline)
    # Only what is decided: where the rule itself is clear, wide intervals keep nobody from leaving.
    near = [alert for alert in found if alert.is_decided]
    return _alerted(rule, near, "between") if near else _kept(candidate, rule, baseline)


def _were_tested(
    alerts: Sequence[Alert],
    rule: RuleConfig,
    noise_floor: NoiseFloor,
    baseline: CandidateResult | None,
) -> bool:
    """Say whether each of the scopes was measured in full, and the test established nothing."""
    if rule.kind != "baseline":
        return False
    known = [comparison_of(rule, alert.scope, baseline) for alert in alerts]
    return all(
        each is not None and weigh(rule, each, noise_floor).finding is Finding.UNPROVEN
        for each in known
    )


def _kept(
    candidate: CandidateResult, rule: RuleConfig, baseline: CandidateResult | None
) -> RuleOutcome:
    """Return the outcome of a rule that nothing breaches: clear only if something was judged."""
    if rule.metric in COUNTED:
        return _clear(candidate, rule, [])
    found = [each for each in readings(candidate, rule) if each.value is not None]
    if not found:
        return replace(
            _unjudged(candidate, rule, "no value is finite, and the rule ignores those"),
            outcome="undecided",
            value_kind="inconclusive",
        )
    if rule.kind == "baseline" and not _has_counterpart(found, rule, baseline):
        return _unjudged(candidate, rule, "the baseline has no value to compare with")
    return _clear(candidate, rule, found)


def _has_counterpart(
    found: Sequence[Reading], rule: RuleConfig, baseline: CandidateResult | None
) -> bool:
    before = [] if baseline is None else list(readings(baseline, rule))
    known = {reading.scope for reading in before if reading.value is not None}
    return any(
        reading.scope in known or comparison_of(rule, reading.scope, baseline) is not None
        for reading in found
    )


def _alerted(rule: RuleConfig, alerts: Sequence[Alert], outcome: Outcome) -> RuleOutcome:
    """Return the outcome at the worst of the scopes.

    Where every scope is not clear, nothing is decided; what was not measured is missing.
    """
    decided = [alert for alert in alerts if alert.is_decided]
    if not decided:
        outcome = "missing" if all(a.value_kind == "missing" for a in alerts) else "undecided"
    worst = max(decided or alerts, key=_badness(rule))
    return RuleOutcome(
        **_identity(rule, worst.candidate) | {"severity": worst.severity},
        outcome=outcome,
        scope=worst.scope,
        value=worst.value,
        value_kind=worst.value_kind,
        threshold=worst.threshold if decided else None,
        words=worst.words,
    )


def _clear(candidate: CandidateResult, rule: RuleConfig, found: Sequence[Reading]) -> RuleOutcome:
    """Return the outcome of a rule that is kept with distance, at the worst of what it read."""
    worst = max(found, key=lambda reading: sign(rule) * (reading.value or 0.0), default=None)
    value, kind = _plain(worst)
    return RuleOutcome(
        **_identity(rule, candidate.name),
        outcome="clear",
        scope=None if worst is None else worst.scope,
        value=value,
        value_kind=kind,
        threshold=rule.threshold,
        words="",
    )


def _unjudged(candidate: CandidateResult, rule: RuleConfig, why: str) -> RuleOutcome:
    return RuleOutcome(
        **_identity(rule, candidate.name),
        outcome="missing",
        scope=None,
        value=None,
        value_kind="missing",
        threshold=None,
        words=why,
    )


def _identity(rule: RuleConfig, candidate: str) -> dict[str, Any]:
    enter_runs, enter_window = rule.entering
    return {
        "rule": rule.name,
        "candidate": candidate,
        "rule_sha": rule_sha(rule),
        "severity": rule.severity,
        "enter_runs": enter_runs,
        "enter_window": enter_window,
        "leave_runs": rule.leave_runs,
        "direction": 1 if rule.metric in COUNTED else sign(rule),
        "may_be_chance": rule.kind == "baseline",
    }


def _badness(rule: RuleConfig) -> Any:
    """Return a key that puts the worst alert last: not finite, then farthest beyond its limit."""
    direction = 1 if rule.metric in COUNTED else sign(rule)

    def key(alert: Alert) -> float:
        return math.inf if alert.value is None else direction * (alert.value - alert.threshold)

    return key


def _plain(reading: Reading | None) -> tuple[float | None, str]:
    """Return a reading as the store keeps it: infinite values are a kind."""
    if reading is None or reading.value is None:
        return None, "missing"
    if math.isfinite(reading.value):
        return reading.value, "finite"
    return None, "posinf" if reading.value > 0 else "neginf"
