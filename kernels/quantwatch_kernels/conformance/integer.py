"""Inputs and twins of what W8A8 comes with: asymmetric activations, and weights of 4 bits.

The twins quantize the input by the declared rules in float32, sum in int64 and scale in float64.
Errors are measured against Σ|x·w| + |bias|.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quantwatch_kernels.conformance.case import Ask, Made, OpCase
from quantwatch_kernels.conformance.linear import LINEAR_SHAPES, drawn_weight
from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize.recipe import ActivationSpec, Recipe
from quantwatch_kernels.quantize.w4a8_linear import W4A8_LINEAR, ProgressiveWeight, W4A8Linear
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear

__all__ = ["integer_cases"]

# One rounding of the result; in float32, where all of it rounds, twice the largest error measured.
_TOLERANCE = {torch.float32: 1.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SHAPES = (*LINEAR_SHAPES, (3, 5, 1))
"""With a single input, too: its operands' strides (1, 1) are what `torch._int_mm` misreads."""
_IN_FLOATS = 7e-7
"""`dequantized` in float32: the sums themselves are rounded."""


def integer_cases() -> tuple[OpCase, ...]:
    """Return W8A8 with asymmetric activations and W4A8 with symmetric ones, with zeros or not."""
    return (
        OpCase(W8A8_LINEAR, "int8-channel, uint8 inputs", _w8a8, _tolerance, _SHAPES),
        OpCase(W4A8_LINEAR, "int4-g32 progressive", partial(_w4a8, "int4"), _tolerance, _SHAPES),
        OpCase(W4A8_LINEAR, "uint4-g32 progressive", partial(_w4a8, "uint4"), _tolerance, _SHAPES),
    )


def _tolerance(backend: str, dtype: torch.dtype) -> float:
    return max(_TOLERANCE[dtype], _IN_FLOATS if backend == "dequantized" else 0.0)


def _w8a8(ask: Ask) -> Made:
    x = ask.randn(ask.shape[0], ask.shape[2], seed=1) + 0.5
    weight = drawn_weight(Recipe.named("int8-channel").weights, *ask.shape[1:])
    bias = _bias(ask)
    module = W8A8Linear(weight, bias, ActivationSpec(INT_FORMATS["uint8"])).to(ask.device)
    values = x.float().cpu()
    low, high = (getattr(values, end)(-1, keepdim=True) for end in ("amin", "amax"))
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scales = high / 255 - low / 255
    zeros = (-low / scales).round().clamp(0, 255)
    codes = ((values / scales).round() + zeros).clamp(0, 255) - zeros
    per_channel = weight.qparams.scales.double()
    return _made(x, module, codes, scales, weight.codes.double() * per_channel)


def _w4a8(fmt: str, ask: Ask) -> Made:
    x = ask.randn(ask.shape[0], ask.shape[2], seed=1)
    spec = replace(Recipe.named(f"{fmt}-g32").weights, scales="stepped")
    weight = ProgressiveWeight.of(drawn_weight(spec, *ask.shape[1:]))
    module = W4A8Linear(weight, _bias(ask), ActivationSpec(INT8)).to(ask.device)
    values = x.float().cpu()
    scales = values.abs().amax(-1, keepdim=True) / 127
    codes = (values / scales).round().clamp(-127, 127)
    assert weight.steps is not None
    zeros = torch.zeros_like(weight.steps) if weight.zeros is None else weight.zeros
    steps, shift = (
        each.double().repeat_interleave(32, 1)[:, : ask.shape[2]] for each in (weight.steps, zeros)
    )
    multiplied = (weight.codes.double() - shift) * steps * weight.scales.double()
    return _made(x, module, codes, scales, multiplied)


def _bias(ask: Ask) -> nn.Parameter | None:
    if not ask.shape[2] % 2:
        return None
    bias = torch.linspace(-1, 1, ask.shape[1]).to(ask.dtype)
    return nn.Parameter(bias, requires_grad=False)


def _made(x: Tensor, module: W8A8Linear, codes: Tensor, scales: Tensor, weight: Tensor) -> Made:
    """Multiply in float64, which holds sums of products of codes exactly."""
    inputs = codes.double() * scales.double()
    value, size = inputs @ weight.T, inputs.abs() @ weight.abs().T
    if module.bias is not None:
        bias = module.bias.double().cpu()
        value, size = value + bias, size + bias.abs()
    return Made((x, module, module.bias), (value.to(x.device),), (size.to(x.device),))
