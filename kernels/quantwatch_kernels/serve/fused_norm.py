"""add + RMSNorm (+ int8 per token) as one operator: s = x + residual, y = w · s ÷ √(mean s² + ε).

ε is inside the root. Statistics and the division are float32 (float64 for float64), whatever the
input's dtype; the sum is rounded to that dtype first, because it goes on as the residual stream and
what is normalized must be what is kept. Two castings, after the families that use them:

- llama: s ÷ rms is rounded to the input's dtype, then multiplied by w in that dtype: two roundings.
- gemma: multiplied by 1 + w in float32, then rounded: one.

The quantized form quantizes y as rounded to the input's dtype, so codes and scales are those of
`add_rms_norm` followed by `quantize_rows`, bit for bit; codes have no gradient and asking for one
is an error.

Backward, with n = s ÷ rms and g = ∂y · w: ∂s = (g − n · mean(g · n)) ÷ rms + what flows into s,
∂w = Σ ∂y · n over tokens. Only s, w and one number per token are kept, no float32 copy: a third
of what autograd keeps of the models' own norm in 16 bits. Given up: `aten` is a handful of
torch operators and so makes several passes over memory; on a CPU it saves no time (0.8 to 1.0 × the
models' own). `reference` is float64; `triton` has no backward.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.quantize.row_ops import QUANTIZE_ROWS
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["ADD_RMS_NORM", "ADD_RMS_NORM_QUANTIZE", "Casting", "Norm", "add_rms_norm",
           "add_rms_norm_quantize", "fused_why_not", "quantized_rows",
           "refuse_gradient"]  # fmt: skip

Casting = Literal["llama", "gemma"]


class Norm(NamedTuple):
    """What beside the weight makes an RMSNorm."""

    eps: float
    casting: Casting = "llama"


ADD_RMS_NORM: Op[[Tensor, Tensor | None, Tensor, Norm], tuple[Tensor, Tensor]] = Op("add_rms_norm")
"""(x [.., K], residual [.., K] or None, weight [K], norm) → (normalized, sum), both [.., K]."""

ADD_RMS_NORM_QUANTIZE: Op[[Tensor, Tensor | None, Tensor, Norm], tuple[Tensor, Tensor, Tensor]] = (
    Op("add_rms_norm_quantize")
)
"""… → (codes int8 [.., K], scales float32 [.., 1], sum [.., K])."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normalized, sum), in the input's dtype (llama: as promoted with the weight's).

    Without a residual the sum is x. Raises ValueError for shapes, dtypes or an ε that don't fit.
    """
    _check(x, residual, weight, norm)
    return ADD_RMS_NORM.run(backend, x, residual, weight, norm)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, sum); symmetric int8 per token. Raises ValueError as above."""
    _check(x, residual, weight, norm)
    refuse_gradient("add_rms_norm_quantize", x, residual, weight)
    return ADD_RMS_NORM_QUANTIZE.run(backend, x, residual, weight, norm)


