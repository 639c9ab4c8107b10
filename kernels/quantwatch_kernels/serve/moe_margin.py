"""Which choices of a router are decided, and which rounding could have made otherwise.

A logit is a sum of H products, z_e = Σ_h x_h · w_eh, taken as given x and w. In another order of
summation it comes out a little different, and near the border of the k chosen that is another
expert: no fault. How much different: rounding errors of a sum behave like independent ones and grow
with √H, so with u half the spacing at 1 of the dtype that sums (float32; float64 of float64 logits)

    δ(z_e) = √H · u · Σ_h |x_h · w_eh|  +  u · (4 + z_max − z_e)  +  ½ · spacing of z_e,

the middle term for the float32 softmax among whose values modules choose, the last in the dtype of
the logits: bfloat16 ones lie 2⁻⁷ apart from 1 on. (H · u, the bound that can't be exceeded, is
√H times that; √H · u itself is 20 times the worst that was seen at H = 4,096, and what is decided
by less is told as a tie.) A choice is decided if the intervals z ± δ of the chosen lie above all of
the others:

    min over chosen (z − δ)  >  max over the others (z + δ).

Sigmoid scores move by at most a quarter of their logit, so c = σ(z) + b has δ(z) ÷ 4 plus the
rounding of both steps, u · (4 + |c|). With groups, the groups must be decided as well: a sum of the
two largest moves by at most twice the largest δ of its group.

What already differs in x is not rounding of the router: that it may change experts is what is
measured. How often a model disagrees with itself is the noise floor's business.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.numerics import spacing
from quantwatch_kernels.serve.moe_grouped import GroupedRouter, group_values
from quantwatch_kernels.serve.moe_router import AnyRouter

__all__ = ["Routed", "decided_choices", "logit_rounding"]


class Routed(NamedTuple):
    """What a router was given, and what it made of it; x [T, H], weight [E, H]."""

    x: Tensor
    weight: Tensor
    logits: Tensor
    """[T, E], as the module computed them."""


def logit_rounding(routed: Routed) -> Tensor:
    """Return δ of each logit, float64 [T, E]. Raises ValueError for shapes that don't fit."""
    x, weight, logits = routed
    if x.ndim != 2 or weight.shape != (logits.shape[1], x.shape[1]) or len(x) != len(logits):
        raise ValueError(
            f"x {list(x.shape)}, weight {list(weight.shape)} and logits {list(logits.shape)} "
            "don't fit: [T, H], [E, H] and [T, E] are wanted."
        )
    sums_in = torch.float64 if logits.dtype == torch.float64 else torch.float32
    u = torch.finfo(sums_in).eps / 2
    sizes = (x.to(sums_in).abs() @ weight.to(sums_in).abs().T).double()
    z = logits.double()
    softmax = u * (4 + z.amax(-1, keepdim=True) - z)
    return math.sqrt(x.shape[1]) * u * sizes + softmax + spacing(z, logits.dtype) / 2


def decided_choices(routed: Routed, ids_Tk: Tensor, router: AnyRouter) -> Tensor:
    """Say of each token whether rounding could not have chosen other experts, bool [T].

    `ids_Tk` are the experts that the module chose. A NaN decides nothing.

    Raises ValueError where the module's choice is not its family's rule, beyond rounding.
    """
    z, error = routed.logits.double(), logit_rounding(routed)
    chosen = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids_Tk.long(), True)
    reach = torch.ones_like(chosen)
    decided = torch.ones(len(z), dtype=torch.bool, device=z.device)
    if isinstance(router, GroupedRouter):
        u = torch.finfo(torch.float32).eps / 2
        z = torch.sigmoid(z) + router.bias.double()
        error = error / 4 + u * (4 + z.abs())
        reach, decided = _groups(z, error, router)
    # Where the groups are not decided, nothing is; where they are, these are the only experts.
    inside = (chosen & reach).sum(-1) == ids_Tk.shape[1]
    gap = _border(z - error, chosen, z + error, ~chosen & reach)
    wrong = _border(z + error, chosen, z - error, ~chosen & reach) < 0
    broken = decided & (wrong | ~inside) & z.isfinite().all(-1)
    if bool(broken.any()):
        raise ValueError(
            f"{int(broken.sum())} of {len(z)} tokens went to other experts than "
            f"{type(router).__name__} chooses, beyond rounding."
        )
    return decided & inside & (gap > 0)


def _border(low: Tensor, inner: Tensor, high: Tensor, outer: Tensor) -> Tensor:
    """Return min of `low` over `inner` minus max of `high` over `outer`; +∞ where one is empty."""
    least = low.masked_fill(~inner, torch.inf).amin(-1)
    return least - high.masked_fill(~outer, -torch.inf).amax(-1)


def _groups(choice: Tensor, error: Tensor, router: GroupedRouter) -> tuple[Tensor, Tensor]:
    """Return the experts in the best groups, bool [T, E], and whether those are decided, [T]."""
    size = choice.shape[1] // router.groups
    value = group_values(choice, router.groups)
    moves = 2 * error.view(len(choice), router.groups, size).amax(-1)
    _, order = torch.sort(value, dim=-1, descending=True, stable=True)
    best = torch.zeros_like(value, dtype=torch.bool)
    best.scatter_(1, order[:, : router.top_groups], True)
    gap = _border(value - moves, best, value + moves, ~best)
    return best.repeat_interleave(size, 1), gap > 0
