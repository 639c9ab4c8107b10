"""Student's t without scipy: tail probabilities that stay right far out, and quantiles.

P(T > t) = ½ · I_x(ν/2, ½) with x = ν/(ν + t²); the regularised incomplete beta function I by its
continued fraction (Lentz's method), which converges fast on the side of the mean that is used.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_TINY = 1e-300
_STEPS = 300


def two_sided(t: Vector, freedom: int) -> Vector:
    """Return P(|T| ≥ |t|) for T with so many degrees of freedom."""
    x = freedom / (freedom + np.square(t))
    return np.clip(_incomplete_beta(x, freedom / 2, 0.5), 0.0, 1.0)


@lru_cache(maxsize=256)
def quantile(level: float, freedom: int) -> float:
    """Return t with P(|T| ≤ t) = level, by bisection. `level` is below 1."""
    low, high = 0.0, 1.0
    while 1 - float(two_sided(np.array([high]), freedom)[0]) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        inside = 1 - float(two_sided(np.array([middle]), freedom)[0])
        low, high = (middle, high) if inside < level else (low, middle)
    return high


def _incomplete_beta(x: Vector, a: float, b: float) -> Vector:
    """Return I_x(a, b), by symmetry where the fraction converges slowly."""
    swap = x > (a + 1) / (a + b + 2)
    direct = _by_fraction(np.where(swap, 0.5, x), a, b)
    mirrored = 1 - _by_fraction(np.where(swap, 1 - x, 0.5), b, a)
    return np.where(swap, mirrored, direct)


def _by_fraction(x: Vector, a: float, b: float) -> Vector:
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    with np.errstate(divide="ignore"):
        front = np.exp(a * np.log(x) + b * np.log1p(-x) - log_beta) / a
    return front * _fraction(x, a, b)


def _fraction(x: Vector, a: float, b: float) -> Vector:
    c = np.ones_like(x)
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    h = d.copy()
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            h = h * d * c
        if np.all(np.abs(d * c - 1) < 1e-15):
            break
    return h


def _away_from_zero(values: Vector) -> Vector:
    return np.where(np.abs(values) < _TINY, _TINY, values)