def refuse_gradient(name: str, *inputs: Tensor | None) -> None:
    """Raise ValueError when a gradient would be wanted of codes."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError(f"{name}: codes have no gradient; use the operator without quantize.")


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm) -> None:
    if not x.is_floating_point() or not x.ndim or weight.shape != x.shape[-1:] or not len(weight):
        raise ValueError(
            f"add_rms_norm: x must be floating [.., K] and the weight [K] with K > 0; they are "
            f"{x.dtype} {list(x.shape)} and {list(weight.shape)}."
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"add_rms_norm: the residual must be {x.dtype} {list(x.shape)} as x; it is "
            f"{residual.dtype} {list(residual.shape)}."
        )
    if norm.casting not in ("llama", "gemma") or not 0 <= norm.eps < float("inf"):
        raise ValueError(f"add_rms_norm: eps is 0 or more, casting llama or gemma; this is {norm}.")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalized(summed: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return y and 1 ÷ rms [.., 1]; nothing of the size of the input is made twice."""
    wide = _wide(summed)
    inverse = wide.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    unit = wide * inverse if wide is summed else wide.mul_(inverse)
    if norm.casting == "gemma":
        return unit.mul_(1.0 + _wide(weight)).to(summed.dtype), inverse
    rounded = unit.to(summed.dtype)
    same = rounded.dtype == weight.dtype
    return rounded.mul_(weight) if same else weight * rounded, inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summed: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        y, inverse = _normalized(summed, weight, norm)
        ctx.save_for_backward(summed, weight, inverse)
        ctx.casting = norm.casting
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        summed, weight, inverse = ctx.saved_tensors
        unit, wide = _wide(summed) * inverse, _wide(grad)
        scaled = wide * (_wide(weight) + (1.0 if ctx.casting == "gemma" else 0.0))
        grad_sum = (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * inverse
        grad_weight = (wide * unit).flatten(0, -2).sum(0) if grad.ndim > 1 else wide * unit
        return grad_sum.to(summed.dtype), grad_weight.to(weight.dtype), None


@ADD_RMS_NORM.register("aten")
def _aten(x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    if torch.is_grad_enabled() and (summed.requires_grad or weight.requires_grad):
        normalized: Tensor = _RMSNorm.apply(summed, weight, norm)  # type: ignore[no-untyped-call]
        return normalized, summed
    return _normalized(summed, weight, norm)[0], summed


@ADD_RMS_NORM.register("reference")
def _reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    summed = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    wide = summed.double()
    factor = weight.double() + (1.0 if norm.casting == "gemma" else 0.0)
    normalized = factor * wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    llama = norm.casting == "llama"
    return normalized.to(torch.promote_types(x.dtype, weight.dtype) if llama else x.dtype), summed


def quantized_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric int8 codes [.., K] and float32 scales [.., 1] of each token."""
    codes, scales = QUANTIZE_ROWS.run(None, y.reshape(y.shape[:-1].numel(), y.shape[-1]))
    return codes.view(y.shape), scales.view(*y.shape[:-1], 1)


@ADD_RMS_NORM_QUANTIZE.register("aten")
def _quantize_aten(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    normalized, summed = _aten(x, residual, weight, norm)
    return *quantized_rows(normalized.to(x.dtype)), summed


@ADD_RMS_NORM_QUANTIZE.register("reference")
def _quantize_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    normalized, summed = _reference(x, residual, weight, norm)
    rows = normalized.to(x.dtype).reshape(x.shape[:-1].numel(), x.shape[-1])
    codes, scales = QUANTIZE_ROWS.run("reference", rows)
    return codes.view(x.shape), scales.view(*x.shape[:-1], 1), summed


def fused_why_not(first: Tensor, *others: Tensor | None) -> str | None:
    """Say why a fused Triton kernel can't run on these, None when it can."""
    inputs = [x for x in (first, *others) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return "the Triton kernel has no backward pass"
    if any(x.dtype == torch.float64 for x in inputs):
        return "the Triton kernel computes in float32, not float64"
    if away := [x for x in inputs if x.device != first.device]:
        return f"inputs lie on {first.device} and {away[0].device}"
    return triton_why_not(first, bfloat16=first.dtype == torch.bfloat16)


def _triton_why_not(x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm) -> str | None:
    del norm
    return fused_why_not(x, residual, weight)


@ADD_RMS_NORM.register("triton", _triton_why_not)
def _triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    from quantwatch_kernels.serve.triton.rms_norm import add_rms_norm_triton

    return add_rms_norm_triton(x, residual, weight, norm)


@ADD_RMS_NORM_QUANTIZE.register("triton", _triton_why_not)
def _quantize_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    from quantwatch_kernels.serve.triton.rms_norm import add_rms_norm_quantize_triton

    return add_rms_norm_quantize_triton(x, residual, weight, norm)
