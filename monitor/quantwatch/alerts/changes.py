"""A change since the baseline as a rule sees it: decided by the bound of its interval.

A change for the worse has to be established among everything that the run judges, and the whole
interval has to lie beyond what is allowed. An interval that reaches from allowed to not allowed,
and is wider than what is allowed, decides nothing.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from quantwatch.alerts.limits import NoiseFloor, allowed_change
from quantwatch.alerts.power import more_prompts
from quantwatch.alerts.readings import sign
from quantwatch.alerts.words import number
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import MIN_SAMPLES, Baseline, CandidateResult, Comparison

_NAMED = 5
"""Prompts that are named in a sentence."""


class Finding(StrEnum):
    """What a comparison says to a rule."""

    BREACH = "breach"
    IMPROVED = "improved"
    UNCHANGED = "unchanged"
    """No worse than allowed, or not so by a bound."""
    UNPROVEN = "unproven"
    """All of it was measured, and the test establishes neither a breach nor that there is none."""
    UNCLEAR = "unclear"
    """Too little was measured to ask the test: prompts were lost, or are too few."""


@dataclass(frozen=True, slots=True)
class Change:
    """A finding, the limit that its value had to pass, and what to say after "value at scope"."""

    finding: Finding
    value: float
    """What was compared: of a confirmation run, the mean over it and the run that it confirms."""
    threshold: float
    words: str


@dataclass(frozen=True, slots=True)
class _Loss:
    """A comparison turned so that more is worse."""

    change: float
    low: float
    high: float
    established: int
    allowed: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_undefined(self) -> bool:
        """Whether the interval lacks a bound: it says something only if all of it is forbidden."""
        bounds = (self.low, self.high)
        return any(map(math.isnan, bounds)) or (
            self.low <= self.allowed and not all(map(math.isfinite, bounds))
        )

    @property
    def is_wide(self) -> bool:
        """Whether the interval holds an allowed and a forbidden change, far from each other."""
        return self.low <= self.allowed < self.high and self.half_width > self.allowed


def comparison_of(
    rule: RuleConfig, scope: str, baseline: CandidateResult | None
) -> Comparison | None:
    """Return the paired test of what a rule reads; only means of runs with prompt sums have one."""
    if not isinstance(baseline, Baseline) or rule.statistic != "mean":
        return None
    return baseline.comparisons.get((rule.metric, scope))


def allowed_by(rule: RuleConfig, comparison: Comparison, noise_floor: NoiseFloor) -> float:
    """Return how much worse a comparison may be, the handicap of a best-ever baseline included."""
    return allowed_change(rule, comparison.scope, noise_floor) + comparison.handicap


def weigh(rule: RuleConfig, comparison: Comparison, noise_floor: NoiseFloor) -> Change:
    """Return what a comparison says to a rule of kind `baseline`."""
    allowed = allowed_by(rule, comparison, noise_floor)
    loss = _loss(rule, comparison, allowed)
    finding, reason = _find(loss, comparison)
    # The value breaches exactly where its interval's lower bound is beyond what is allowed.
    is_tested = comparison.is_enough and not comparison.lost
    margin = loss.change - loss.low if is_tested else 0.0
    beyond = loss.allowed + (margin if math.isfinite(margin) else 0.0)
    threshold = comparison.baseline + sign(rule) * beyond
    words = f"{_difference(comparison, loss)}{reason}"
    return Change(finding, comparison.value, threshold, words)


def _loss(rule: RuleConfig, comparison: Comparison, allowed: float) -> _Loss:
    low, high = comparison.low, comparison.high
    if sign(rule) < 0:
        low, high = -high, -low
    worse = sign(rule)
    return _Loss(comparison.difference * worse, low, high, comparison.established * worse, allowed)


def _find(loss: _Loss, comparison: Comparison) -> tuple[Finding, str]:
    if comparison.lost:
        return Finding.UNCLEAR, f"; {_lost(comparison)}"
    if not comparison.is_enough:
        return _of_few(loss, comparison)
    if loss.is_undefined:
        return Finding.UNCLEAR, "; the interval has a bound that is no number"
    if loss.low > loss.allowed and loss.established <= 0:
        q = "none" if comparison.q is None else number(comparison.q)
        return Finding.UNPROVEN, f"; not clear among all that is judged (q = {q})"
    if loss.is_wide:
        wanted = max(loss.allowed, abs(loss.change - loss.allowed))
        count = more_prompts(loss.half_width, wanted, comparison.num_prompts)
        return Finding.UNPROVEN, f"; too wide to tell: about {count} more prompts needed"
    return _clear_finding(loss), ""


def _clear_finding(loss: _Loss) -> Finding:
    if loss.low > loss.allowed:
        return Finding.BREACH
    improved = loss.high < -loss.allowed and loss.established < 0
    return Finding.IMPROVED if improved else Finding.UNCHANGED


def _of_few(loss: _Loss, comparison: Comparison) -> tuple[Finding, str]:
    """With few prompts, only a change that is small on every one of them is decided."""
    if loss.high <= loss.allowed:
        return Finding.UNCHANGED, ""
    missing = MIN_SAMPLES - comparison.num_prompts
    return Finding.UNCLEAR, (
        f"; too few prompts to tell ({comparison.num_prompts}): about {missing} more prompts needed"
    )


def _difference(comparison: Comparison, loss: _Loss) -> str:
    above = "above" if comparison.difference > 0 else "below"
    said = (
        f" is {number(abs(comparison.difference))} {above} the baseline's "
        f"{number(comparison.baseline)}"
    )
    if not (math.isfinite(comparison.low) and math.isfinite(comparison.high)):
        return said
    luck = f" ({number(comparison.handicap)} for the best of many runs)"
    kind = "95 % interval" if comparison.is_enough else "from"
    return (
        f"{said} ({kind} {number(comparison.low)} … {number(comparison.high)} over "
        f"{comparison.num_prompts} prompts); allowed {number(loss.allowed)}"
        f"{luck if comparison.handicap else ''}"
    )


def _lost(comparison: Comparison) -> str:
    named = ", ".join(map(str, comparison.lost[:_NAMED]))
    more = len(comparison.lost) - _NAMED
    rest = f" and {more} more" if more > 0 else ""
    which = "prompt" if len(comparison.lost) == 1 else "prompts"
    return f"{which} {named}{rest}: values in only one of the runs, nothing is concluded"
