"""From alerts to verdicts."""

from collections.abc import Sequence

from quantwatch.alerts.changes import Finding, comparison_of, weigh
from quantwatch.alerts.limits import NoiseFloor, allowed_change
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, CandidateResult, Measurement, Severity, Verdict

HEADLINES = ("logit_kl", "served_kl")
"""The metrics that decide whether a candidate is better than its baseline: the first measured."""


def verdict_of(
    alerts: Sequence[Alert], *, improved: bool = False, comparable: bool = True
) -> Verdict:
    """Return a candidate's verdict: the worst of its alerts, else improvement or pass.

    `comparable` is False when there is a baseline that measured something else: what could not be
    compared is inconclusive, but a breached absolute rule still decides.
    """
    found = [_verdict(alert) for alert in alerts]
    if not comparable:
        found.append(Verdict.INCONCLUSIVE)
    if not found:
        return Verdict.IMPROVEMENT if improved else Verdict.PASS
    return Verdict.worst(found)


def run_verdict(candidates: Sequence[CandidateResult]) -> Verdict | None:
    """Return the worst of the candidates' verdicts, None when none was measured."""
    found = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    return Verdict.worst(found) if found else None


def has_improved(
    candidate: CandidateResult,
    baseline: CandidateResult | None,
    rules: Sequence[RuleConfig],
    *,
    noise_floor: NoiseFloor,
) -> bool:
    """Say whether the output KL is better than the baseline's, as surely as it would have to be
    worse to breach a rule on it. Never without such a rule.
    """
    headline = next((name for name in HEADLINES if candidate.find(name)), HEADLINES[0])
    now, before = candidate.find(headline), baseline.find(headline) if baseline else None
    if now is None or before is None or now.num_nonfinite:
        return False
    found = [r for r in rules if r.enabled and r.kind == "baseline" and r.metric == headline]
    return any(_is_better(rule, now, before, baseline, noise_floor) for rule in found)


def _is_better(
    rule: RuleConfig,
    now: Measurement,
    before: Measurement,
    baseline: CandidateResult | None,
    noise_floor: NoiseFloor,
) -> bool:
    comparison = comparison_of(rule, now.scope, baseline)
    if comparison is not None:
        return weigh(rule, comparison, noise_floor).finding is Finding.IMPROVED
    if now.mean is None or before.mean is None:
        return False
    return before.mean - now.mean > allowed_change(rule, now.scope, noise_floor)


def _verdict(alert: Alert) -> Verdict:
    if not alert.is_decided:
        return Verdict.INCONCLUSIVE
    return Verdict.REGRESSION if alert.severity == Severity.CRITICAL else Verdict.WARN
