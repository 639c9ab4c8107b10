"""The sums of an estimate (formulas: `sketch_estimate.py`), from the logits a sketch keeps.

By compiled code on the CPU, by torch elsewhere: thirty passes over a row's 160 logits in float64
take as long as gathering them. n rows, k ids each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.compare.sketch import Sketch
from quantwatch_kernels.compare.sketch_sums_native import native_sums, why_not_summed
from quantwatch_kernels.registry import Op

__all__ = ["Sums", "sketch_sums"]

_TAME = 300.0
"""Centred differences beyond which e^−d is summed relative to the largest."""


class Sums(NamedTuple):
    """Per row, [n]. The first two mean nothing where logits are infinite."""

    kl: Tensor
    """Nats, float64."""
    standard_error: Tensor
    """Of the tail's part, nats."""
    topk_logit_deviation_k5: Tensor
    """Mean |Δ| of the five largest logits, float64."""
    topk_logit_deviation_k3: Tensor
    equal: Tensor
    """All logits differ by one shift, bool."""
    infinite: Tensor
    """Some of the candidate's logits are infinite, bool."""
    undefined: Tensor
    """Some of them are NaN, bool."""


SUMS: Op[[Tensor, Sketch], Sums] = Op("sketch_sums")


def sketch_sums(z: Tensor, sketch: Sketch) -> Sums:
    """Compare a candidate's float32 logits [n, k] at the sketch's ids with those it keeps."""
    usual = "native" if z.device.type == "cpu" else "aten"
    return SUMS.run(SUMS.preferred(usual), z, sketch)


def _why_not_native(z: Tensor, sketch: Sketch) -> str | None:
    wanted = [(each, torch.float32) for each in (z, sketch.logits)]
    wanted += [(each, torch.float64) for each in (sketch.log_normalizer, sketch.tail_mass)]
    for tensor, dtype in wanted:
        if tensor.device.type != "cpu" or tensor.dtype != dtype:
            return (
                f"sketch_sums.cpp takes {dtype} on the CPU, not {tensor.dtype} on {tensor.device}"
            )
    return why_not_summed()


@SUMS.register("native", _why_not_native)
def _native(z: Tensor, sketch: Sketch) -> Sums:
    parts = sketch.logits, z, sketch.log_normalizer, sketch.tail_mass
    kl, error, five, three, differences, *counts = native_sums(*parts, sketch.num_top).unbind()
    infinite, undefined, far = (count > 0 for count in counts)
    found = Sums(kl, error, five, three, differences == 0, infinite, undefined)
    again = far.nonzero().flatten()
    if len(again):
        found.kl[again], found.standard_error[again] = _aten(z[again], sketch.rows(again))[:2]
    return found


@SUMS.register("aten")
def _aten(z: Tensor, sketch: Sketch) -> Sums:
    gaps = sketch.logits.double() - z.double()
    # By the likeliest id first: when it has all the mass, what it differs by is all there is.
    x = gaps - gaps[:, :1]
    top = torch.where(gaps[:, :5] == 0, 0.0, gaps[:, :5].abs())
    return Sums(
        *_sums(x, _log_weights(sketch), sketch.num_top),
        top.mean(-1),
        top[:, :3].mean(-1),
        (x == 0).all(-1),
        z.isinf().any(-1),
        z.isnan().any(-1),
    )


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
