"""HQQ: a float zero point fitted to the weights alone, robust against outliers (half-quadratic).

Minimises Σ |w − ŵ|^p, p = 0.7, over the zero point of each group, its scale held, by splitting off
the outliers' part e of the error and raising the price β of the split (Badri & Shaji 2023):

    q = clamp(round(w/s + z)),  e = shrink(w/s − (q − z), β),  z = mean(q − (w/s − e)),  β ← 1.01 β
    shrink(x, β) = sign(x) · max(0, |x| − |x|^(p−1)/β)

All in steps of the group's scale: errors are then at most ½ whatever the weights' size (in absolute
units, as it is usually written, the shrinkage of weights of the usual size is always total, and e
is 0). The zero with the smallest error seen is kept, the plain one among them, each measured as it
is stored. A constant group is exact: its scale is the constant, not range 0 (hqq#159).
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.qparams import QParams, choose_qparams, grouped
from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec

__all__ = ["hqq", "hqq_qparams"]

_POWER = 0.7
_BETA = 10.0
_GROWTH = 1.01
_ROUNDS = 20


def hqq(weight_NK: Tensor, spec: WeightSpec) -> QuantizedWeight:
    """Quantize a weight with a fitted zero point. Raises ValueError unless the zero is a float."""
    qparams = hqq_qparams(weight_NK, spec)
    return QuantizedWeight(quantize(weight_NK, qparams, spec), qparams, spec)


def hqq_qparams(weight_NK: Tensor, spec: WeightSpec) -> QParams:
    """Return plain (or MSE-clipped) scales with the zero points of the smallest Σ|error|^0.7."""
    if spec.zero != "float":
        raise ValueError(f"hqq fits a float zero; it can't make zero {spec.zero!r}.")
    start = mse_qparams(weight_NK, spec) if spec.clip == "mse" else choose_qparams(weight_NK, spec)
    if not weight_NK.numel() or start.zeros is None:
        return start
    size = spec.granularity.group_size(weight_NK.shape[1])
    steps = grouped(weight_NK, size) / start.scales.float().unsqueeze(-1)
    real = torch.ones_like(steps, dtype=torch.bool)
    if short := -weight_NK.shape[1] % size:
        real[:, -1, -short:] = False
    return replace(start, zeros=_fit(steps, real, start.zeros, spec))


def _fit(steps_NGS: Tensor, real: Tensor, zeros: Tensor, spec: WeightSpec) -> Tensor:
    whole = isinstance(spec.granularity, PerTensor)
    best, beta = zeros, _BETA
    least = torch.full(zeros.shape, torch.inf)
    for _ in range(_ROUNDS + 1):
        shift = zeros.float().unsqueeze(-1)
        codes = (steps_NGS + shift).round_().clamp_(spec.format.qmin, spec.format.qmax)
        errors = (steps_NGS - codes).add_(shift).masked_fill_(~real, 0.0)
        cost = _sum(errors.abs().pow_(_POWER), whole)
        best, least = torch.where(cost < least, zeros, best), torch.minimum(cost, least)
        magnitudes = errors.abs()
        outliers = (magnitudes - magnitudes.pow(_POWER - 1) / beta).clamp_(min=0).copysign(errors)
        centre = (codes - steps_NGS + outliers).masked_fill_(~real, 0.0)
        zeros = (_sum(centre, whole) / _sum(real.float(), whole)).to(zeros.dtype)
        beta *= _GROWTH
    return best


def _sum(values_NGS: Tensor, whole: bool) -> Tensor:
    sums = values_NGS.sum(-1)
    return sums.sum().expand_as(sums) if whole else sums
