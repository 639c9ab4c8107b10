"""Attention in parts: outputs and log-sum-exps of disjoint sets of keys, put together.

With m = max lse_i, w_i = exp(lse_i − m): out = Σ w_i out_i / Σ w_i, lse = m + log Σ w_i. A part
without keys has lse −∞ and counts nothing, whatever its output says; if all are empty the output is
0 and the log-sum-exp −∞.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge_states"]


def merge_states(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (out [.., D], lse [..]) of parts of the same shapes, at least in float32.

    Raises ValueError for none.
    """
    if not parts:
        raise ValueError("there must be at least one part of attention to merge.")
    dtype = torch.promote_types(parts[0][0].dtype, torch.float32)
    outs, lses = (torch.stack([part[i].to(dtype) for part in parts]) for i in (0, 1))
    highest = lses.amax(0)
    base = torch.where(highest == -torch.inf, 0.0, highest)
    weights = (lses - base).exp()
    total = weights.sum(0)
    counted = torch.where((lses == -torch.inf)[..., None], 0.0, outs)
    out = (weights[..., None] * counted).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return out, base + total.log()
