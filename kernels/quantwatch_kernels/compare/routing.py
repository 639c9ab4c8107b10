"""How far two models send the same tokens to the same experts.

For a token whose reference chose the set R of k experts with weights w, and whose candidate chose
the set C with weights w' (0 for an expert that isn't chosen):

- overlap = |R ∩ C| ÷ |R|, 1 when all of the reference's experts were chosen;
- weight L1 = Σ_e |w_e − w'_e| over all experts, weights as they multiply the experts' outputs: at
  most 2 where they sum to 1, and 2 · s with a factor s;
- flip = 1 if R ≠ C although the reference's choice was decided, that is: rounding could not have
  made it otherwise (`serve.moe_margin` says when); else 0. So a tie that falls otherwise lowers the
  overlap and is no flip.

Where a weight of either model isn't finite all three are NaN. Ids and weights may come in any
order. T tokens, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Agreement", "Routing", "expert_loads", "routing_agreement"]


class Routing(NamedTuple):
    """Where tokens went: ids [T, k], weights [T, k], the number of experts, what was decided."""

    ids: Tensor
    weights: Tensor
    experts: int
    decided: Tensor
    """bool [T]; only the reference's is asked."""

    def first(self, count: int) -> "Routing":
        """Return the first `count` tokens."""
        return Routing(self.ids[:count], self.weights[:count], self.experts, self.decided[:count])

    @property
    def finite(self) -> Tensor:
        """Whether all weights of a token are finite, bool [T]."""
        return self.weights.isfinite().all(-1)


class Agreement(NamedTuple):
    """One value per token, float64 [T]."""

    overlap: Tensor
    weight_l1: Tensor
    flips: Tensor


def routing_agreement(reference: Routing, candidate: Routing) -> Agreement:
    """Compare the choices of two models on the same tokens.

    Raises ValueError for different numbers of tokens or experts, and ids out of range.
    """
    theirs, ours = _dense(reference), _dense(candidate).to(reference.ids.device)
    if theirs.shape != ours.shape:
        raise ValueError(
            f"{theirs.shape[0]} tokens and {theirs.shape[1]} experts can't be compared with "
            f"{ours.shape[0]} and {ours.shape[1]}."
        )
    mine, others = _chosen(reference), _chosen(candidate).to(theirs.device)
    overlap = (mine & others).sum(-1).double() / reference.ids.shape[1]
    flips = ((mine != others).any(-1) & reference.decided).double()
    bad = ~(reference.finite & candidate.finite.to(theirs.device))
    columns = (overlap, (theirs - ours).abs().sum(-1), flips)
    return Agreement(*(column.masked_fill(bad, torch.nan) for column in columns))


def expert_loads(routing: Routing, counted: Tensor) -> Tensor:
    """Return how many slots of the tokens in `counted` (bool [T]) each expert has, int64 [E]."""
    return torch.bincount(routing.ids[counted].flatten().long(), minlength=routing.experts)


def _chosen(routing: Routing) -> Tensor:
    """Return bool [T, E]."""
    empty = torch.zeros(len(routing.ids), routing.experts, dtype=torch.bool)
    return empty.to(routing.ids.device).scatter_(1, routing.ids.long(), True)


def _dense(routing: Routing) -> Tensor:
    """Return the weight of every expert, float64 [T, E]."""
    ids, experts = routing.ids, routing.experts
    if ids.shape != routing.weights.shape or ids.ndim != 2:
        raise ValueError(f"ids {list(ids.shape)} and weights {list(routing.weights.shape)} differ.")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < experts):
        raise ValueError(
            f"expert ids lie in 0 … {experts - 1}; these span {int(ids.min())} … {int(ids.max())}."
        )
    empty = torch.zeros(len(ids), experts, dtype=torch.float64, device=ids.device)
    return empty.scatter_add_(1, ids.long(), routing.weights.double())
