"""Attention whose scores come from int8 codes, and what repairs them.

With codes q̂ = round(q / s_q), k̂ alike, half to even, s = absmax / 127:

- plain: s = s_q s_k · q̂ k̂ᵀ, one scale per tensor (or per token).
- smoothed keys (SageAttention, 2410.02367): k − k̄, k̄ the mean over the keys, is quantized. Every
  score of a query changes by the same q·k̄, which softmax doesn't see; the log-sum-exp does: it is
  added there. (So does a soft-cap: there it is added to the scores before.)
- the query's residual: r_q = q − s_q q̂, kept in float16, is multiplied with the keys' codes and
  added: what is left is the keys' rounding, q·r_k.
- both residuals: + q·r_k, r_k in float16 too. What is left is the rounding of the residuals.

P V is float32. Masked keys enter neither scales nor the mean. The product itself is `int8_qk`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.serve.int8_qk import INT8_QK, Coded

__all__ = ["ATTENTIONS", "Attended", "Int8Scores", "attention_named", "int8_attention",
           "int8_scores"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8Scores:
    """Which of the repairs are done."""

    smooth: bool = False
    residual: Literal["none", "query", "both"] = "none"
    scale: Literal["tensor", "token"] = "tensor"


ATTENTIONS: dict[str, Int8Scores] = {
    "int8-plain": Int8Scores(),
    "int8-token": Int8Scores(scale="token"),
    "int8-smooth": Int8Scores(smooth=True),
    "int8-smooth-token": Int8Scores(smooth=True, scale="token"),
    "int8-query": Int8Scores(residual="query"),
    "int8-smooth-query": Int8Scores(smooth=True, residual="query"),
    "int8-both": Int8Scores(residual="both"),
    "int8-smooth-both": Int8Scores(smooth=True, residual="both"),
}
"""By name, as a check or a table says it; what each costs is in docs/kernels.md."""


def attention_named(name: str) -> Int8Scores:
    """Return the scores of a name. Raises ValueError naming what is allowed."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}; allowed are {', '.join(ATTENTIONS)}.")
    return ATTENTIONS[name]


class Attended(NamedTuple):
    """Outputs [B, H, Tq, D] and the log-sum-exp of the true scores [B, H, Tq]; −∞: nothing seen."""

    out: Tensor
    lse: Tensor


def int8_scores(
    query: Tensor, keys: Tensor, how: Int8Scores, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return q·kᵀ less a number per query, float32 [B, H, Tq, Tk], and that number [B, H, Tq, 1].

    Queries [B, H, Tq, D], keys [B, H, Tk, D]; `seen` bool [Tk], keys that any query sees. Raises
    ValueError for shapes that don't fit. A NaN makes every score NaN that shares its scale.
    """
    if query.ndim != 4 or query.shape[:2] != keys.shape[:2] or query.shape[3] != keys.shape[3]:
        raise ValueError(
            f"queries {list(query.shape)} and keys {list(keys.shape)} must be [B, H, T, D] with "
            "the same B, H and D."
        )
    q, k = query.float(), keys.float()
    if seen is not None:
        k = k.where(seen[:, None], 0.0)
    shift = torch.zeros_like(q[..., :1])
    if how.smooth and k.shape[2]:
        count = k.shape[2] if seen is None else seen.sum().clamp(min=1)
        mean = k.sum(2, keepdim=True) / count
        k = k - mean if seen is None else (k - mean).where(seen[:, None], 0.0)
        shift = q @ mean.mT
    coded_q, coded_k = (_coded(x, how.scale) for x in (q, k))
    if how.residual != "none":
        coded_q = coded_q._replace(residual=(q - coded_q.codes * coded_q.scales).half())
    if how.residual == "both":
        coded_k = coded_k._replace(residual=(k - coded_k.codes * coded_k.scales).half())
    return INT8_QK.run(None, coded_q, coded_k, q), shift


def int8_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    how: Int8Scores,
    *,
    scaling: float | None = None,
    causal: bool = True,
) -> Attended:
    """Return attention in float32; keys and values [B, Hkv, Tk, D], queries the last Tq of Tk.

    Raises ValueError for more queries than keys with `causal`, and for heads that don't divide.
    """
    heads, shared, queries, total = query.shape[1], keys.shape[1], query.shape[2], keys.shape[2]
    if heads % shared or (causal and queries > total):
        raise ValueError(
            f"{heads} query heads and {queries} queries don't fit {shared} heads and {total} keys."
        )
    keys, values = (x.float().repeat_interleave(heads // shared, 1) for x in (keys, values))
    scores, shift = int8_scores(query, keys, how)
    factor = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    scores = scores * factor
    if causal:
        position = torch.arange(total, device=query.device)
        own = torch.arange(total - queries, total, device=query.device)
        scores = scores.masked_fill(position > own[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values
    return Attended(out, lse + factor * shift[..., 0])


def _coded(x: Tensor, scale: str) -> Coded:
    """Return codes −127 … 127, 0 for a NaN, and scales [B, H, T, 1]."""
    if not x.numel():
        return Coded(x.to(torch.int8), x.new_ones(1, 1, 1, 1).expand(*x.shape[:3], 1))
    largest = (
        x.abs().amax(-1, keepdim=True)
        if scale == "token"
        else x.abs().amax()[None, None, None, None]
    )
    scales = largest / 127
    scales = torch.where(scales == 0, 1.0, scales).expand(*x.shape[:3], 1)
    codes = (x / scales).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return Coded(codes, scales)
