"""Which experts a token goes to: float32 logits, the k largest, softmax at a temperature.

logits = x · Wᵀ in float32, whatever x and W are stored in: logits rounded to 16 bits tie, and a tie
flips experts. Equal logits choose the **lowest id**, on every back end; `topk` promises no order.
The choice is made on the logits, so the temperature changes weights and never experts. It divides
logits before the softmax: p = softmax(z ÷ T). Renormalized, the weights of the chosen are p ÷ Σ p
over the chosen, which *is* the softmax over the chosen logits and is computed as that: no small
number is divided by a small one. Weights stay float32. No noise, no capacity, nothing is dropped.

A token with a NaN has NaN weights; the others are as without it. A logit of −∞ (an expert that is
masked) has weight 0 if it is chosen at all, for want of k others. Grouped routing on sigmoids
(DeepSeek-V3) chooses by another score: `moe_grouped`, through the same operator.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.registry import Op
from quantwatch_kernels.serve.moe_grouped import GroupedRouter, choose_grouped

__all__ = ["MOE_ROUTE", "AnyRouter", "Router", "choose_experts", "route"]


class Router(NamedTuple):
    """How experts are chosen and weighed."""

    top_k: int
    temperature: float = 1.0
    renormalize: bool = True


AnyRouter = Router | GroupedRouter
MOE_ROUTE: Op[[Tensor, Tensor, AnyRouter], tuple[Tensor, Tensor]] = Op("moe_route")
"""(x [T, H], weight [E, H], router) → (ids int64 [T, k], weights float32 [T, k]), largest first."""


def route(
    x_TH: Tensor, weight_EH: Tensor, router: AnyRouter, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids int64 [T, k] and weights float32 [T, k].

    Raises ValueError for shapes that don't fit, k outside 1 … E, or a temperature that isn't a
    positive number.
    """
    fits = x_TH.ndim == weight_EH.ndim == 2 and x_TH.shape[1] == weight_EH.shape[1]
    if not fits or not (x_TH.is_floating_point() and weight_EH.is_floating_point()):
        raise ValueError(
            f"route: x must be floating [T, H] and the weight floating [E, H]; they are "
            f"{x_TH.dtype} {list(x_TH.shape)} and {weight_EH.dtype} {list(weight_EH.shape)}."
        )
    if isinstance(router, Router):
        _check(router, len(weight_EH))
    return MOE_ROUTE.run(backend, x_TH, weight_EH, router)


def choose_experts(logits_TE: Tensor, router: AnyRouter) -> tuple[Tensor, Tensor]:
    """Return ids and weights of logits [T, E] (float32, or float64 for a reference).

    Raises ValueError as `route`, and for logits in 16 bits.
    """
    if logits_TE.ndim != 2 or logits_TE.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"logits must be float32 [T, E]; they are {logits_TE.dtype} {list(logits_TE.shape)}."
        )
    if isinstance(router, GroupedRouter):
        return choose_grouped(logits_TE, router)
    _check(router, logits_TE.shape[1])
    # Stable: equal logits stay in the order of their ids.
    ordered, ids = torch.sort(logits_TE, dim=-1, descending=True, stable=True)
    ids, chosen = ids[:, : router.top_k], ordered[:, : router.top_k] / router.temperature
    if router.renormalize:
        weights = torch.softmax(chosen, -1)
    else:
        weights = torch.softmax(logits_TE / router.temperature, -1).gather(1, ids)
    # A NaN sorts first; were it masked out by a softmax over fewer, it would be hidden.
    bad = logits_TE.isnan().any(-1, keepdim=True)
    return ids, torch.where(bad, torch.nan, weights)


def _check(router: Router, experts: int) -> None:
    if not 1 <= router.top_k <= experts:
        raise ValueError(f"top_k must be in 1 … {experts} experts; it is {router.top_k}.")
    if not (math.isfinite(router.temperature) and router.temperature > 0):
        raise ValueError(f"the temperature must be positive; it is {router.temperature!r}.")


@MOE_ROUTE.register("aten")
def _aten(x_TH: Tensor, weight_EH: Tensor, router: AnyRouter) -> tuple[Tensor, Tensor]:
    return choose_experts(x_TH.float() @ weight_EH.float().T, router)


@MOE_ROUTE.register("reference")
def _reference(x_TH: Tensor, weight_EH: Tensor, router: AnyRouter) -> tuple[Tensor, Tensor]:
    ids, weights = choose_experts(x_TH.double() @ weight_EH.double().T, router)
    return ids, weights.float()
