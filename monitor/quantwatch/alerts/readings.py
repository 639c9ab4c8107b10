"""What a rule reads: one statistic of one metric at one scope, derived numbers included."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quantwatch.config.rules import DERIVED, RuleConfig
from quantwatch.config.scopes import matches
from quantwatch.domain import CandidateResult, Measurement, Scope
from quantwatch.metrics.registry import METRICS


@dataclass(frozen=True, slots=True)
class Reading:
    """A statistic at a scope. `value` is None when nothing finite was measured there."""

    scope: Scope
    value: float | None
    row: Measurement

    @property
    def num_bad(self) -> int:
        """Number of values that never pass: all non-finite ones but an infinite best value."""
        return num_bad(self.row)

    @property
    def kind(self) -> str:
        """Return finite, or the kind of the values that never pass; nan goes first."""
        if self.num_bad:
            infinite = "neginf" if self.row.n_neginf else "posinf"
            return "nan" if self.row.n_nan else infinite
        return "finite" if self.value is not None and math.isfinite(self.value) else "posinf"

    @property
    def is_missing(self) -> bool:
        """Say whether nothing at all was measured at the scope."""
        return self.value is None and self.row.num_nonfinite == 0


def readings(candidate: CandidateResult, rule: RuleConfig) -> Iterator[Reading]:
    """Yield a rule's statistic at each scope that matches, in the order of the measurements."""
    for row in candidate.measurements:
        if row.metric == rule.source and matches(rule.globs, row.scope):
            yield Reading(row.scope, statistic(row, rule), row)


def statistic(row: Measurement, rule: RuleConfig) -> float | None:
    """Return the number that a rule judges; None when no finite value is left."""
    if rule.metric not in DERIVED:
        value: float | None = getattr(row, rule.statistic)
        return value
    if row.mean is None:
        return None
    return _perplexity_ratio(row.mean) if rule.metric == "ppl_ratio" else _rms(row)


def num_bad(row: Measurement) -> int:
    """Return how many values of a row never pass any rule."""
    best_is_infinite = METRICS[row.metric].best_value == math.inf
    return row.num_nonfinite - (row.n_posinf if best_is_infinite else 0)


def best_value(rule: RuleConfig) -> float:
    """Return the best value of what a rule reads."""
    known = DERIVED.get(rule.metric)
    return known.best_value if known else METRICS[rule.metric].best_value


def sign(rule: RuleConfig) -> int:
    """Return +1 when higher is worse, −1 when lower is worse."""
    return 1 if rule.metric in DERIVED or METRICS[rule.metric].direction == "lower" else -1


def _perplexity_ratio(mean_nll_difference: float) -> float:
    try:
        return math.exp(mean_nll_difference)
    except OverflowError:
        return math.inf


def _rms(row: Measurement) -> float:
    """√(mean²  + variance), the variance with n where `std` has n − 1."""
    assert row.mean is not None
    n = row.n - row.num_nonfinite
    variance = (row.std or 0.0) ** 2 * (n - 1) / n
    return math.sqrt(row.mean**2 + variance)
