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
from quantwatch_kernels.compare.sketch_sums import Sums, sketch_sums

__all__ = ["Estimate", "estimated_kl"]

_ROWS = 1024
"""Rows at a time, whose normed states take a few megabytes."""


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
    if len(h) and bool(differ.all()):
        return _differing(normed, sketch, readout)
    out = torch.zeros(len(Estimate._fields), len(h), dtype=torch.float64, device=h.device)
    rows = differ.nonzero().flatten()
    if len(rows):
        found = _differing(normed[rows], sketch.rows(rows), readout)
        out[:, rows] = torch.stack([column.double() for column in found])
    return Estimate(out[0], out[1], out[2], out[3], out[4].bool())


def _differing(normed: Tensor, sketch: Sketch, readout: Readout) -> Estimate:
    sums = sketch_sums(head_rows(normed, sketch.ids, readout), sketch)
    unanswered = _unanswered(normed, sums, sketch)
    lost = unanswered | sketch.log_normalizer.isnan()
    kl, error = (torch.where(lost, torch.nan, each) for each in (sums.kl, sums.standard_error))
    five, three = sums.topk_logit_deviation_k5, sums.topk_logit_deviation_k3
    return Estimate(kl, error, five, three, unanswered)


def _unanswered(normed: Tensor, sums: Sums, sketch: Sketch) -> Tensor:
    """Say where infinite logits, seen or not, or ids that weren't seen decide; a NaN is NaN."""
    largest = torch.finfo(normed.dtype).max ** 0.5
    huge = (normed.abs().amax(-1) > largest) | sums.infinite
    unseen: Tensor = (huge & ~sums.undefined) | sketch.log_normalizer.isposinf()
    return unseen | (sums.equal & (sketch.width > sketch.num_top))
