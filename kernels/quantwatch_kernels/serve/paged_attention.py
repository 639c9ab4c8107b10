"""Attention over pages: prefill and decode of several sequences, each through its block table.

Queries of all sequences lie behind each other [T, Hq, D], `q_indptr` saying where each begins; they
are the last tokens of their sequence, whose keys and values are in pages [P, page_size, Hkv, D] in
the order of the plan's `kv_indices`. Query head h reads key head h // (Hq / Hkv). A query at
position t sees the keys t − window + 1 … t.

`torch` is the slow twin that kernels are tested against: one sequence at a time, gathered, in
float32 (float64 for float64, which `reference` takes for every dtype). With `pages_per_part` the
keys are taken in parts that are merged by their log-sum-exps, as split kernels do; `triton` makes
all parts at once. Slots behind a sequence's last token are never read: what a page held before may
be NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op
from quantwatch_kernels.serve.merge import merge_states
from quantwatch_kernels.serve.paged_plan import PagedPlan

__all__ = ["PAGED_ATTENTION", "AttentionRule", "PagedOutput", "paged_attention"]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a model's attention does with scores. Raises ValueError for a window below 1."""

    scaling: float | None = None
    """None: 1/√D."""
    softcap: float | None = None
    window: int | None = None
    """Keys that a query sees, itself among them; None: all before it."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window holds at least the query's own key; it is {self.window}.")


class PagedOutput(NamedTuple):
    """Outputs [T, Hq, D] in the queries' dtype, and log-sum-exps of the scores [T, Hq]."""

    out: Tensor
    lse: Tensor


PAGED_ATTENTION: Op[
    [Tensor, Tensor, tuple[Tensor, Tensor], PagedPlan, AttentionRule, int | None], PagedOutput
] = Op("paged_attention")
"""(queries, q_indptr, pages, plan, rule, pages per part) → (out, lse)."""


def paged_attention(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: AttentionRule = AttentionRule(),
    pages_per_part: int | None = None,
) -> PagedOutput:
    """Attend; a sequence may have no query. Raises ValueError for what doesn't fit the plan."""
    _check(queries, q_indptr, pages, plan)
    return PAGED_ATTENTION.run(None, queries, q_indptr, pages, plan, rule, pages_per_part)


@PAGED_ATTENTION.register("torch")
def _torch(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: AttentionRule,
    pages_per_part: int | None,
) -> PagedOutput:
    out = torch.zeros_like(queries)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    lse = queries.new_full(queries.shape[:2], -torch.inf, dtype=dtype)
    for number in range(len(plan.kv_start)):
        rows = slice(int(q_indptr[number]), int(q_indptr[number + 1]))
        if rows.start == rows.stop:
            continue
        mine = queries[rows].to(dtype)
        parts = [_attend(mine, *part, rule) for part in _parts(pages, plan, number, pages_per_part)]
        found, lse[rows] = merge_states(parts)
        out[rows] = found.to(queries.dtype)
    return PagedOutput(out, lse)


@PAGED_ATTENTION.register("reference")
def _reference(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: AttentionRule,
    pages_per_part: int | None,
) -> PagedOutput:
    out, lse = _torch(queries.double(), q_indptr, pages, plan, rule, pages_per_part)
    return PagedOutput(
        out.to(queries.dtype), lse.to(torch.promote_types(queries.dtype, torch.float32))
    )


def _triton_why_not(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: AttentionRule,
    pages_per_part: int | None,
) -> str | None:
    del q_indptr, plan, rule, pages_per_part
    if other := [page.dtype for page in pages if page.dtype != queries.dtype]:
        return f"the Triton kernel multiplies one dtype, not {queries.dtype} with {other[0]}"
    if queries.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernel sums in float32, not {queries.dtype}"
    if queries.shape[-1] > 256:
        return f"heads of {queries.shape[-1]} features; a program holds 256"
    if away := [page.device for page in pages if page.device != queries.device]:
        return f"queries lie on {queries.device} and pages on {away[0]}"
    return triton_why_not(queries, bfloat16=queries.dtype == torch.bfloat16)


@PAGED_ATTENTION.register("triton", _triton_why_not)
def _triton(
    queries: Tensor,
    q_indptr: Tensor,
    pages: tuple[Tensor, Tensor],
    plan: PagedPlan,
    rule: AttentionRule,
    pages_per_part: int | None,
) -> PagedOutput:
    from quantwatch_kernels.serve.triton.paged_attention import paged_attention_triton

    said = (rule.scaling, rule.softcap, rule.window)
    parts = paged_attention_triton(queries, q_indptr, pages, plan, said, pages_per_part)
    out, lse = merge_states(list(zip(*parts, strict=True)))
    return PagedOutput(out.to(queries.dtype), lse)


def _parts(
    pages: tuple[Tensor, Tensor], plan: PagedPlan, number: int, size: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield keys and values [K, Hkv, D], their positions, and the sequence's length."""
    first, last = int(plan.kv_indptr[number]), int(plan.kv_indptr[number + 1])
    held = int(plan.kv_lengths[number])
    start, length = int(plan.kv_start[number]), int(plan.kv_start[number]) + held
    for page in range(first, last, size or last - first):
        ids = plan.kv_indices[page : min(page + (size or last), last)].long().to(pages[0].device)
        begin = (page - first) * plan.page_size
        count = min(len(ids) * plan.page_size, held - begin)
        keys, values = (plane[ids].flatten(0, 1)[:count] for plane in pages)
        yield keys, values, start + begin + torch.arange(count, device=keys.device), length


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    length: int,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, Hq, D] and log-sum-exps [T, Hq] over one part of the keys."""
    count, heads, features = queries.shape
    groups = heads // keys.shape[1]
    keys, values = (
        x.to(queries.dtype).repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values)
    )
    scores = queries.transpose(0, 1) @ keys.mT
    scores = scores * (1 / math.sqrt(features) if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    own = torch.arange(length - count, length, device=keys.device)[:, None]
    seen = position <= own
    if rule.window is not None:
        seen &= position > own - rule.window
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    shares = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return (shares @ values).transpose(0, 1), lse.T


def _check(
    queries: Tensor, q_indptr: Tensor, pages: tuple[Tensor, Tensor], plan: PagedPlan
) -> None:
    keys, values = pages
    if keys.ndim != 4 or keys.shape != values.shape or keys.shape[1] != plan.page_size:
        raise ValueError(
            f"pages are [P, {plan.page_size}, Hkv, D] for keys and values alike; they are "
            f"{list(keys.shape)} and {list(values.shape)}."
        )
    if queries.ndim != 3 or queries.shape[1] % keys.shape[2] or queries.shape[2] != keys.shape[3]:
        raise ValueError(f"queries {list(queries.shape)} don't fit pages {list(keys.shape)}.")
    counts = q_indptr.diff()
    sequences = len(plan.kv_start)
    if len(counts) != sequences or int(q_indptr[0]) != 0 or int(q_indptr[-1]) != len(queries):
        raise ValueError(
            f"q_indptr must go from 0 to {len(queries)} over {sequences} sequences; "
            f"it is {q_indptr.tolist()}."
        )
    if sequences and bool(((counts < 0) | (counts > plan.kv_lengths)).any()):
        raise ValueError(
            f"a sequence has at most as many queries as keys; {counts.tolist()} queries for "
            f"{plan.kv_lengths.tolist()} keys."
        )
