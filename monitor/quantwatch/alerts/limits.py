"""How far a value may go: the limit of each kind of rule, and the words for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from quantwatch.alerts.readings import Reading, best_value, readings, sign
from quantwatch.alerts.words import number, times
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import CandidateResult, Scope, is_layer

NoiseFloor = Mapping[tuple[str, str], float]
NOISE_FACTOR = 3
"""A change has to be this many noise floors large before anybody hears of it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold, and what a breach of it says after "value at scope"."""

    threshold: float
    words: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How a rule finds the limit of each reading of a candidate."""

    rule: RuleConfig
    noise_floor: NoiseFloor
    layers: Sequence[Reading] = ()
    """Of a rule on the median: its readings of whole layers."""
    before: Mapping[Scope, float | None] = field(default_factory=dict)
    """Of a rule on a baseline: what the baseline has, by scope."""

    def at(self, reading: Reading, *, as_worst: bool = False) -> Limit | None:
        """Return the limit of a reading, None where the rule sets it none.

        `as_worst`: as it is for a layer that has become the worst, which moves the median that it
        is held against.
        """
        if self.rule.kind == "absolute":
            return absolute(self.rule)
        if self.rule.kind == "median_ratio":
            layers = self._with_worst(reading.scope) if as_worst else self.layers
            return median_ratio(self.rule, reading, layers, self.noise_floor)
        known = self.before.get(reading.scope)
        return None if known is None else baseline(self.rule, reading, known, self.noise_floor)

    def _with_worst(self, scope: Scope) -> Sequence[Reading]:
        worst = sign(self.rule) * math.inf
        return [replace(r, value=worst) if r.scope == scope else r for r in self.layers]


def limits_of(
    candidate: CandidateResult,
    rule: RuleConfig,
    noise_floor: NoiseFloor,
    before: CandidateResult | None,
) -> Limits:
    """Return how a rule finds its limits; one of kind `baseline` needs a baseline."""
    if rule.kind == "median_ratio":
        layers = readings(candidate, rule.model_copy(update={"scope": "layers.*"}))
        return Limits(rule, noise_floor, layers=list(layers))
    if rule.kind == "absolute":
        return Limits(rule, noise_floor)
    assert before is not None
    known = {reading.scope: reading.value for reading in readings(before, rule)}
    return Limits(rule, noise_floor, before=known)


def absolute(rule: RuleConfig) -> Limit:
    """Return the configured threshold."""
    assert rule.threshold is not None
    side = "above" if sign(rule) > 0 else "below"
    return Limit(rule.threshold, f" is {side} the limit {number(rule.threshold)}")


def median_ratio(
    rule: RuleConfig, reading: Reading, layers: Sequence[Reading], noise_floor: NoiseFloor
) -> Limit | None:
    """Return max(factor × median over whole layers, 3 × noise floor of the metric and scope).

    With all other layers exactly 0 the median is 0 and the noise floor decides: a fault of × 1.001
    in otherwise equal models is found. None where no whole layer was measured: there is no median.
    """
    assert rule.factor is not None
    known = [r.value for r in layers if is_layer(r.scope) and r.value is not None]
    if not known:
        return None
    middle = median(known)
    noise = NOISE_FACTOR * floor_of(rule, reading.scope, noise_floor)
    if rule.factor * middle <= noise:
        why = f"the median of all layers is {number(middle)}"
        return Limit(
            noise, f"; {why}, so the limit is {NOISE_FACTOR} × the noise floor: {number(noise)}"
        )
    ratio = math.nan if reading.value is None else reading.value / middle
    return Limit(
        rule.factor * middle,
        f" is {times(ratio)} the median of all layers ({number(middle)}); "
        f"limit {times(rule.factor)}",
    )


def baseline(rule: RuleConfig, reading: Reading, before: float, noise_floor: NoiseFloor) -> Limit:
    """Return the baseline's value, worse by what is allowed: where no prompts can be paired.

    That is a statistic other than the mean, and a baseline without prompt sums.
    """
    allowed = allowed_change(rule, reading.scope, noise_floor)
    worse = "above" if sign(rule) > 0 else "below"
    change = math.nan if reading.value is None else abs(reading.value - before)
    return Limit(
        before + sign(rule) * allowed,
        f" is {number(change)} {worse} the baseline's {number(before)}; allowed {number(allowed)}",
    )


def allowed_change(rule: RuleConfig, scope: str, noise_floor: NoiseFloor) -> float:
    """Return max(min_effect, 3 × noise floor): no smaller change is worth a word."""
    assert rule.min_effect is not None
    return max(rule.min_effect, NOISE_FACTOR * floor_of(rule, scope, noise_floor))


def floor_of(rule: RuleConfig, scope: str, noise_floor: NoiseFloor) -> float:
    """Return the noise floor of what a rule reads, 0 when none was measured.

    Near its best value a perplexity ratio moves as the mean NLL difference does: exp(x) − 1 ≈ x.
    """
    metric = "nll_difference" if rule.metric == "nll_candidate" else rule.source
    floor = noise_floor.get((metric, scope), 0.0)
    return floor if math.isfinite(floor) and math.isfinite(best_value(rule)) else 0.0
