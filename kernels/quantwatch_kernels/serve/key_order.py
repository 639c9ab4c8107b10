"""Keys of a 2-D arrangement in Z-order (Morton), and attention that doesn't notice.

A key at (row, column) has the code whose bits are those of row and column in turn, column first:
z = … r₁c₁r₀c₀. Sorted by it, 2ᵏ × 2ᵏ squares lie together, so blocks of 4ᵏ keys are squares where
row-major blocks are strips. Softmax is a sum over keys and has no order of its own; what depends on
order are masks. They must go by the keys' *positions*, which travel with the keys: masked by where
a key lies in memory, a causal model would see its future.

What it is good for: a square window touches fewer blocks (`window_blocks`). The mean distance of
neighbours in memory (`neighbour_distance`) is no better: for squares of a power of two it equals
that of rows, (1 + width) ÷ 2. For text there is nothing to gain: its keys have one dimension, are
read from first to last and lie so already. Nothing here is claimed to be faster.
"""

import math

import torch
from torch import Tensor

from quantwatch_kernels.serve.paged_attention import AttentionRule

__all__ = ["attention_by_position", "morton", "neighbour_distance", "window_blocks", "z_order"]

_BITS = 31
_PLAIN = AttentionRule()


def morton(rows: Tensor, columns: Tensor) -> Tensor:
    """Return int64 codes of integer coordinates of one shape, each in 0 … 2³¹ − 1.

    Raises ValueError outside.
    """
    for name, each in (("rows", rows), ("columns", columns)):
        if each.is_floating_point() or each.shape != rows.shape:
            raise ValueError(f"{name} must be integers {list(rows.shape)}; they are {each.dtype}.")
        if each.numel() and not (int(each.min()) >= 0 and int(each.max()) < 1 << _BITS):
            raise ValueError(f"{name} lie in 0 … {(1 << _BITS) - 1}, not {int(each.min())} …")
    code = torch.zeros_like(rows, dtype=torch.int64)
    for bit in range(_BITS):
        code |= ((columns.long() >> bit) & 1) << (2 * bit)
        code |= ((rows.long() >> bit) & 1) << (2 * bit + 1)
    return code


def z_order(height: int, width: int) -> Tensor:
    """Return int64 [height · width]: which key, counted row by row, lies in each place.

    Any sizes: places of keys that aren't there are left out. `order.split(n)` are its blocks of n.
    Raises ValueError for a size below 1.
    """
    if height < 1 or width < 1:
        raise ValueError(f"height and width are at least 1; they are {height} and {width}.")
    key = torch.arange(height * width)
    return morton(key // width, key % width).argsort()


def attention_by_position(
    queries: Tensor,
    cached: tuple[Tensor, Tensor],
    positions: tuple[Tensor, Tensor],
    rule: AttentionRule = _PLAIN,
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, Hq, Tq, D] and log-sum-exps [B, Hq, Tq], in whatever order the keys lie.

    Keys and values [B, Hkv, Tk, D]; integer positions of queries [Tq] and of keys [Tk]. With
    `causal` a query sees the keys at its own position and before; a window counts positions. A
    query that sees nothing gets zeros. At least float32. Raises ValueError for shapes that don't
    fit, and for a window without `causal`.
    """
    keys, values = cached
    heads, shared = queries.shape[1], keys.shape[1]
    own, other = positions
    if own.shape != queries.shape[2:3] or other.shape != keys.shape[2:3] or heads % shared:
        raise ValueError(
            f"queries {list(queries.shape)} at {list(own.shape)} positions don't fit keys "
            f"{list(keys.shape)} at {list(other.shape)}."
        )
    if rule.window is not None and not causal:
        raise ValueError("a window is of the keys before a query: it needs causal.")
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys, values = (x.to(dtype).repeat_interleave(heads // shared, 1) for x in (keys, values))
    factor = 1 / math.sqrt(queries.shape[-1]) if rule.scaling is None else rule.scaling
    scores = queries.to(dtype) @ keys.mT * factor
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    seen = torch.ones(len(own), len(other), dtype=torch.bool, device=queries.device)
    if causal:
        seen = other <= own[:, None]
    if rule.window is not None:
        seen = seen & (other > own[:, None] - rule.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    shares = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return (shares @ values).to(queries.dtype), lse


def neighbour_distance(order: Tensor, height: int, width: int) -> float:
    """Return the mean distance in memory, in keys, of keys that are neighbours in a row or column.

    Raises ValueError for an order that isn't one of height · width keys, or of a single key.
    """
    place = _places(order, height, width)
    gaps = [place.diff(dim=dim).abs().flatten() for dim in (0, 1)]
    if height * width == 1:
        raise ValueError("a single key has no neighbour.")
    return float(torch.cat(gaps).double().mean())


def window_blocks(order: Tensor, height: int, width: int, window: int, block: int) -> float:
    """Return how many blocks of `block` keys a window × window square touches, on average.

    Over all places where it lies inside. Raises ValueError where there is none, and as above.
    """
    if not 1 <= window <= min(height, width) or block < 1:
        raise ValueError(f"a window of {window} and blocks of {block} in {height} × {width} keys.")
    blocks = _places(order, height, width) // block
    windows = blocks.unfold(0, window, 1).unfold(1, window, 1).flatten(2).flatten(0, 1)
    ordered = windows.sort(-1).values
    return float((1 + (ordered.diff(dim=-1) != 0).sum(-1)).double().mean())


def _places(order: Tensor, height: int, width: int) -> Tensor:
    """Return where each key lies, [height, width]."""
    keys = torch.arange(height * width)
    if order.shape != keys.shape or not torch.equal(order.sort().values, keys):
        raise ValueError(f"an order of {height} × {width} keys names each once; this doesn't.")
    return torch.empty_like(keys).scatter_(0, order, keys).view(height, width)
