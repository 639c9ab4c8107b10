"""A long prompt's observations arrive in pieces: they wait in the spool and are read as one.

Joined, they are the same values in the same order as those of a prompt that came at once, so every
sum and quantile has the same bits. Their positions wait there, too: what stays in memory is where
each piece lies.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import Observation, Scope, TokenMatrix, TopLogits
from quantwatch.metrics.spool import Strip

Positions = NDArray[np.int64]
T = TypeVar("T")


@dataclass(slots=True)
class Pieces:
    """What was observed on one prompt: its pieces in order, one of a prompt that went at once."""

    values: Strip
    positions: Strip | None
    """int64 [1, P]; None when all scored ones were measured."""
    last: int
    """The last position; −1 without positions."""

    @property
    def num_columns(self) -> int:
        """Number of values per scope."""
        return self.values.num_columns


Kept = dict[int, Pieces]
"""By prompt."""


@dataclass(slots=True)
class Series:
    """One metric of one candidate at a group of scopes that arrive together, by prompt."""

    scopes: tuple[Scope, ...]
    samples: Kept = field(default_factory=dict)
    extras: Kept = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    """Prompt → positions that came to nothing, where there are any."""

    def among(self, prompts: Collection[int]) -> "Series":
        """Return the part of some prompts."""
        samples, extras = only(self.samples, prompts), only(self.extras, prompts)
        return Series(self.scopes, samples, extras, only(self.missing, prompts))


def only(by_prompt: Mapping[int, T], prompts: Collection[int]) -> dict[int, T]:
    """Return what is kept of some prompts."""
    return {prompt: kept for prompt, kept in by_prompt.items() if prompt in prompts}


def check_turn(known: Pieces | None, observation: Observation, matrix: TokenMatrix) -> None:
    """Raise ValueError for what was observed before, or comes before what has to come first."""
    what = f"{matrix.metric} of {observation.candidate} on prompt {observation.prompt}"
    if known is not None and observation.offset is None:
        raise ValueError(f"{what} was observed twice")
    at, columns = matrix.positions, 0 if known is None else known.num_columns
    if at is None and observation.offset not in (None, columns):
        raise ValueError(f"{what}: a piece from {observation.offset} on came, {columns} was due")
    if known is not None and (at is None) != (known.positions is None):
        raise ValueError(f"{what}: pieces with and without positions")
    if known is not None and at is not None and len(at) and at[0] <= known.last:
        raise ValueError(f"{what}: position {at[0]} came after {known.last}")


def stacked(top: TopLogits) -> NDArray[np.float64]:
    """Return the five fields of TopLogits as float64 [5, P, K]; ids below 2⁵³ stay exact."""
    fields = (
        top.reference_ids,
        top.reference_logits,
        top.candidate_ids,
        top.candidate_logits,
        top.candidate_at_reference,
    )
    return np.stack([np.asarray(values, dtype=np.float64) for values in fields])
