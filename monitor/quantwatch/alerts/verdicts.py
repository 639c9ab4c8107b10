"""From alerts to verdicts."""

from collections.abc import Sequence

from quantwatch.alerts.limits import NOISE_FACTOR, NoiseFloor
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, CandidateResult, Severity, Verdict

HEADLINE = "logit_kl"
"""The metric that decides whether a candidate is better than its baseline."""


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
    """Say whether the output KL is lower than the baseline's by more than a change for the worse
    may be: max(min_effect, 3 × noise floor) of the rule on it. Never without such a rule.
    """
    rule = next(
        (r for r in rules if r.enabled and r.kind == "baseline" and r.metric == HEADLINE), None
    )
    now, before = candidate.find(HEADLINE), baseline.find(HEADLINE) if baseline else None
    if rule is None or rule.min_effect is None or now is None or before is None:
        return False
    if now.mean is None or before.mean is None or now.num_nonfinite:
        return False
    noise = NOISE_FACTOR * noise_floor.get((HEADLINE, now.scope), 0.0)
    return before.mean - now.mean > max(rule.min_effect, noise)


def _verdict(alert: Alert) -> Verdict:
    if alert.value_kind == "missing":
        return Verdict.INCONCLUSIVE
    return Verdict.REGRESSION if alert.severity == Severity.CRITICAL else Verdict.WARN
