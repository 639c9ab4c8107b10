"""Affine quantization: w ≈ (code − zero) · scale.

code = clamp(round(w / scale) + zero), halves to even: rounded first, then shifted, so that ties
don't depend on the zero point (ao#1964), and by division: w·(1/scale) gives other codes in 3e-6 of
the cases. Where the scale is NaN the code is 0 and the value stays NaN.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from quantwatch_kernels.quantize.qparams import QParams, choose_qparams, spread
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.quantize.rounding import round_to_code
from quantwatch_kernels.quantize.stepped import with_steps
from quantwatch_kernels.quantize.stochastic import unclipped_qparams

__all__ = [
    "QuantizedWeight",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_weight",
    "within_range",
]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes [N, K] in the format's storage with the parameters they were made with."""

    codes: Tensor
    qparams: QParams
    spec: WeightSpec

    @property
    def values(self) -> Tensor:
        """The quantized values, float32 [N, K]."""
        return dequantize(self.codes, self.qparams, self.spec)

    @property
    def num_bytes(self) -> int:
        """Bytes of packed codes, scales and zero points as a packed layer stores them."""
        rows, columns = self.codes.shape
        scales, zeros, base = self.qparams.scales, self.qparams.zeros, self.qparams.base
        size = self.spec.format.num_bytes(rows, columns)
        if base is None:
            size += scales.numel() * scales.element_size()
        else:
            size += scales.numel() + base.numel() * base.element_size()  # a byte per step
        if zeros is None:
            return size
        if zeros.is_floating_point():
            return size + zeros.numel() * zeros.element_size()
        return size + self.spec.format.num_bytes(rows, zeros.shape[1])


def quantize(
    weight_NK: Tensor, qparams: QParams, spec: WeightSpec, generator: Generator | None = None
) -> Tensor:
    """Return codes [N, K]; rounded stochastically with a generator, else to nearest."""
    fmt, columns = spec.format, weight_NK.shape[1]
    group_size = spec.granularity.group_size(columns)
    steps = weight_NK.float() / spread(qparams.scales, group_size, columns)
    if qparams.zeros is None:
        codes = round_to_code(steps, generator)
    else:
        zeros = spread(qparams.zeros, group_size, columns)
        if spec.zero == "integer":
            codes = round_to_code(steps, generator).add_(zeros)
        else:
            codes = round_to_code(steps.add_(zeros), generator)
    return codes.nan_to_num_(nan=0.0).clamp_(fmt.qmin, fmt.qmax).to(fmt.storage)


def dequantize(codes_NK: Tensor, qparams: QParams, spec: WeightSpec) -> Tensor:
    """Return float32 values [N, K]."""
    columns = codes_NK.shape[1]
    group_size = spec.granularity.group_size(columns)
    steps = codes_NK.float()
    if qparams.zeros is not None:
        steps = steps - spread(qparams.zeros, group_size, columns)
    return within_range(steps * spread(qparams.scales, group_size, columns), torch.float32)


def within_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`, what it can't hold to its largest number; a NaN stays.

    The outermost grid point of a group near the end of the dtype's range may lie beyond it; the
    weight itself doesn't. An infinity is therefore never a weight's.
    """
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def quantize_weight(
    weight_NK: Tensor, spec: WeightSpec, generator: Generator | None = None
) -> QuantizedWeight:
    """Quantize to nearest over each group's whole range (stochastically if the spec says so)."""
    if spec.rounding != "stochastic":
        qparams = with_steps(weight_NK, choose_qparams(weight_NK, spec), spec)
        return QuantizedWeight(quantize(weight_NK, qparams, spec), qparams, spec)
    if generator is None:
        raise ValueError("stochastic rounding needs a generator.")
    qparams = unclipped_qparams(weight_NK, spec)
    return QuantizedWeight(quantize(weight_NK, qparams, spec, generator), qparams, spec)


def fake_quantize(weight_NK: Tensor, spec: WeightSpec) -> Tensor:
    """Return the weight's quantized values, rounded to nearest, in its own dtype."""
    return within_range(quantize_weight(weight_NK, spec).values, weight_NK.dtype)
