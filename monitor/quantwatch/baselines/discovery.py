"""False-discovery control (Benjamini and Hochberg, 1995) over everything that one run judges."""

from collections.abc import Sequence

import numpy as np

from quantwatch.domain import Comparison

FALSE_DISCOVERIES = 0.05
"""Of the changes that are called established, this share may be chance."""


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return q of every p: the smallest rate at which Benjamini–Hochberg would reject it.

    With p sorted ascending, q(i) = min over j ≥ i of m · p(j) / j, at most 1.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if not len(p):
        return []
    order = np.argsort(p, kind="stable")
    scaled = p[order] * len(p) / np.arange(1, len(p) + 1)
    smallest = np.minimum.accumulate(scaled[::-1])[::-1]
    q = np.empty_like(p)
    q[order] = np.minimum(smallest, 1.0)
    found: list[float] = q.tolist()
    return found


def discoveries(family: Sequence[Comparison]) -> list[float]:
    """Return q of each comparison in the direction in which it changed.

    Increases and decreases are families of their own, each at one-sided p: on noise, improvements
    and regressions are found equally often. Equal numbers have q = 1.
    """
    rises = adjusted([_one_sided(each, +1) for each in family])
    falls = adjusted([_one_sided(each, -1) for each in family])
    return [
        1.0 if not each.difference else (up if each.difference > 0 else down)
        for each, up, down in zip(family, rises, falls, strict=True)
    ]


def _one_sided(comparison: Comparison, sign: int) -> float:
    half = comparison.p / 2
    return half if comparison.difference * sign > 0 else 1 - half
