"""A whole reference distribution against the few log-probabilities that a server tells.

Of the candidate q only a set S of ids is known: the server's k likeliest, and the token that really
came. What can be said of KL(p‖q) without guessing the rest is the KL of the coarser distributions
over S ∪ {rest}, with p(rest) = Σ_{i∉S} p_i and q(rest) = 1 − Σ_{i∈S} q_i:

    served KL = Σ_{i∈S} p_i·ln(p_i/q_i) + p(rest)·ln(p(rest)/q(rest)) ≤ KL(p‖q)

by the log-sum inequality. There is no upper bound: any id of the rest may have no probability at
all. Total variation has both: ½(Σ_S |p_i − q_i| + |p(rest) − q(rest)|) from below, and from above
½(Σ_S |p_i − q_i| + p(rest) + q(rest)). A reordered tail is invisible from below; the mass that is
not seen, p(rest), says how much that may hide.

Rounding. Told log-probabilities are float32, so q(rest) is known to about 1e-6: of that interval
the value nearest to p(rest) counts, which keeps the bound a bound. Cell by cell the sum is
p·(d + expm1(−d)), d = ln(p/q), whose terms are never negative; what it adds to p·d sums to 0.

Everything is float64: asking the server takes far longer. n rows, V ids, K told ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.compare.topk import top_k
from quantwatch_kernels.numerics import spacing

__all__ = ["ServedStatistics", "Told", "served_statistics"]

REST_ROUNDING = 1e-6
"""How far float32 log-probabilities of a few ids can be off together, as a probability."""
_ROWS = 64
_TOP = 5


class Told(NamedTuple):
    """What a server told of n rows."""

    ids: Tensor
    """int64 [n, K ≥ 5], likeliest first; −1 for an id that can't be told from its text."""
    logprobs: Tensor
    """float64 [n, K], nats."""
    target: Tensor
    """ln q of the target, float64 [n]; NaN where it isn't told."""

    def rows(self, part: slice) -> "Told":
        """Return some of the rows."""
        return Told(self.ids[part], self.logprobs[part], self.target[part])


class ServedStatistics(NamedTuple):
    """Statistics per row, float64 [n], nats unless said otherwise; NaN where it can't be known."""

    served_kl: Tensor
    """A lower bound of KL(reference ‖ candidate)."""
    served_tv: Tensor
    """A lower bound of the total variation."""
    served_tv_most: Tensor
    """An upper bound of the total variation."""
    served_unseen: Tensor
    """p(rest): the reference's probability at ids that the server told nothing of."""
    top1_agreement: Tensor
    topk_overlap_k5: Tensor
    delta_p: Tensor
    nll_reference: Tensor
    nll_candidate: Tensor
    nll_difference: Tensor


def served_statistics(
    z_ref: Tensor,
    told: Told,
    targets: Tensor,
    *,
    reference_dtype: torch.dtype,
    candidate_dtype: torch.dtype,
) -> ServedStatistics:
    """Compare logits [n, V] of the reference with what a server told; `targets` int64 [n] ≥ 0.

    The dtypes decide what is a tie. Ids ≥ V belong to the rest and can't win. Raises ValueError for
    shapes that don't fit, or a target outside the vocabulary.
    """
    _check(z_ref, told, targets)
    parts = [slice(at, at + _ROWS) for at in range(0, max(len(z_ref), 1), _ROWS)]
    with torch.no_grad():
        columns = [
            _chunk(z_ref[p], told.rows(p), targets[p], (reference_dtype, candidate_dtype))
            for p in parts
        ]
    return ServedStatistics(*torch.cat(columns, -1))


def _check(z_ref: Tensor, told: Told, targets: Tensor) -> None:
    n, width = z_ref.shape
    shapes = tuple(map(tuple, (told.ids.shape, told.logprobs.shape, told.target.shape)))
    if told.ids.ndim != 2 or told.ids.shape[1] < _TOP or width < _TOP:
        raise ValueError(f"told ids must be [{n}, K ≥ {_TOP}] of V ≥ {_TOP}; they are {shapes[0]}.")
    if shapes != ((n, shapes[0][1]), (n, shapes[0][1]), (n,)) or targets.shape != (n,):
        raise ValueError(
            f"told must have {n} rows like the logits; it has {shapes}, targets {targets.shape}."
        )
    if n and not (int(targets.min()) >= 0 and int(targets.max()) < width):
        raise ValueError(f"targets must lie in 0 … {width - 1}.")


