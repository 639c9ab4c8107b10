"""Inputs and twin of the linear operator with int8 weights and int8 activations per token.

The twin quantizes the input by the declared rule (scale = absmax/127 in float32, codes rounded half
to even), sums in int64 and scales in float64. Errors are measured against Σ|x·w| + |bias|.
"""

import torch
from torch import Tensor, nn

from quantwatch_kernels.conformance.case import Ask, Made, OpCase
from quantwatch_kernels.conformance.linear import LINEAR_SHAPES, drawn_weight
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear

__all__ = ["w8a8_case"]

# Twice the largest error measured.
_TOLERANCE = {torch.float32: 1e-7, torch.bfloat16: 3.2e-3, torch.float16: 3.4e-4}
_IN_FLOATS = 3.1e-7
"""`dequantized` in float32: the sums themselves are rounded."""


def w8a8_case() -> OpCase:
    """Return the case of symmetric weights per channel and symmetric activations per token."""
    return OpCase(W8A8_LINEAR, "int8-channel", _make, _tolerance, LINEAR_SHAPES)


def _tolerance(backend: str, dtype: torch.dtype) -> float:
    return max(_TOLERANCE[dtype], _IN_FLOATS if backend == "dequantized" else 0.0)


def _make(ask: Ask) -> Made:
    rows, outputs, inputs = ask.shape
    x = ask.randn(rows, inputs, seed=1)
    weight = drawn_weight(Recipe.named("int8-channel").weights, outputs, inputs)
    bias = torch.linspace(-1, 1, outputs).to(ask.dtype) if inputs % 2 else None
    codes, scales = _quantized(x.cpu())
    row_scales, per_channel = scales, weight.qparams.scales[:, 0].double()
    integers = codes.long()
    value = (integers @ weight.codes.long().T).double() * row_scales * per_channel
    size = (integers.abs() @ weight.codes.long().abs().T).double() * row_scales * per_channel
    if bias is not None:
        value, size = value + bias.double(), size + bias.double().abs()
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    module = W8A8Linear(weight, parameter).to(ask.device)
    moved = (value.to(ask.device),), (size.to(ask.device),)
    return Made((x, module, module.bias), *moved)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float()
    if not len(values):
        return values.to(torch.int8), values[:, :1].double()
    scales = values.abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (values / scales).round().clamp(-127, 127), scales.double()
