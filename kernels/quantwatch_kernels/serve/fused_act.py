"""act(gate) · up (+ int8 per token) as one operator: the middle of a gated MLP.

y = g · σ(g) · u (silu), or ½ g (1 + tanh(√(2/π) (g + 0.044715 g³))) · u (gelu_tanh, Gemma's). It is
computed in float32 (float64 for float64) and rounded to the input's dtype once. The models' own
modules round act(g) before the product, so in 16 bits this is nearer to the exact value by one
rounding and not bit-equal to theirs. In float32 only the order of operations differs.

Backward recomputes: only g and u are kept. ∂u = ∂y · act(g), ∂g = ∂y · u · act'(g), with
silu'(g) = σ(g) · (1 + g · (1 − σ(g))). The quantized form is this one followed by `quantize_rows`,
bit for bit, without a gradient. A GEMM lies between it and the norm: those two can't be one kernel.

Given up: torch's exp has other last bits for elements beyond the last whole vector, so a row's last
bit may depend on its batch unless K is a multiple of 64 (with one thread); as in the models' own.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from quantwatch_kernels.quantize.row_ops import QUANTIZE_ROWS
from quantwatch_kernels.registry import Op
from quantwatch_kernels.serve.fused_norm import fused_why_not, quantized_rows, refuse_gradient

__all__ = ["ACTIVATIONS", "ACT_MUL", "ACT_MUL_QUANTIZE", "Activation", "act_mul",
           "act_mul_quantize"]  # fmt: skip

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715

ACT_MUL: Op[[Tensor, Tensor, Activation], Tensor] = Op("act_mul")
"""(gate [.., K], up [.., K], activation) → [.., K] in their dtype."""

ACT_MUL_QUANTIZE: Op[[Tensor, Tensor, Activation], tuple[Tensor, Tensor]] = Op("act_mul_quantize")
"""… → (codes int8 [.., K], scales float32 [.., 1])."""


def act_mul(
    gate: Tensor, up: Tensor, activation: Activation = "silu", backend: str | None = None
) -> Tensor:
    """Return act(gate) · up. Raises ValueError for unequal shapes or dtypes."""
    _check(gate, up, activation)
    return ACT_MUL.run(backend, gate, up, activation)


def act_mul_quantize(
    gate: Tensor, up: Tensor, activation: Activation = "silu", backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of act(gate) · up; symmetric int8 per token."""
    _check(gate, up, activation)
    refuse_gradient("act_mul_quantize", gate, up)
    return ACT_MUL_QUANTIZE.run(backend, gate, up, activation)


def _check(gate: Tensor, up: Tensor, activation: Activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"act_mul: {activation!r} is none of {', '.join(ACTIVATIONS)}.")
    same = (gate.shape, gate.dtype) == (up.shape, up.dtype)
    if not (same and gate.ndim and gate.is_floating_point()):
        raise ValueError(
            f"act_mul: gate and up must have one floating dtype and shape [.., K]; they are "
            f"{gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}."
        )


def _wide(x: Tensor) -> Tensor:
    # Contiguous: torch's exp has other last bits where it can't use vectors.
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _value(g: Tensor, activation: Activation) -> Tensor:
    """Return act(g), newly made."""
    if activation == "silu":
        return torch.nn.functional.silu(g)
    return torch.nn.functional.gelu(g, approximate="tanh")


def _product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return _value(_wide(gate), activation).mul_(up).to(gate.dtype)


def _slope(g: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        sigmoid = torch.sigmoid(g)
        return sigmoid * (1 + g * (1 - sigmoid))
    t = torch.tanh(_ROOT * (g + _CUBE * g**3))
    return 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * g * g)


class _ActMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _product(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        wide, flow = _wide(gate), _wide(grad)
        grad_gate = flow * _wide(up) * _slope(wide, ctx.activation)
        return grad_gate.to(gate.dtype), (flow * _value(wide, ctx.activation)).to(up.dtype), None


@ACT_MUL.register("aten")
def _aten(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        y: Tensor = _ActMul.apply(gate, up, activation)  # type: ignore[no-untyped-call]
        return y
    return _product(gate, up, activation)


@ACT_MUL.register("reference")
def _reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    g = gate.double()
    if activation == "silu":
        value = g / (1 + torch.exp(-g))
    else:
        value = 0.5 * g * (1 + torch.tanh(_ROOT * (g + _CUBE * g**3)))
    return (value * up.double()).to(gate.dtype)


@ACT_MUL_QUANTIZE.register("aten")
def _quantize_aten(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    return quantized_rows(_aten(gate, up, activation))


@ACT_MUL_QUANTIZE.register("reference")
def _quantize_reference(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    y = _reference(gate, up, activation)
    codes, scales = QUANTIZE_ROWS.run("reference", y.reshape(y.shape[:-1].numel(), y.shape[-1]))
    return codes.view(y.shape), scales.view(*y.shape[:-1], 1)


def _triton_why_not(gate: Tensor, up: Tensor, activation: Activation) -> str | None:
    del activation
    return fused_why_not(gate, up)


@ACT_MUL.register("triton", _triton_why_not)
def _triton(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    from quantwatch_kernels.serve.triton.act_mul import act_mul_triton

    return act_mul_triton(gate, up, activation)


@ACT_MUL_QUANTIZE.register("triton", _triton_why_not)
def _quantize_triton(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    from quantwatch_kernels.serve.triton.act_mul import act_mul_quantize_triton

    return act_mul_quantize_triton(gate, up, activation)
