"""Group-limited routing of DeepSeek-V3: sigmoid scores, a bias that chooses and never weighs.

With logits z, scores are s = σ(z), each expert's for itself. The choice is made on c = s + b, b the
bias that balances loads (`e_score_correction_bias`): experts lie in groups of equal size, a group
is worth the sum of its two largest c, the best groups stay, and the k largest c in them are chosen.
Weights are the *scores* of the chosen without b, divided by their sum if renormalized (+ 1e-20, as
the published model has it), times a factor. Of equal values the lowest id is taken, of groups and
of experts; `topk` promises no order.

A token with a NaN has NaN weights; the others are as without it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GroupedRouter", "choose_grouped", "group_values"]

_NO_ZERO = 1e-20


class GroupedRouter(NamedTuple):
    """How experts are chosen and weighed; `bias` [E] has the groups' experts in order."""

    top_k: int
    bias: Tensor
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    renormalize: bool = True


def choose_grouped(logits_TE: Tensor, router: GroupedRouter) -> tuple[Tensor, Tensor]:
    """Return ids int64 [T, k], largest c first, and weights [T, k] of float32 or float64 logits.

    Raises ValueError for a bias that doesn't fit, groups that don't divide the experts or hold only
    one, fewer chosen experts in reach than k, or a factor that isn't a positive number.
    """
    _check(router, logits_TE.shape[1])
    scores = torch.sigmoid(logits_TE)
    choice = scores + router.bias.to(scores)
    value = group_values(choice, router.groups)
    _, best = torch.sort(value, dim=-1, descending=True, stable=True)
    reached = torch.zeros(len(choice), router.groups, dtype=torch.bool, device=choice.device)
    reached.scatter_(1, best[:, : router.top_groups], True)
    size = choice.shape[1] // router.groups
    choice = choice.masked_fill(~reached.repeat_interleave(size, 1), -torch.inf)
    # Stable: equal values stay in the order of their ids.
    _, ids = torch.sort(choice, dim=-1, descending=True, stable=True)
    ids = ids[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_ZERO)
    bad = logits_TE.isnan().any(-1, keepdim=True)
    return ids, torch.where(bad, torch.nan, weights * router.scaling)


def group_values(choice_TE: Tensor, groups: int) -> Tensor:
    """Return what each group is worth, [T, G]: the sum of its two largest values."""
    split = choice_TE.reshape(len(choice_TE), groups, choice_TE.shape[1] // groups)
    return split.topk(2, -1).values.sum(-1)


def _check(router: GroupedRouter, experts: int) -> None:
    groups, size = router.groups, experts // max(router.groups, 1)
    if tuple(router.bias.shape) != (experts,):
        raise ValueError(f"the bias must be [{experts}]; it is {list(router.bias.shape)}.")
    if groups < 1 or experts % groups or size < 2:
        raise ValueError(
            f"{experts} experts don't fall into {groups} groups of equal size, 2 or more."
        )
    if not 1 <= router.top_groups <= groups:
        raise ValueError(f"top_groups must be in 1 … {groups}; it is {router.top_groups}.")
    if not 1 <= router.top_k <= router.top_groups * size:
        raise ValueError(
            f"top_k must be in 1 … {router.top_groups * size} experts of {router.top_groups} "
            f"groups; it is {router.top_k}."
        )
    if not (math.isfinite(router.scaling) and router.scaling > 0):
        raise ValueError(f"the scaling factor must be positive; it is {router.scaling!r}.")
