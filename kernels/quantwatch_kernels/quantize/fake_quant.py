"""Quantization that gradients pass through: the values of export, the gradients of training.

Forward, bit for bit what `affine` makes of the same scales and zeros, rounding of scales to the
dtype they are stored in included: ŵ = (c − z)·s, c = clamp(round(w/s) + z), halves to even (with a
float zero round(w/s + z)). Rounding and storing count as the identity backward (straight-through):

- ∂ŵ/∂w = 1 where the rounded code needs no clamping, *at* qmin and qmax too, else 0. The code is
  tested, not w/s: the largest weight of a group has w/s = qmax up to one float32 rounding, and a
  mask on w/s would switch it off by chance (newer torch gives 0 at a clamp's bound: ao#4806).
- ∂ŵ/∂s = c − z − w/s inside, c − z outside (Esser et al. 2020, Learned Step Size Quantization,
  eq. 3, with a zero point), times 1/√(n·qmax), n the number of weights that share s (ibid. §2.2):
  scales and weights then change by like shares.
- ∂ŵ/∂z = 0 inside, −s outside (Bhalgat et al. 2020, LSQ+), times the same factor. Integer zeros
  don't learn.

With codes held fixed nothing is straight-through but the storing: ∂ŵ/∂s = c − z, ∂ŵ/∂z = −s.

N rows, K columns, G groups per row. Gradients are float32; a NaN scale gives NaN gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quantwatch_kernels.quantize.affine import dequantize, quantize, within_range
from quantwatch_kernels.quantize.qparams import QParams, spread, storable
from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec

__all__ = ["fake_quantize", "gradient_factor", "scaled_codes", "stored_qparams"]


def fake_quantize(
    weight_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None, spec: WeightSpec
) -> Tensor:
    """Return the quantized values [N, K] in the weight's dtype; differentiable in all three.

    Zeros are uint8 (they don't learn) or float. Raises ValueError for what can't be exported so.
    """
    _check(weight_NK, scales_NG, zeros_NG, spec)
    values: Tensor = _FakeQuantize.apply(weight_NK, scales_NG, zeros_NG, spec)  # type: ignore[no-untyped-call]
    return values


def scaled_codes(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None, spec: WeightSpec
) -> Tensor:
    """Return float32 values [N, K] of fixed codes; differentiable in scales and float zeros."""
    _check(codes_NK, scales_NG, zeros_NG, spec)
    values: Tensor = _ScaledCodes.apply(codes_NK, scales_NG, zeros_NG, spec)  # type: ignore[no-untyped-call]
    return values


def stored_qparams(scales_NG: Tensor, zeros_NG: Tensor | None, spec: WeightSpec) -> QParams:
    """Return scales and zeros as they are stored: what the forward pass computes with.

    float32, as in `qparams`, where 16 bits would move a float zero by more than half a step.
    """
    scales = storable(scales_NG.detach().float(), spec.scale_dtype)
    if zeros_NG is None or not zeros_NG.is_floating_point():
        return QParams(scales, zeros_NG)
    exact = zeros_NG.detach().float()
    zeros = exact.to(scales.dtype)
    if bool(((zeros.float() - exact).abs() > 0.5).any()):
        return QParams(storable(scales_NG.detach().float(), torch.float32), exact)
    return QParams(scales, zeros)


def gradient_factor(rows: int, columns: int, spec: WeightSpec) -> Tensor:
    """Return 1/√(n·qmax) of each group, float32 [G]; a short last group has a smaller n."""
    size = spec.granularity.group_size(columns)
    counts = torch.full((-(-columns // size),), float(size))
    if columns % size:
        counts[-1] = columns % size
    if isinstance(spec.granularity, PerTensor):
        counts *= rows
    return (counts * spec.format.qmax).rsqrt()


def _check(matrix: Tensor, scales: Tensor, zeros: Tensor | None, spec: WeightSpec) -> None:
    if spec.rounding == "stochastic":
        raise ValueError("stochastic rounding can't be trained for: each export rounds otherwise.")
    if matrix.ndim != 2 or not matrix.shape[1]:
        raise ValueError(f"a matrix [N, K] is needed, K ≥ 1; it is {list(matrix.shape)}.")
    rows, columns = matrix.shape
    wanted = [rows, -(-columns // spec.granularity.group_size(columns))]
    if list(scales.shape) != wanted:
        raise ValueError(f"scales must be {wanted}; they are {list(scales.shape)}.")
    shape = None if zeros is None else list(zeros.shape)
    if shape != (None if spec.zero == "none" else wanted):
        raise ValueError(f"zeros of kind {spec.zero!r} must be {wanted} or none; they are {shape}.")
    if zeros is not None and zeros.is_floating_point() != (spec.zero == "float"):
        raise ValueError(f"zero {spec.zero!r} doesn't go with zeros of {zeros.dtype}.")


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scales: Tensor, zeros: Tensor | None, spec: WeightSpec
    ) -> Tensor:
        qparams = stored_qparams(scales, zeros, spec)
        ctx.save_for_backward(weight, qparams.scales, qparams.zeros)
        ctx.spec = spec
        values = dequantize(quantize(weight, qparams, spec), qparams, spec)
        return within_range(values, weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, zeros = ctx.saved_tensors
        spec: WeightSpec = ctx.spec
        columns = weight.shape[1]
        size = spec.granularity.group_size(columns)
        spread_scales = spread(scales, size, columns)
        zero = 0.0 if zeros is None else spread(zeros, size, columns)
        steps = weight.float() / spread_scales
        free = (steps + zero).round() if spec.zero == "float" else steps.round() + zero
        # Compared like this a NaN is inside: its gradient stays NaN instead of becoming 0.
        outside = (free < spec.format.qmin) | (free > spec.format.qmax)
        upstream = gradient.float()
        to_weight = upstream.masked_fill(outside, 0.0)
        shifted = free.clamp(spec.format.qmin, spec.format.qmax) - zero
        to_scale = upstream * torch.where(outside, shifted, shifted - steps)
        to_zero = (upstream - to_weight) * -spread_scales
        return (
            to_weight.to(weight.dtype) if ctx.needs_input_grad[0] else None,
            _per_group(to_scale, spec) if ctx.needs_input_grad[1] else None,
            _per_group(to_zero, spec) if ctx.needs_input_grad[2] else None,
            None,
        )


class _ScaledCodes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, codes: Tensor, scales: Tensor, zeros: Tensor | None, spec: WeightSpec
    ) -> Tensor:
        qparams = stored_qparams(scales, zeros, spec)
        ctx.save_for_backward(codes, qparams.scales, qparams.zeros)
        ctx.spec = spec
        return dequantize(codes, qparams, spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, zeros = ctx.saved_tensors
        spec: WeightSpec = ctx.spec
        columns = codes.shape[1]
        size = spec.granularity.group_size(columns)
        shifted = codes.float()
        if zeros is not None:
            shifted = shifted - spread(zeros, size, columns)
        return (
            None,
            _per_group(gradient * shifted, spec) if ctx.needs_input_grad[1] else None,
            _per_group(gradient * -spread(scales, size, columns), spec)
            if ctx.needs_input_grad[2]
            else None,
            None,
        )


def _per_group(gradient_NK: Tensor, spec: WeightSpec) -> Tensor:
    """Sum over each group and scale: [N, G]."""
    rows, columns = gradient_NK.shape
    size = spec.granularity.group_size(columns)
    padded = torch.nn.functional.pad(gradient_NK, (0, -columns % size))
    factor = gradient_factor(rows, columns, spec).to(padded.device)
    return padded.view(rows, padded.shape[1] // size, size).sum(-1) * factor
