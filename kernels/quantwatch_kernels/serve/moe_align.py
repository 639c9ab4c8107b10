"""Slots sorted by expert and padded to blocks: what a grouped GEMM runs over.

Token t's j-th expert is slot t · k + j. Slots are sorted by expert id, stably, so that a slot's
place doesn't depend on other tokens' order; each expert's slots are filled up to whole blocks with
the sentinel T · k, so that a block belongs to one expert. Id −1 (an expert on another device) has
no place. An expert without a token has no block, so its weights are never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockPlan", "align_blocks"]


class BlockPlan(NamedTuple):
    """P padded rows in P ÷ block blocks."""

    slots: Tensor
    """int64 [P]: the slot of each row, T · k where it is padding."""
    block_experts: Tensor
    """int64 [P ÷ block]: the expert of each block."""
    first_row: Tensor
    """int64 [E + 1]: where each expert's rows begin; the last is P."""


def align_blocks(ids_TK: Tensor, experts: int, block: int) -> BlockPlan:
    """Return the plan for expert ids [T, k], int32 or int64.

    Raises ValueError for another dtype, an id outside −1 … E − 1, or a block below 1.
    """
    if ids_TK.ndim != 2 or ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert ids must be int32 or int64 [T, k]; they are {ids_TK.dtype} "
            f"{list(ids_TK.shape)}."
        )
    if block < 1 or experts < 1:
        raise ValueError(f"block and experts must be at least 1: {block}, {experts}.")
    ids = ids_TK.flatten().long()
    if ids.numel() and not (int(ids.min()) >= -1 and int(ids.max()) < experts):
        raise ValueError(
            f"expert ids lie in −1 … {experts - 1}; these span {int(ids.min())} … {int(ids.max())}."
        )
    counts = torch.bincount(ids[ids >= 0], minlength=experts)
    padded = (counts + block - 1) // block * block
    first_row = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    order = torch.sort(ids, stable=True).indices[int((ids < 0).sum()) :]
    owner = ids[order]
    # Place within the expert: rank among all, less the slots of the experts before it.
    before = counts.cumsum(0) - counts
    rows = first_row[owner] + torch.arange(len(order), device=ids.device) - before[owner]
    slots = torch.full((int(first_row[-1]),), ids.numel(), dtype=torch.int64, device=ids.device)
    slots[rows] = order
    block_experts = torch.repeat_interleave(padded // block)
    return BlockPlan(slots, block_experts, first_row)
