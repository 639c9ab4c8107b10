"""Scales for stochastic rounding: both neighbours of every weight are codes.

Rounding up or down keeps the expectation only where both results exist. The grid that just spans
low … high fails at its ends: an integer zero cuts it off by up to half a step on one side, and a
scale or zero rounded to 16 bits may end it below the largest weight, which is then clipped.

- symmetric: the scale is rounded up in its dtype.
- integer zero: scale = (high − low) / (qmax − 1), rounded up, and zero = ⌈−low / scale⌉.
- float zero: over the range where it is float32; in 16 bits, where the zero is off by up to half a
  step, over qmax − 1 steps with half a step at each end.

Given up: one of qmax steps, a third of a 2-bit grid. Not for clip "mse": what it clips is biased.
"""

import torch
from torch import Tensor

from quantwatch_kernels.quantize.qparams import (
    QParams,
    check_matrix,
    group_range,
    qparams_of_range,
    storable,
)
from quantwatch_kernels.quantize.recipe import WeightSpec

__all__ = ["unclipped_qparams"]


def unclipped_qparams(weight_NK: Tensor, spec: WeightSpec) -> QParams:
    """Return parameters with a code at or beyond each end of every group.

    Raises ValueError unless the weight is a float matrix.
    """
    check_matrix(weight_NK)
    low, high = group_range(weight_NK, spec)
    fmt, up = spec.format, 1 + torch.finfo(spec.scale_dtype).eps
    if fmt.symmetric:
        return QParams(storable(torch.maximum(-low, high) / fmt.qmax * up, spec.scale_dtype), None)
    if spec.zero == "integer":
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        step = (high / (fmt.qmax - 1) - low / (fmt.qmax - 1)) * up
        scales = storable(step, spec.scale_dtype)
        zeros = (-low / scales.float()).ceil().nan_to_num(nan=0.0).clamp(0, fmt.qmax)
        return QParams(scales, zeros.to(torch.uint8))
    if spec.scale_dtype != torch.float32:
        step = high / (fmt.qmax - 1) - low / (fmt.qmax - 1)
        margin = step * (0.5 + fmt.qmax * (up - 1))
        low, high = low - margin, high + margin
    return qparams_of_range(low, high, spec)
