"""Both models' largest logits after one token: differences, shares, ranks that moved. Pure."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TopRow:
    """One rank: the reference's choice and what the candidate makes of it, the candidate's choice.

    A share is the token's probability among the tokens that are kept of that model: the whole
    vocabulary's normaliser isn't stored, so the probability is at most that. A rank is None when
    the token is not among the other model's.
    """

    rank: int
    reference_id: int | None
    reference_logit: float
    reference_share: float
    candidate_logit_at_reference: float
    difference: float
    rank_in_candidate: int | None
    candidate_id: int | None
    candidate_logit: float
    candidate_share: float
    rank_in_reference: int | None

    @property
    def ids(self) -> tuple[int | None, int | None]:
        """Token ids of both choices."""
        return self.reference_id, self.candidate_id


class Block(NamedTuple):
    """The five rows of a stored block, each with one number per rank, best first."""

    reference_ids: Values
    reference: Values
    candidate_ids: Values
    candidate: Values
    at_reference: Values
    """The candidate's logits of the reference's tokens."""


def top_rows(top: Values) -> list[TopRow]:
    """Return the ranks of both models at one position, best first, from a stored `Block`."""
    reference_ids, reference, candidate_ids, candidate, at_reference = Block(*top)
    shares, own = _shares(reference), _shares(candidate)
    ranks, others = _ranks(candidate_ids), _ranks(reference_ids)
    return [
        TopRow(
            k + 1,
            _id(reference_ids[k]), float(reference[k]), float(shares[k]),
            float(at_reference[k]), float(at_reference[k] - reference[k]),
            ranks.get(float(reference_ids[k])),
            _id(candidate_ids[k]), float(candidate[k]), float(own[k]),
            others.get(float(candidate_ids[k])),
        )
        for k in range(top.shape[1])
    ]  # fmt: skip


def _id(token_id: float) -> int | None:
    return int(token_id) if math.isfinite(token_id) else None


def _ranks(ids: Values) -> dict[float, int]:
    """Return each token's rank; of a token that is there twice the better one."""
    return {float(token): k + 1 for k, token in reversed(list(enumerate(ids)))}


def _shares(logits: Values) -> Values:
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(logits - np.max(logits, initial=-np.inf))
        shares: Values = weights / weights.sum()
    return shares
