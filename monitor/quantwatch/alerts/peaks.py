"""The worst value of an episode."""

from dataclasses import dataclass

from quantwatch.domain import RuleOutcome


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst value of an episode; not finite is worse than any number."""

    value: float | None = None
    kind: str = "missing"


def worst_of(peak: Peak, outcome: RuleOutcome) -> Peak:
    """Return the worst value so far."""
    if outcome.outcome != "breach" or peak.kind not in ("finite", "missing"):
        return peak
    new = Peak(outcome.value, outcome.value_kind)
    if peak.value is None or outcome.value is None:
        return new
    return new if (outcome.value - peak.value) * outcome.direction > 0 else peak
