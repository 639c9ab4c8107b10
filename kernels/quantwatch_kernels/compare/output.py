"""Output statistics: what practitioners quote about two models' next-token distributions.

One pass over chunks of rows; see `divergence.py` for the formulas and `topk.py` for the selections.
n rows, V ids, K kept logits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.compare.divergence import centre, divergences
from quantwatch_kernels.compare.exact import Exact, compare_exactly, redo_exactly
from quantwatch_kernels.compare.rows import check_pair, chunks
from quantwatch_kernels.compare.topk import top_k
from quantwatch_kernels.numerics import spacing
from quantwatch_kernels.registry import Op

__all__ = ["OutputStatistics", "leaked_mass", "output_statistics"]


_LARGEST_JS = math.log(2)


class OutputStatistics(NamedTuple):
    """Statistics per row, float64 [n], nats unless said otherwise; rows with NaN logits are NaN."""

    logit_kl: Tensor
    """KL(reference ‖ candidate)."""
    reverse_kl: Tensor
    js: Tensor
    """Jensen–Shannon divergence, at most ln 2."""
    tv: Tensor
    """Total variation, ½Σ|p − q|."""
    top1_agreement: Tensor
    """1 when the largest logits have the same id, or the two ids tie in either model."""
    topk_overlap_k5: Tensor
    topk_logit_deviation_k5: Tensor
    topk_logit_deviation_k3: Tensor
    delta_p: Tensor
    """q(target) − p(target); NaN without a target, as the next three."""
    nll_reference: Tensor
    nll_candidate: Tensor
    nll_difference: Tensor
    """ln p(target) − ln q(target), not rounded from the two above."""
    reference_ids: Tensor
    """int64 [n, K], largest logit first, lowest id first among equals."""
    reference_logits: Tensor
    """float32 [n, K]."""
    candidate_ids: Tensor
    candidate_logits: Tensor
    candidate_at_reference: Tensor
    """The candidate's logits at `reference_ids`, float32 [n, K]."""


class Heads(NamedTuple):
    """Dtypes of the heads' outputs, and how many ids to keep."""

    reference: torch.dtype
    candidate: torch.dtype
    keep: int

    @property
    def k(self) -> int:
        return max(self.keep, 5)


class _Raw(NamedTuple):
    """What the back ends find; the rest follows from a few gathered logits."""

    sums: Tensor
    """KL, reverse KL, JS, TV: float64 [4, n]."""
    target: Tensor
    """ln p, ln q, ln p − ln q at the target: float64 [3, n]."""
    reference_ids: Tensor
    candidate_ids: Tensor


OUTPUT: Op[[Tensor, Tensor, Tensor, Heads], _Raw] = Op("output_statistics")


def output_statistics(
    z_ref: Tensor,
    z_cand: Tensor,
    targets: Tensor,
    *,
    reference_dtype: torch.dtype,
    candidate_dtype: torch.dtype,
    keep: int = 10,
) -> OutputStatistics:
    """Compare logits [n, V] row by row; `targets` int64 [n], −1 where there is none.

    The dtypes are those of the heads' outputs, whose spacing decides what is a tie.
    Raises ValueError for shapes that don't fit, a target outside the vocabulary, or keep < 1.
    """
    check_pair("logits", z_ref, z_cand)
    _check_targets(targets, z_ref)
    if keep < 1:
        raise ValueError(f"keep must be at least 1; it is {keep}.")
    heads = Heads(reference_dtype, candidate_dtype, keep)
    with torch.no_grad():
        raw = OUTPUT.run(None, z_ref, z_cand, targets.clamp_min(0), heads)
        return _assemble(z_ref, z_cand, targets, heads, raw)


def _check_targets(targets: Tensor, z: Tensor) -> None:
    n, width = z.shape
    if targets.shape != (n,) or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 [{n}]; they are {targets.dtype} {list(targets.shape)}."
        )
    if n and not (int(targets.min()) >= -1 and int(targets.max()) < width):
        raise ValueError(
            f"targets must lie in -1 … {width - 1}; they span "
            f"{int(targets.min())} … {int(targets.max())}."
        )


def _at(z: Tensor, ids: Tensor) -> Tensor:
    """Gather logits at ids [n] or [n, k] as float64."""
    return z.gather(-1, ids if ids.ndim == 2 else ids.unsqueeze(-1)).double().view(ids.shape)


@OUTPUT.register("aten")
def _aten(z_ref: Tensor, z_cand: Tensor, targets: Tensor, heads: Heads) -> _Raw:
    reference_ids, candidate_ids = top_k(z_ref, heads.k), top_k(z_cand, heads.k)
    top = reference_ids[:, 0]
    parts = [_aten_chunk(a, b, t) for a, b, t in chunks(z_ref, z_cand, top)]
    *sums, log_p_top, log_ratio_less_gap = torch.cat(parts, -1)
    z_target = _at(z_ref, targets)
    log_p = log_p_top - (_at(z_ref, top) - z_target)
    ratio = z_target - _at(z_cand, targets) + log_ratio_less_gap
    target = torch.stack([log_p, log_p - ratio, ratio])
    raw = _Raw(torch.stack(sums), target, reference_ids, candidate_ids)
    for rows, exact in redo_exactly(OUTPUT.name, z_ref, z_cand, raw.sums.isnan().any(0)):
        raw.sums[:, rows], raw.target[:, rows] = _columns(exact, targets[rows])
    return raw


