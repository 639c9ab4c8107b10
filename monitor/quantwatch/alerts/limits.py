"""How far a value may go: the limit of each kind of rule, and the words for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quantwatch.alerts.readings import Reading, best_value, sign
from quantwatch.alerts.words import number, times
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import is_layer

NoiseFloor = Mapping[tuple[str, str], float]
NOISE_FACTOR = 3
"""A change has to be this many noise floors large before anybody hears of it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold, and what a breach of it says after "value at scope"."""

    threshold: float
    words: str


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
