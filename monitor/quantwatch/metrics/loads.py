"""Loads of experts: whole counts of slots, added up over prompts, made numbers at the end.

A load is the share of all slots that an expert has. Both numbers are of the whole suite: a mean
over prompts of a total variation would call short prompts, in which few experts are used at all,
far apart. So there is one value per layer, without a standard error.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import ExpertLoad, Measurement, Scope
from quantwatch.metrics.statistics import PromptValues, summarize

Counts = NDArray[np.int64]


def load_shift(reference: Counts, candidate: Counts) -> float:
    """Return ½ Σ |load − load'|, between 0 and 1; NaN where one of them has no slot."""
    if not (reference.sum() and candidate.sum()):
        return float("nan")
    shares = [counts / counts.sum() for counts in (reference, candidate)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def load_peak(counts: Counts) -> float:
    """Return the largest load ÷ the mean load: 1 when all are equal; NaN without a slot."""
    return float(counts.max() / counts.mean()) if counts.sum() else float("nan")


class LoadCounts:
    """The slots of each expert of each layer, of both models."""

    def __init__(self) -> None:
        self._found: dict[Scope, tuple[Counts, Counts]] = {}

    def add(self, load: ExpertLoad) -> None:
        """Add one prompt's."""
        none = (np.zeros_like(load.reference), np.zeros_like(load.candidate))
        theirs, ours = self._found.get(load.scope, none)
        self._found[load.scope] = (theirs + load.reference, ours + load.candidate)

    def shifts(self) -> dict[Scope, float]:
        """Return the load shift of each layer over all prompts."""
        return {scope: load_shift(*pair) for scope, pair in self._found.items()}

    def measurements(self) -> Iterator[Measurement]:
        """Yield one row per metric and layer: a single value, that of all tokens together."""
        for scope, (theirs, ours) in self._found.items():
            yield _single("router_load_tv", scope, load_shift(theirs, ours))
            yield _single("router_load_max", scope, load_peak(ours))


def _single(metric: str, scope: Scope, value: float) -> Measurement:
    part = PromptValues(-1, np.array([value]), np.array([-1]))
    row = summarize(metric, scope, [part], worst="max", method="all positions together")
    return replace(row, max_prompt=None, max_position=None)  # it is of no token
