"""KL by position: does a candidate fall behind the further a text goes?

Ranges are 0–15, then 16–31, 32–63, 64–127, …: each twice as long as the one before, so that twelve
of them reach 32,768 and each holds as many tokens as all earlier ones together. The means are of
the measured values themselves, not of the stored blocks: those are rounded, and hold the worst
positions beside the sampled ones, which would bias a mean.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from quantwatch.domain import PositionRange
from quantwatch.metrics.statistics import PromptValues, clustered_se, fold

FIRST = 16
"""Positions of the first range."""
METRICS = ("logit_kl", "lens_kl")
"""What is told by position; the lens's is the mean over all layers at a position."""


def edges(length: int) -> list[int]:
    """Return where ranges begin and the last one ends, so that `length` positions are covered."""
    found = [0, FIRST]
    while found[-1] < length:
        found.append(2 * found[-1])
    return found


def by_position(metric: str, parts: Sequence[PromptValues]) -> Iterator[PositionRange]:
    """Yield the ranges in which a position was measured; `parts` in prompt order."""
    last = max((int(part.positions.max()) for part in parts if len(part.positions)), default=-1)
    starts = edges(last + 1)
    for first, stop in pairwise(starts):
        within = [_within(part, first, stop) for part in parts]
        here = [part for part in within if part.values.size]
        if here:
            yield _range(metric, first, stop - 1, here)


def _within(part: PromptValues, first: int, stop: int) -> PromptValues:
    low, high = np.searchsorted(part.positions, (first, stop))
    return PromptValues(part.prompt, part.values[low:high], part.positions[low:high])


def _range(metric: str, first: int, last: int, parts: Sequence[PromptValues]) -> PositionRange:
    n = sum(part.values.size for part in parts)
    finite = sum(int(np.isfinite(part.values).sum()) for part in parts)
    mean = fold(part.values for part in parts) / finite if finite else None
    se = clustered_se(parts, mean, finite)
    return PositionRange(metric, first, last, n, n - finite, mean, se)
