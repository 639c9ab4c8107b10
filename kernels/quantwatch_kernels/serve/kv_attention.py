"""Attention over a cache that is partly codes, for all queries of a text at once.

For query t and key j, M[t, j] says whether t finds codes in place of j (`kv_reads`). With K̂, V̂
what the codes say, g = Hq/Hkv queries per key head:

    s = scaling · (q·K̂ᵀ where M, else q·Kᵀ);  P = softmax(softcap(s) + mask)
    out = (P·M) V̂ + (P·(1 − M)) V

Both products are made in full: twice the work of attention, for exactly the numbers that a prefill
and a decode loop would give, without the loop. Arithmetic is float32; a key that is masked has
P = 0, so a NaN there harms nobody: it is set to 0 before it is multiplied. (A float64 model is
computed in float64, its codes made of float32.)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Score", "mixed_attention", "seen_keys"]


@dataclass(frozen=True, slots=True)
class Score:
    """What products of queries and keys are multiplied with and bounded by."""

    scaling: float | None = None
    """None: 1/√D."""
    softcap: float | None = None

    def of(self, products: Tensor, features: int) -> Tensor:
        """Return the scores."""
        scores = products * (1 / math.sqrt(features) if self.scaling is None else self.scaling)
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)


def mixed_attention(
    query: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: tuple[Tensor, Tensor],
    codes_read: Tensor | tuple[Tensor, Tensor],
    mask: Tensor | None,
    score: Score = Score(),
) -> Tensor:
    """Return [B, Hq, Tq, Dv] in the query's dtype: queries [B, Hq, Tq, D], keys [B, Hkv, Tk, D],
    values [B, Hkv, Tk, Dv].

    `codes_read` is bool [Tq, Tk], or a pair of masks for keys and values that broadcast to
    [B, Hkv, Tq, Tk]; `mask` bool (True: seen) or added, broadcast to [B, Hq, Tq, Tk];
    without one a query sees the keys up to its own, the queries being the last ones. A query that
    sees nothing gets zeros. Raises ValueError for shapes that don't fit.
    """
    (keys, values), groups = exact, _groups(query, exact[0])
    batch, heads, queries, features = query.shape
    pair = codes_read if isinstance(codes_read, tuple) else (codes_read, codes_read)
    seen, added = seen_keys(mask, pair[0])
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.to(dtype).reshape(batch, heads // groups, groups * queries, features)
    keys_read, reads = (torch.cat([part] * groups, -2) for part in pair)
    scores = torch.where(keys_read, q @ coded[0].to(dtype).mT, q @ keys.to(dtype).mT)
    scores = scores.reshape(batch, heads, queries, -1)
    scores = score.of(scores, features)
    scores = scores if added is None else scores + added
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    shares = torch.where(scores.isnan() & seen, torch.nan, shares)
    shares = shares.reshape(batch, heads // groups, groups * queries, -1)
    kept = [_harmless(v.to(dtype), seen) for v in (coded[1], values)]
    out = (shares * reads) @ kept[0] + (shares * ~reads) @ kept[1]
    return out.reshape(batch, heads, queries, values.shape[-1]).to(query.dtype)


def _groups(query: Tensor, keys: Tensor) -> int:
    heads, shared = query.shape[1], keys.shape[1]
    if query.ndim != 4 or keys.ndim != 4 or heads % shared or query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(keys.shape)} don't fit: [B, H, T, D] with "
            "a multiple of the keys' heads."
        )
    return heads // shared


def seen_keys(mask: Tensor | None, codes_read: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return who sees whom, and what is added to the scores of those."""
    if mask is None:
        queries, keys = codes_read.shape[-2:]
        positions = torch.arange(keys - queries, keys, device=codes_read.device)
        return torch.arange(keys, device=codes_read.device) <= positions[:, None], None
    if mask.dtype == torch.bool:
        return mask, None
    added = mask.float()
    return added > torch.finfo(mask.dtype).min, added


def _harmless(values: Tensor, seen: Tensor) -> Tensor:
    """Return the values with 0 in place of NaN and infinity where no query looks."""
    looked_at = seen.any(-2)
    while looked_at.ndim < 3:
        looked_at = looked_at[None]
    if looked_at.shape[1] not in (1, values.shape[1]):
        looked_at = looked_at.any(1, keepdim=True)
    return torch.where(looked_at[..., None], values, values.nan_to_num(0.0, 0.0, 0.0))
