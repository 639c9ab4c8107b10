"""How far rounding can move a weight or a dot product, and how far it is expected to.

A weight w on a grid of step s, codes qmin … qmax, zero z:

    worst case   |ŵ − w| ≤ max(s/2, what lies beyond the range) + float32's own rounding
    expected     E (ŵ − w)² = s²/12, the variance of a uniform residual

The uniform residual needs a step that is small against the spread. At 2 to 4 bits it isn't, so the
expectation integrates over the law of the matrix's weights instead (`weight_law`), which tends to
s²/12 for s ≪ σ. Weights beyond a grid err by exactly what is cut off. Rounding stochastically, a
weight errs by f·(1 − f) for its fraction f of a step, twice as much.

A float format's step is relative: |Δ| ≤ u·|x| for normal numbers (u = 2⁻¹¹ in float16, not 2⁻¹⁶ of
a range), half the smallest subnormal below 6.1e-5, and no bound at all above 65504.

Dot products y = Σ x·w with weight errors e, |e| ≤ b: worst case Σ |x|·b (each group with its own
step), expected √(Σ x²·E e²), since rounding errors of different weights are independent. Summing K
terms in a precision of unit roundoff u adds at most γ_K·Σ |x·w|, γ_K = K·u/(1 − K·u) (Higham 2002).
Errors from layer to layer are not multiplied up here: that needs measured gains, not norms.

Everything is float64. M rows, N outputs, K inputs.
"""

import math

import torch
from torch import Tensor

from quantwatch_kernels.formats import FloatFormat
from quantwatch_kernels.numerics import spacing
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.qparams import spread
from quantwatch_kernels.quantize.weight_law import Grid, expected_steps

__all__ = [
    "accumulation_worst_case",
    "dot_expected",
    "dot_worst_case",
    "expected_square",
    "float_expected_square",
    "float_worst_case",
    "gamma",
    "measured_sqnr_db",
    "predicted_sqnr_db",
    "textbook_sqnr_db",
    "worst_case",
]

_UNIT32 = 2.0**-24
_TINY32 = 2.0**-149


def worst_case(weight_NK: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Return the largest |ŵ − w| that rounding to nearest (or stochastically) can cause, [N, K].

    NaN where the group isn't finite. Raises ValueError for a method that moves weights on purpose
    (GPTQ, AWQ, HQQ): an element may then be off by more than its own rounding.
    """
    spec = quantized.spec
    if spec.method != "nearest":
        raise ValueError(f"no bound per weight: {spec.method} moves weights to help each other.")
    steps = _Steps(weight_NK, quantized)
    inside = 1.0 if spec.rounding == "stochastic" else 0.5
    rounded = torch.maximum(torch.full_like(steps.scale, inside), steps.excess) * steps.scale
    # t = w/s, t + z and (q − z)·s are rounded to float32 on the way; so is what `float` zeros hold.
    size = steps.t.abs() + (steps.t + steps.zero).abs() + 2 * (steps.code - steps.zero).abs()
    return rounded + 1.01 * _UNIT32 * size * steps.scale + _TINY32 * (1 + steps.scale)


def expected_square(weight_NK: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Return E (ŵ − w)² for each weight by the law of its matrix, [N, K]; NaN as `worst_case`."""
    spec = quantized.spec
    steps = _Steps(weight_NK, quantized)
    grid = Grid(
        steps.t + steps.zero,
        steps.scale,
        steps.zero,
        spec.granularity.group_size(weight_NK.shape[1]),
        (spec.format.qmin, spec.format.qmax),
        spec.rounding == "stochastic",
    )
    inside = expected_steps(weight_NK, grid)
    square = torch.where(steps.excess > 0, steps.excess.square(), inside)
    return square * steps.scale.square()


class _Steps:
    """A weight in steps of its grid, float64 [N, K]; a grid of zeros has no excess."""

    def __init__(self, weight_NK: Tensor, quantized: QuantizedWeight) -> None:
        fmt, columns = quantized.spec.format, weight_NK.shape[1]
        size = quantized.spec.granularity.group_size(columns)
        zeros = quantized.qparams.zeros
        self.scale = spread(quantized.qparams.scales, size, columns).double()
        self.zero = torch.zeros_like(self.scale)
        if zeros is not None:
            self.zero = spread(zeros, size, columns).double()
        self.code = quantized.codes.double()
        self.t = weight_NK.double() / self.scale
        place = self.t + self.zero
        self.excess = torch.maximum(place - fmt.qmax, fmt.qmin - place).clamp_min(0)


def float_worst_case(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the largest |x̂ − x| of rounding x to a float format; infinite where it overflows."""
    size = x.double().abs()
    bound = (fmt.unit_roundoff * size).clamp_min(fmt.smallest_subnormal / 2)
    bound = torch.where(size >= fmt.smallest_normal, fmt.unit_roundoff * size, bound)
    return torch.where(size > fmt.largest, torch.inf, bound)


def float_expected_square(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Return E (x̂ − x)², a twelfth of the squared spacing at x; infinite where it overflows."""
    square = spacing(x, fmt.dtype).square() / 12
    return torch.where(x.double().abs() > fmt.largest, torch.inf, square)


def dot_worst_case(x_MK: Tensor, bound_NK: Tensor) -> Tensor:
    """Return Σ |x|·b for weight errors up to b, [M, N]."""
    return x_MK.double().abs() @ bound_NK.double().T


def dot_expected(x_MK: Tensor, square_NK: Tensor) -> Tensor:
    """Return the expected size √(Σ x²·E e²) of a dot product's error, [M, N]."""
    return (x_MK.double().square() @ square_NK.double().T).sqrt()


def gamma(terms: int, unit_roundoff: float) -> float:
    """Return γ_K, which bounds the relative error of a sum of K products in any order.

    Raises ValueError where K·u ≥ 1: nothing is guaranteed there (float16 from K = 2048).
    """
    if terms * unit_roundoff >= 1:
        raise ValueError(
            f"{terms} terms at unit roundoff {unit_roundoff:g} have no bound: K·u must be below 1."
        )
    return terms * unit_roundoff / (1 - terms * unit_roundoff)


def accumulation_worst_case(x_MK: Tensor, weight_NK: Tensor, unit_roundoff: float) -> Tensor:
    """Return γ_K·Σ |x·w|, what computing the product in a precision can add, [M, N]."""
    factor = gamma(weight_NK.shape[1], unit_roundoff)
    return factor * (x_MK.double().abs() @ weight_NK.double().abs().T)


def measured_sqnr_db(weight: Tensor, values: Tensor) -> float:
    """Return 20·log10(‖w‖ ÷ ‖ŵ − w‖); +∞ when equal."""
    noise = (values.double() - weight.double()).square().sum().item()
    return _decibels(weight.double().square().sum().item(), noise)


def predicted_sqnr_db(weight: Tensor, square: Tensor) -> float:
    """Return the SQNR that the expected squared errors of a weight amount to."""
    return _decibels(weight.double().square().sum().item(), square.double().sum().item())


def textbook_sqnr_db(bits: int, weight: Tensor) -> float:
    """Return 6.02·b + 4.77 − 20·log10(absmax/rms): one step for all, 2^b of them, none clipped."""
    largest = weight.double().abs().max().item()
    rms = weight.double().square().mean().sqrt().item()
    return 20 * math.log10(2**bits) + 10 * math.log10(3) - 20 * math.log10(largest / rms)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
