"""Inputs and twins of the fused operators: add + RMSNorm, act · mul, and both with int8 codes.

The twins are float64, from the sum that goes on as the residual stream, which is rounded to the
dtype by definition. Errors are relative to the value; below the dtype's normal numbers, where its
step is fixed, to the smallest of those; gelu's 1 + tanh cancels, which counts against |g·u|.

For codes the twin is y ÷ scale before it is rounded. What may differ is half a code and what the
roundings of y and of the scale come to; that is what their errors are divided by, so 1 is allowed.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.conformance.case import Ask, Made, OpCase
from quantwatch_kernels.serve.fused_act import (
    ACT_MUL,
    ACT_MUL_QUANTIZE,
    ACTIVATIONS,
    Activation,
)
from quantwatch_kernels.serve.fused_norm import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_QUANTIZE,
    Casting,
    Norm,
)

__all__ = ["fused_cases"]

_SHAPES = ((1, 576), (5, 1536), (3, 1), (17, 65), (2, 1041), (0, 64))
_CASTINGS: tuple[Casting, ...] = ("llama", "gemma")
_EPS = 1e-3
_FLOAT32 = 5.4e-7
"""Of statistics, root, exponential and products: twice the largest error measured."""


class _Right(NamedTuple):
    """float64 values, what their errors are relative to, and how large those may be."""

    value: Tensor
    scale: Tensor
    error: float


def fused_cases() -> tuple[OpCase, ...]:
    """Return the norm in both castings and the product with both activations, with codes or not."""
    cases = []
    for casting in _CASTINGS:
        within = partial(_rounding, casting)
        cases.append(OpCase(ADD_RMS_NORM, casting, partial(_norm, casting), within, _SHAPES))
        made = partial(_norm_codes, casting)
        cases.append(OpCase(ADD_RMS_NORM_QUANTIZE, casting, made, _itself, _SHAPES))
    for kind in ACTIVATIONS:
        within = partial(_rounding, kind)
        cases.append(OpCase(ACT_MUL, kind, partial(_act, kind), within, _SHAPES))
        cases.append(OpCase(ACT_MUL_QUANTIZE, kind, partial(_act_codes, kind), _itself, _SHAPES))
    return tuple(cases)


def _rounding(kind: str, _backend: str, dtype: torch.dtype) -> float:
    """Return the relative error of y: one rounding, in llama's casting two."""
    if dtype == torch.float32:
        return _FLOAT32
    unit = torch.finfo(dtype).eps / 2
    return (2 * unit + unit**2 if kind == "llama" else unit) + _FLOAT32


def _itself(_backend: str, _dtype: torch.dtype) -> float:
    return 1.0


_Norm = tuple[tuple[Tensor, Tensor, Tensor, Norm], Tensor, _Right]


def _right_norm(casting: Casting, ask: Ask) -> _Norm:
    """Return arguments, the sum and y."""
    x, residual = 3 * ask.randn(*ask.shape, seed=1), ask.randn(*ask.shape, seed=2)
    weight = ask.randn(1, ask.shape[1], seed=3)[0].contiguous()
    summed = x + residual
    wide = summed.double()
    factor = weight.double() + (casting == "gemma")
    value = factor * wide / (wide.square().mean(-1, keepdim=True) + _EPS).sqrt()
    floor = torch.finfo(ask.dtype).smallest_normal
    right = _Right(value, value.abs() + floor, _rounding(casting, "", ask.dtype))
    return (x, residual, weight, Norm(_EPS, casting)), summed, right


def _norm(casting: Casting, ask: Ask) -> Made:
    args, summed, right = _right_norm(casting, ask)
    return Made(args, (right.value, summed.double()), (right.scale, summed.double().abs()))


def _norm_codes(casting: Casting, ask: Ask) -> Made:
    args, summed, right = _right_norm(casting, ask)
    codes = _codes(right)
    return Made(args, (*codes[0], summed.double()), (*codes[1], summed.double().abs()))


def _right_act(kind: Activation, ask: Ask) -> tuple[tuple[Tensor, Tensor, Activation], _Right]:
    gate, up = 3 * ask.randn(*ask.shape, seed=1), ask.randn(*ask.shape, seed=2)
    g, u, error = gate.double(), up.double(), _rounding(kind, "", ask.dtype)
    scale = torch.full_like(g, torch.finfo(ask.dtype).smallest_normal)
    if kind == "silu":
        value = g * u / (1 + (-g).exp())
    else:
        value = 0.5 * g * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
        scale += (g * u).abs() * _FLOAT32 / error
    return (gate, up, kind), _Right(value, value.abs() + scale, error)


def _act(kind: Activation, ask: Ask) -> Made:
    args, right = _right_act(kind, ask)
    return Made(args, (right.value,), (right.scale,))


def _act_codes(kind: Activation, ask: Ask) -> Made:
    args, right = _right_act(kind, ask)
    return Made(args, *_codes(right))


def _codes(right: _Right) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return codes before rounding and scales, and how far each may be off."""
    errors = right.error * right.scale
    largest = right.value.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    codes = right.value / scales
    off = (errors / scales) + codes.abs() * errors.amax(-1, keepdim=True) / largest.clamp(
        min=1e-300
    )
    # A float32 quotient is rounded, too, before it is rounded to a code.
    return (codes, scales), (
        0.5 + off * (1 + 1e-2) + 1e-4,
        errors.amax(-1, keepdim=True) / 127 + 1e-7 * scales,
    )
