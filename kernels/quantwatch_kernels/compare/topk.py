"""The K largest logits of each row, exactly, with the lowest id winning ties.

`torch.topk` over a whole row costs 56 µs at 49,152 ids and breaks ties as it likes. A row's K
largest values lie in the K blocks whose maxima come first in the order (larger value, then lower
block), so one pass of block maxima and two tiny selections are enough.
"""

import torch
from torch import Tensor

__all__ = ["top_k"]

_BLOCK = 64
_LOW = 0x7FFFFFFF


def _sortable(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys [..]: larger value first, then lower id. −0 equals +0, NaN is largest."""
    bits = (values.float() + 0.0).view(torch.int32)  # adding zero turns −0 into +0
    ordered = (bits >> 31).bitwise_and_(_LOW).bitwise_xor_(bits)
    return torch.add(_LOW - ids, ordered.long(), alpha=1 << 32)


def _largest(keys: Tensor, k: int) -> Tensor:
    """Return the positions [R, k] packed in the k largest keys, in order."""
    return _LOW - (keys.topk(k, dim=-1).values & _LOW)


def _block_maxima(z_RV: Tensor) -> Tensor:
    rows, width = z_RV.shape
    whole = width // _BLOCK * _BLOCK
    maxima = z_RV[:, :whole].reshape(rows, -1, _BLOCK).amax(-1) if whole else z_RV[:, :0]
    if whole == width:
        return maxima
    return torch.cat([maxima, z_RV[:, whole:].amax(-1, keepdim=True)], dim=-1)


def top_k(z_RV: Tensor, k: int) -> Tensor:
    """Return the ids [R, min(k, V)] of the largest logits, largest first.

    The ids of rows with a NaN are valid but mean nothing.
    """
    rows, width = z_RV.shape
    k = min(k, width)
    if rows == 0:
        return torch.zeros(0, k, dtype=torch.int64, device=z_RV.device)
    maxima = _block_maxima(z_RV)
    num_blocks = maxima.shape[-1]
    positions = torch.arange(num_blocks, device=z_RV.device)
    blocks = _largest(_sortable(maxima, positions), min(k, num_blocks))
    offsets = torch.arange(_BLOCK, device=z_RV.device)
    ids = (blocks.unsqueeze(-1) * _BLOCK + offsets).flatten(1)
    keys = _sortable(z_RV.gather(-1, ids.clamp_max(width - 1)), ids)
    if width % _BLOCK:
        keys.masked_fill_(ids >= width, torch.iinfo(torch.int64).min)
    return _largest(keys, k)
