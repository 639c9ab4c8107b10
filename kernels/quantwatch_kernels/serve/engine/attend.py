"""Attention of one group of queries over the keys that were gathered for it.

Head h of the queries reads head h // G of the keys, G = Hq / Hkv. Without a soft-cap it is
scaled_dot_product_attention: one query per text takes its G heads as G queries of the key's head,
so nothing is repeated. A soft-cap (cap · tanh(score / cap), Gemma 2) has no such kernel and is
written out, the softmax in float32.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantwatch_kernels.serve.engine.layout import Part
from quantwatch_kernels.serve.paged_attention import AttentionRule

__all__ = ["attend"]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, part: Part, rule: AttentionRule
) -> Tensor:
    """Return [B · Tq, Hq, Dv] for queries [B · Tq, Hq, D], keys and values [B, Hkv, S, D]."""
    batch, heads = part.size, keys.shape[1]
    count, groups = len(queries) // batch, queries.shape[1] // heads
    if rule.softcap is None and count > 1:
        q = queries.view(batch, count, -1, queries.shape[-1]).transpose(1, 2)
        out = scaled_dot_product_attention(
            *(q, keys, values, part.mask),
            is_causal=part.causal,
            scale=rule.scaling,
            enable_gqa=groups > 1,
        )
        return out.transpose(1, 2).flatten(0, 1)
    # [B, Hkv, Tq · G, D]: the queries of a key's head, token after token.
    q = queries.view(batch, count, heads, groups, -1).transpose(1, 2).flatten(2, 3)
    if rule.softcap is None:
        out = scaled_dot_product_attention(q, keys, values, part.mask, scale=rule.scaling)
    else:
        out = _capped(q, keys, values, _per_head(part, count, groups), rule)
    out = out.view(batch, heads, count, groups, -1).transpose(1, 2)
    return out.reshape(batch * count, heads * groups, out.shape[-1])


def _per_head(part: Part, count: int, groups: int) -> Tensor | None:
    """Return the mask for queries that stand `groups` times behind each other."""
    mask = part.mask
    if part.causal:
        seen = torch.ones(count, count, dtype=torch.bool, device=part.tokens.device).tril()
        mask = torch.zeros(count, count, device=seen.device).masked_fill_(~seen, -torch.inf)
        mask = mask[None, None]
    return None if mask is None else mask.repeat_interleave(groups, -2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    assert rule.softcap is not None
    scaling = 1 / math.sqrt(q.shape[-1]) if rule.scaling is None else rule.scaling
    scores = rule.softcap * torch.tanh(q @ k.mT * scaling / rule.softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