def _chunk(
    z_ref: Tensor, told: Told, targets: Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> Tensor:
    log_p = torch.log_softmax(z_ref.double(), -1)
    undefined = log_p.isnan().any(-1)
    bounds = _bounds(log_p, *_cells(told, targets, log_p.shape[1]))
    ranks = _ranks(z_ref, told, dtypes)
    log_p_target = log_p.gather(-1, targets[:, None])[:, 0]
    ratio = log_p_target - told.target
    ratio = torch.where(told.target == -torch.inf, torch.inf, ratio)
    delta_p = log_p_target.exp() * torch.expm1(-ratio)
    # Where one model's isn't known, the other's would make two means of different tokens.
    nll = (-log_p_target).masked_fill(told.target.isnan(), torch.nan)
    columns = torch.stack([*bounds, *ranks, delta_p, nll, -told.target, ratio])
    return columns.masked_fill(undefined, torch.nan)


def _cells(told: Told, targets: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, ln q and whether it is a cell, [n, K + 1]: the last one is the target's."""
    ids = torch.cat([told.ids, targets[:, None]], -1)
    logprobs = torch.cat([told.logprobs, told.target[:, None]], -1)
    known = (ids >= 0) & (ids < width)
    among = (told.ids == targets[:, None]).any(-1)
    known[:, -1] &= ~among & ~told.target.isnan()
    return ids.clamp(0, width - 1), logprobs, known


def _bounds(log_p: Tensor, ids: Tensor, log_q: Tensor, known: Tensor) -> tuple[Tensor, ...]:
    log_p_cell = log_p.gather(-1, ids)
    p = log_p_cell.exp() * known
    q = torch.where(known, log_q, -torch.inf).exp()
    # Scattering adds, so that an id which stands in for "no cell" doesn't unset a real one.
    is_cell = torch.zeros_like(log_p).scatter_add_(-1, ids, known.double()) > 0
    p_rest = torch.where(is_cell, 0.0, log_p.exp()).sum(-1)
    told_rest = 1 - q.sum(-1)
    low = (told_rest - REST_ROUNDING).clamp_min(0.0)
    high = told_rest.clamp_min(0.0) + REST_ROUNDING
    q_rest = torch.minimum(torch.maximum(p_rest, low), high)
    difference = torch.where(known, log_p_cell - log_q, 0.0)
    terms = torch.where(known, _term(p, q, difference), 0.0).sum(-1)
    rest = _term(p_rest, q_rest, p_rest.log() - q_rest.log())
    apart = (p - q).abs().sum(-1)
    least = 0.5 * (apart + (p_rest - q_rest).abs())
    most = 0.5 * (apart + p_rest + high)
    return terms + rest, least.clamp(max=1.0), most.clamp(max=1.0), p_rest


def _term(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """Return p·ln(p/q) − p + q, d = ln(p/q), exactly where d is tiny; +∞ where q = 0 < p."""
    value = torch.where(d.abs() < 1.0, p * (d + torch.expm1(-d)), p * d - p + q)
    return torch.where(p == 0, q, torch.where(q == 0, torch.inf, value))


def _ranks(
    z_ref: Tensor, told: Told, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """Return top-1 agreement and top-5 overlap; NaN where an id that counts isn't known."""
    ours, width = top_k(z_ref, _TOP), z_ref.shape[1]
    real = told.ids < width
    order = (~real).int().argsort(dim=-1, stable=True)[:, :_TOP]  # ids beyond V go last
    theirs = told.ids.gather(-1, order)
    readable = (theirs >= 0) & real.gather(-1, order)
    overlap = (ours[:, :, None] == theirs[:, None, :]).any(-1).double().mean(-1)
    agreement = _agreement(z_ref, told, (ours[:, 0], theirs[:, 0], order[:, 0]), dtypes)
    agreement = agreement.masked_fill(~readable[:, 0], torch.nan)
    return agreement, overlap.masked_fill(~readable.all(-1), torch.nan)


def _agreement(
    z_ref: Tensor,
    told: Told,
    best: tuple[Tensor, Tensor, Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Tensor:
    """Say whether both have the same likeliest id, or the two are a tie in either."""
    ours, theirs, place = best
    top = z_ref.gather(-1, ours[:, None])[:, 0].double()
    other = z_ref.gather(-1, theirs.clamp(0, z_ref.shape[1] - 1)[:, None])[:, 0].double()
    tie = top - other <= spacing(top, dtypes[0])
    highest = told.logprobs.gather(-1, place[:, None])[:, 0]
    same = told.ids == ours[:, None]
    own = torch.where(same, told.logprobs, -torch.inf).amax(-1)
    # The server's logits are not known: those of the reference are as large.
    rounded = 2 * spacing(own.clamp_min(-1e30), torch.float32)
    tie |= highest - own <= spacing(top, dtypes[1]) + rounded
    return ((ours == theirs) | tie).double()
