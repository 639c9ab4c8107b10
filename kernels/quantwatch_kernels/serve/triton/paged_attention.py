"""Attention through block tables: one program a query, a key head and a part of the keys.

A program holds the query heads that share its key head, walks the pages of its sequence and keeps a
running maximum, sum and output (online softmax). Decoding is what it is made for: with many queries
to a sequence each reads the keys anew. Parts of `pages_per_part` pages are merged by their
log-sum-exps afterwards (`merge_states`), so that one long sequence fills a GPU.

A slot is loaded only if the query sees it: behind the sequence's end, in its future or in front of
its window there may be NaN. Scores are exact products summed in float32. Shares P of 16-bit values
are multiplied in two parts, P = high + low in that dtype, so that rounding P costs nothing.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.serve.paged_plan import PagedPlan
from quantwatch_kernels.serve.triton.parts import hyperbolic_tangent

__all__ = ["paged_attention_triton"]

_BLOCK_N = 32


@triton.jit
def _paged_attention(
    q, k, v, out, lse, pages, first, ends, lows, T, scaling, cap, HEADS, part,
    q_t, q_h, q_d, k_p, k_s, k_h, k_d, v_p, v_s, v_h, v_d,
    PAGE: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, HAS_CAP: tl.constexpr,
    PADDED_G: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g, d = tl.arange(0, PADDED_G), tl.arange(0, PADDED_D)
    heads = head * GROUPS + g
    rows = (g[:, None] < GROUPS) & (d[None, :] < D)
    at = q + t * q_t + heads[:, None] * q_h + d[None, :] * q_d
    query = tl.load(at, mask=rows, other=0.0)
    # Keys are counted from the first listed page on; this query sees low … end − 1 of them.
    low = tl.load(lows + t, mask=t < T, other=0)
    end = tl.load(ends + t, mask=t < T, other=0)
    table = tl.load(first + t, mask=t < T, other=0)
    begin = tl.program_id(2) * part
    stop = tl.minimum(end, begin + part)
    begin = tl.maximum(begin, (low // BLOCK_N) * BLOCK_N)
    highest = tl.full((PADDED_G,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_G,), tl.float32)
    mixed = tl.zeros((PADDED_G, PADDED_D), tl.float32)
    for start in range(begin, stop, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = (n >= low) & (n < stop)
        page = tl.load(pages + table + n // PAGE, mask=seen, other=0).to(tl.int64)
        slot = n % PAGE
        k_at = k + (page * k_p + slot * k_s + head * k_h)[None, :] + d[:, None] * k_d
        keys = tl.load(k_at, mask=seen[None, :] & (d[:, None] < D), other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scaling
        if HAS_CAP:
            scores = cap * hyperbolic_tangent(tl.div_rn(scores, cap))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - base[:, None])
        fading = tl.exp(highest - base)
        total = total * fading + tl.sum(shares, axis=1)
        v_at = v + (page * v_p + slot * v_s + head * v_h)[:, None] + d[None, :] * v_d
        values = tl.load(v_at, mask=seen[:, None] & (d[None, :] < D), other=0.0)
        mixed = mixed * fading[:, None]
        if values.dtype == tl.float32:
            mixed = tl.dot(shares, values, mixed, input_precision="ieee")
        else:
            high = shares.to(values.dtype)
            low_part = (shares - high.to(tl.float32)).to(values.dtype)
            mixed = tl.dot(low_part, values, tl.dot(high, values, mixed))
        highest = higher
    some = tl.where(total == 0.0, 1.0, total)
    place = (tl.program_id(2) * T + t) * HEADS + heads
    base = tl.where(highest == float("-inf"), 0.0, highest)
    logs = tl.where(total == 0.0, float("-inf"), base + tl.log(some))
    tl.store(lse + place, logs, mask=g < GROUPS)
    tl.store(out + place[:, None] * D + d[None, :], tl.div_rn(mixed, some[:, None]), mask=rows)


def _ranges(
    q_indptr: Tensor, plan: PagedPlan, window: int | None, device: torch.device
) -> tuple[list[Tensor], int]:
    """Return int32 [T] of each query: first page entry, end, low; and the most keys."""
    counts = q_indptr.diff().long()
    owner = torch.repeat_interleave(counts)
    # A query's place among its sequence's, from the last: the last sees everything.
    rank = torch.arange(len(owner)) - q_indptr[:-1].long()[owner]
    ends = plan.kv_lengths.long()[owner] - counts[owner] + rank + 1
    lows = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    parts = (plan.kv_indptr[:-1].long()[owner], ends, lows)
    most = int(plan.kv_lengths.max()) if len(plan.kv_start) else 0
    return [part.to(torch.int32).to(device) for part in parts], most


def paged_attention_triton(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: tuple[float | None, float | None, int | None],
    pages_per_part: int | None,
) -> tuple[Tensor, Tensor]:
    """Return float32 outputs [P, T, Hq, D] and log-sum-exps [P, T, Hq] of P parts of the keys.

    `rule` is (scaling, softcap, window); P is 1 without `pages_per_part`.
    """
    scaling, softcap, window = rule
    (T, heads, D), shared = queries.shape, pages[0].shape[2]
    ranges, most = _ranges(q_indptr, plan, window, queries.device)
    part = max(most, 1) if pages_per_part is None else pages_per_part * plan.page_size
    parts = max(1, -(-most // part))
    out = torch.empty(parts, T, heads, D, dtype=torch.float32, device=queries.device)
    lse = torch.empty(parts, T, heads, dtype=torch.float32, device=queries.device)
    if not lse.numel():
        return out, lse
    groups = heads // shared
    _paged_attention[T, shared, parts](
        queries, *pages, out, lse, plan.kv_indices.to(queries.device), *ranges, T,
        1 / math.sqrt(D) if scaling is None else scaling, 1.0 if softcap is None else softcap,
        heads, part, *queries.stride(), *pages[0].stride(), *pages[1].stride(),
        PAGE=plan.page_size, GROUPS=groups, D=D, HAS_CAP=softcap is not None,
        PADDED_G=max(16, triton.next_power_of_2(groups)),
        PADDED_D=max(16, triton.next_power_of_2(D)), BLOCK_N=_BLOCK_N, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse
