"""The sink of the reference against itself: how far equal models seem to differ.

Observations come from several conditions (another batch, thread count, attention implementation),
each under its own name; the floor is the largest over all of them.
"""

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import Observation
from quantwatch.metrics.loads import LoadCounts
from quantwatch.metrics.registry import METRICS

Floor = dict[tuple[str, str], float]

_OF_ONE_MODEL = {"nll_candidate", "router_load_max"}
"""Not a difference, so the reference against itself says nothing about its noise."""
_BY_EXPERTS = {"router_overlap", "router_weight_l1", "router_flips"}
"""They jump by whole experts: a single tie would be a floor that no mean ever leaves behind."""


class NoiseFloor:
    """Keeps, per (metric, scope), how far the reference is from the best value at most.

    Of a condition that is the largest departure of any token; for what jumps by whole experts the
    mean over its tokens, and for loads, which are of no token, that of all its tokens together.
    Metrics without a finite best value have none; non-finite values are left out.
    """

    def __init__(self) -> None:
        self._conditions: dict[str, _Condition] = {}

    @property
    def by_source(self) -> dict[str, Floor]:
        """The name that observations came under → the floor of that condition alone."""
        return {source: condition.floor() for source, condition in self._conditions.items()}

    @property
    def values(self) -> Floor:
        """The floor: the largest of all conditions."""
        found: Floor = {}
        for floor in self.by_source.values():
            for key, value in floor.items():
                found[key] = max(found.get(key, 0.0), value)
        return found

    def largest(self) -> dict[str, dict[str, float]]:
        """Return, per condition and metric, the largest floor at any scope."""
        found: dict[str, dict[str, float]] = {}
        for source, floor in self.by_source.items():
            for (metric, _), value in floor.items():
                known = found.setdefault(source, {})
                known[metric] = max(known.get(metric, 0.0), value)
        return found

    def observe(self, observation: Observation) -> None:
        """Take the reference's measurements of itself on one prompt."""
        self._conditions.setdefault(observation.candidate, _Condition()).observe(observation)


class _Condition:
    """What one way of running the reference again has shown."""

    def __init__(self) -> None:
        self._largest: Floor = {}
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}
        self._loads = LoadCounts()

    def observe(self, observation: Observation) -> None:
        for matrix in observation.matrices:
            best = METRICS[matrix.metric].best_value
            if matrix.role == "sample" and _has_floor(matrix.metric):
                away = np.abs(matrix.values - best)
                for scope, row in zip(matrix.scopes, away, strict=True):
                    self._add((matrix.metric, scope), row[np.isfinite(row)])
        for load in observation.loads:
            self._loads.add(load)

    def floor(self) -> Floor:
        means = {key: total / count for key, (total, count) in self._sums.items()}
        shifts: Floor = {
            ("router_load_tv", scope): shift
            for scope, shift in self._loads.shifts().items()
            if np.isfinite(shift)
        }
        return {**self._largest, **means, **shifts}

    def _add(self, key: tuple[str, str], away: NDArray[np.float64]) -> None:
        if not len(away):
            return
        if key[0] in _BY_EXPERTS:
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + float(away.sum()), count + len(away))
        else:
            self._largest[key] = max(self._largest.get(key, 0.0), float(away.max()))


def _has_floor(metric: str) -> bool:
    spec = METRICS[metric]
    compares = spec.direction != "neutral" and metric not in _OF_ONE_MODEL
    return compares and bool(np.isfinite(spec.best_value))
