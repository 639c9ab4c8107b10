"""The sink of the reference against itself: how far equal models seem to differ.

Observations come from several conditions (another batch, thread count, attention implementation),
each under its own name; the floor is the largest over all of them.
"""

import numpy as np

from quantwatch.domain import Observation
from quantwatch.metrics.loads import load_shift
from quantwatch.metrics.registry import METRICS

Floor = dict[tuple[str, str], float]

_OF_ONE_MODEL = {"nll_candidate", "router_load_max"}
"""Not a difference, so the reference against itself says nothing about its noise."""


class NoiseFloor:
    """Keeps, per (metric, scope), the largest departure of any token from the best value.

    Metrics without a finite best value have none; non-finite values are left out.
    """

    def __init__(self) -> None:
        self.values: Floor = {}
        self.by_source: dict[str, Floor] = {}
        """The name that observations came under → the floor of that condition alone."""

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
        source = self.by_source.setdefault(observation.candidate, {})
        for matrix in observation.matrices:
            best = METRICS[matrix.metric].best_value
            if matrix.role == "sample" and _has_floor(matrix.metric):
                away = np.abs(matrix.values - best)
                for scope, row in zip(matrix.scopes, away, strict=True):
                    for floor in (self.values, source):
                        _raise(floor, (matrix.metric, scope), row[np.isfinite(row)])
        for load in observation.loads:
            shift = np.array([load_shift(load.reference, load.candidate)])
            for floor in (self.values, source):
                _raise(floor, ("router_load_tv", load.scope), shift[np.isfinite(shift)])


def _raise(floor: Floor, key: tuple[str, str], away: np.ndarray) -> None:
    if len(away):
        floor[key] = max(floor.get(key, 0.0), float(away.max()))


def _has_floor(metric: str) -> bool:
    spec = METRICS[metric]
    compares = spec.direction != "neutral" and metric not in _OF_ONE_MODEL
    return compares and bool(np.isfinite(spec.best_value))
