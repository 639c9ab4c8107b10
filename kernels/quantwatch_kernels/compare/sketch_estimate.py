"""The KL of a reference's and a candidate's lens distributions from a `Sketch` of the reference.

With T the K kept ids, ρ the tail's mass, j_1 … j_M the draws and Δ = z' − z, the tail's
expectations are replaced by means over the draws:

    KL = −E_p[Δ] + ln E_p[e^Δ] ≈ −Σ_T p·Δ − ρ·mean(Δ_j) + ln(Σ_T p·e^Δ + ρ·mean(e^Δ_j))

That is the KL under weights w, p on T and ρ/M on each draw, which sum to 1. With d = −Δ − E_w[−Δ]
and φ(x) = e^−x − 1 + x it is ln(1 + G), G = Σ w·φ(d): no term is negative, and equal logits give
exactly 0.

The first sum is unbiased. The logarithm is not: to first order in 1/M it falls short by
ρ²·Var(e^−d)/(2M·(1 + G)²), which for small Δ and a heavy tail is 1/M of the KL. This is added, with
the draws' own variance. To the same order the estimate moves with the draws by ρ·mean(ψ_j),
ψ = (φ(d) + G·d)/(1 + G), so its standard error is ρ·sd(ψ_j)/√M. Both formulas are those of
independent draws; stratified ones (`sketch_draws.py`) vary less.

What no draw saw can't be in the estimate: a candidate that lifts one id of no likelihood. Where
hidden states differ but no kept logit does by more than one shift of all, the row is *unanswered*
and NaN, never 0; rows with infinite values are unanswered, too. The caller reads those in full.
Where many unlikely ids are lifted by many nats, means and errors are both too small (by 10 % at 2
nats): estimates are to be held against exact rows of the same run.
n rows, H hidden width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.compare.lens import Readout
from quantwatch_kernels.compare.sketch import Sketch, digests, head_rows

__all__ = ["Estimate", "estimated_kl"]

_ROWS = 256
"""Rows at a time: their 160 logits in float64 stay in the cache."""
_TAME = 300.0
"""Centred differences beyond which e^−d is summed relative to the largest."""


class Estimate(NamedTuple):
    """Per row: nats and mean |Δ| of lens logits float64 [n]; whether there is no answer, bool."""

    kl: Tensor
    standard_error: Tensor
    """Of the tail's part; 0 when every id was kept."""
    topk_logit_deviation_k5: Tensor
    topk_logit_deviation_k3: Tensor
    unanswered: Tensor


def estimated_kl(h_cand: Tensor, sketch: Sketch, readout: Readout) -> Estimate:
    """Estimate KL(reference ‖ candidate) of hidden states [n, H] through the sketch's readout.

    The deviations are exact: the five largest logits are among the K kept. Rows that are equal bit
    for bit are 0, rows with a NaN in either model NaN. Raises ValueError when the hidden states
    don't fit the sketch.
    """
    if h_cand.ndim != 2 or len(h_cand) != len(sketch.ids):
        raise ValueError(
            f"hidden states must be [{len(sketch.ids)}, width] as the sketch has rows; "
            f"they are {list(h_cand.shape)}."
        )
    with torch.no_grad():
        parts = [
            _estimate(
                h_cand[first : first + _ROWS], sketch.rows(slice(first, first + _ROWS)), readout
            )
            for first in range(0, max(1, len(h_cand)), _ROWS)
        ]
        return Estimate._make(torch.cat(column) for column in zip(*parts, strict=True))


def _estimate(h: Tensor, sketch: Sketch, readout: Readout) -> Estimate:
    """Estimate the rows that differ, or that have no distribution; all others are 0."""
    normed = readout.normed(h)
    differ = (digests(normed) != sketch.digest) | ~sketch.log_normalizer.isfinite()
    rows = differ.nonzero().flatten()
    out = [torch.zeros(len(h), dtype=torch.float64, device=h.device) for _ in range(4)]
    unanswered = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    if len(rows):
        *found, unanswered[rows] = _differing(normed[rows], sketch.rows(rows), readout)
        for column, values in zip(out, found, strict=True):
            column[rows] = values
    kl, error, five, three = out
    return Estimate(kl, error, five, three, unanswered)


def _differing(normed: Tensor, sketch: Sketch, readout: Readout) -> tuple[Tensor, ...]:
    z, k = head_rows(normed, sketch.ids, readout).double(), sketch.num_top
    gaps = sketch.logits.double() - z
    # By the likeliest id first: when it has all the mass, what it differs by is all there is.
    x = gaps - gaps[:, :1]
    log_w = _log_weights(sketch)
    kl, error = _sums(x, log_w, k)
    invisible = (x == 0).all(-1) & (sketch.width > k)
    unanswered = _unanswered(normed, z, sketch) | invisible
    lost = unanswered | normed.isnan().any(-1) | sketch.log_normalizer.isnan()
    top = torch.where(gaps[:, :5] == 0, 0.0, gaps[:, :5].abs())
    kl, error = (torch.where(lost, torch.nan, column) for column in (kl, error))
    return kl, error, top.mean(-1), top[:, :3].mean(-1), unanswered


def _unanswered(normed: Tensor, z: Tensor, sketch: Sketch) -> Tensor:
    """Say where infinite logits, seen or not, may decide; a NaN has an answer: NaN."""
    largest = torch.finfo(normed.dtype).max ** 0.5
    huge = (normed.abs() > largest).any(-1) | z.isinf().any(-1)
    unseen: Tensor = (huge & ~z.isnan().any(-1)) | sketch.log_normalizer.isposinf()
    return unseen


def _log_weights(sketch: Sketch) -> Tensor:
    """Return ln of the weights [n, K + M], which sum to 1; −∞ on the draws of an empty tail."""
    k, draws = sketch.num_top, sketch.ids.shape[1] - sketch.num_top
    log_w = sketch.logits.double() - sketch.log_normalizer[:, None]
    log_w[:, k:] = (sketch.tail_mass / draws).log()[:, None]
    return log_w - log_w.logsumexp(-1, keepdim=True)


def _sums(x: Tensor, log_w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the KL and its standard error from differences of logits [n, K + M]."""
    w, draws = log_w.exp(), x.shape[1] - k
    d = x - (w * x).sum(-1, keepdim=True)
    growth = torch.expm1(-d)
    # In float64 the difference of its terms is right to 2e-16/|d|, and |d| beyond 1e-8 or 0.
    excess = (growth + d).clamp_(min=0)
    g = (w * excess).sum(-1)
    rho, one = w[:, k:].sum(-1), 1 + g
    kl = torch.log1p(g) + rho**2 * growth[:, k:].var(-1) / (2 * draws * one**2)
    psi = (excess[:, k:] + g[:, None] * d[:, k:]) / one[:, None]
    far = ((d.abs() > _TAME) & log_w.isfinite()).any(-1)
    if bool(far.any()):
        kl[far] = torch.logsumexp(log_w[far] - d[far], -1)
    return kl, torch.where(far, torch.inf, rho * psi.std(-1) / draws**0.5)