def _aten_chunk(z_ref: Tensor, z_cand: Tensor, top: Tensor) -> Tensor:
    """Return the four sums, ln p of the top id, and ln(p/q) − δz: float64 [6, R]."""
    c = centre(z_ref.float().contiguous(), z_cand.float().contiguous())
    log_p_top = torch.log(_at(c.p, top) / c.mass)
    *sums, offset = divergences(c)
    return torch.stack([*sums, log_p_top, offset - c.shift])


def _columns(e: Exact, targets: Tensor) -> tuple[Tensor, Tensor]:
    target = torch.stack([_at(x, targets) for x in (e.log_p, e.log_q, e.log_ratio)])
    return torch.stack([e.kl, e.reverse, e.js, e.tv]), target


@OUTPUT.register("reference")
def _reference(z_ref: Tensor, z_cand: Tensor, targets: Tensor, heads: Heads) -> _Raw:
    ids = [z.sort(dim=-1, descending=True, stable=True)[1][:, : heads.k] for z in (z_ref, z_cand)]
    return _Raw(*_columns(compare_exactly(z_ref, z_cand), targets), *ids)


def _assemble(
    z_ref: Tensor, z_cand: Tensor, targets: Tensor, heads: Heads, raw: _Raw
) -> OutputStatistics:
    ids, keep = raw.reference_ids, heads.keep
    at_reference, reference = _at(z_cand, ids), _at(z_ref, ids)
    agreement = _top1_agreement(z_ref, z_cand, heads, raw)
    overlap = (ids[:, :5, None] == raw.candidate_ids[:, None, :5]).any(-1).double().mean(-1)
    gap = (reference - at_reference).abs()
    deviation = torch.where(reference == at_reference, 0.0, gap)  # −∞ in both is no deviation
    ranks = [agreement, overlap, deviation[:, :5].mean(-1), deviation[:, :3].mean(-1)]
    undefined = raw.sums[0].isnan()
    kl, reverse, js, tv = raw.sums
    columns = [
        *(kl, reverse),
        *(js.clamp(max=_LARGEST_JS), tv.clamp(max=1.0)),  # rounding may exceed what can be
        *(column.masked_fill(undefined, torch.nan) for column in ranks),
        *(column.masked_fill(targets < 0, torch.nan) for column in _target_columns(raw)),
        ids[:, :keep],
        reference[:, :keep].float(),
        raw.candidate_ids[:, :keep],
        _at(z_cand, raw.candidate_ids[:, :keep]).float(),
        at_reference[:, :keep].float(),
    ]
    return OutputStatistics(*columns)


def _top1_agreement(z_ref: Tensor, z_cand: Tensor, heads: Heads, raw: _Raw) -> Tensor:
    ours, theirs = raw.reference_ids[:, 0], raw.candidate_ids[:, 0]
    best, best_cand = _at(z_ref, ours), _at(z_cand, theirs)
    tie = best - _at(z_ref, theirs) <= spacing(best, heads.reference)
    tie |= best_cand - _at(z_cand, ours) <= spacing(best_cand, heads.candidate)
    return ((ours == theirs) | tie).double()


def _target_columns(raw: _Raw) -> tuple[Tensor, ...]:
    log_p, log_q, ratio = raw.target
    p = log_p.exp()
    precise = p * torch.expm1(-ratio)
    delta_p = torch.where(ratio.isinf(), log_q.exp() - p, precise)
    return delta_p, -log_p, -log_q, ratio


LEAKED: Op[[Tensor, int], Tensor] = Op("leaked_mass")


def leaked_mass(z_cand: Tensor, shared: int) -> Tensor:
    """Return the candidate's probability at ids ≥ `shared`, float64 [n], of logits [n, V].

    Raises ValueError unless 1 ≤ shared ≤ V.
    """
    if z_cand.ndim != 2 or not 1 <= shared <= z_cand.shape[1]:
        raise ValueError(
            f"shared must lie in 1 … V for logits [n, V]; it is {shared} for {list(z_cand.shape)}."
        )
    with torch.no_grad():
        return LEAKED.run(None, z_cand, shared)


@LEAKED.register("aten")
def _leaked_aten(z_cand: Tensor, shared: int) -> Tensor:
    parts = []
    for (z,) in chunks(z_cand):
        p = torch.softmax(z.float(), -1)
        leaked, kept = (
            part.sum(-1, dtype=torch.float64) for part in (p[:, shared:], p[:, :shared])
        )
        parts.append(leaked / (leaked + kept))
    return torch.cat(parts)


@LEAKED.register("reference")
def _leaked_reference(z_cand: Tensor, shared: int) -> Tensor:
    return torch.softmax(z_cand.double(), -1)[:, shared:].sum(-1)
