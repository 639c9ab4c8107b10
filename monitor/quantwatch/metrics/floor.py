"""The sink of the reference against itself: how far equal models seem to differ."""

import numpy as np

from quantwatch.domain import Observation
from quantwatch.metrics.registry import METRICS

Floor = dict[tuple[str, str], float]

_OF_ONE_MODEL = {"nll_candidate"}
"""Not a difference, so the reference against itself says nothing about its noise."""


class NoiseFloor:
    """Keeps, per (metric, scope), the largest departure of any token from the best value.

    Metrics without a finite best value have none; non-finite values are left out.
    """

    def __init__(self) -> None:
        self.values: Floor = {}

    def observe(self, observation: Observation) -> None:
        """Take the reference's measurements of itself on one prompt."""
        for matrix in observation.matrices:
            best = METRICS[matrix.metric].best_value
            if matrix.role == "sample" and _has_floor(matrix.metric):
                away = np.abs(matrix.values - best)
                for scope, row in zip(matrix.scopes, away, strict=True):
                    self._raise(matrix.metric, scope, row[np.isfinite(row)])

    def _raise(self, metric: str, scope: str, away: np.ndarray) -> None:
        if len(away):
            known = self.values.get((metric, scope), 0.0)
            self.values[metric, scope] = max(known, float(away.max()))


def _has_floor(metric: str) -> bool:
    spec = METRICS[metric]
    compares = spec.direction != "neutral" and metric not in _OF_ONE_MODEL
    return compares and bool(np.isfinite(spec.best_value))
