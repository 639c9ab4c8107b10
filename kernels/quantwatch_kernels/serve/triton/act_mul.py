"""act(gate) · up (+ int8 codes): one program a row. silu(g) = g ÷ (1 + e⁻ᵍ).

gelu with tanh is the same with another argument: ½ (1 + tanh z) = 1 ÷ (1 + e⁻²ᶻ), which also spares
the cancellation of 1 + tanh. Everything is float32 and rounded once; codes as in `codes.py`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.triton.codes import codes_of, row_scale, seen
from quantwatch_kernels.serve.triton.parts import exponential

__all__ = ["act_mul_quantize_triton", "act_mul_triton"]

_LARGEST_BLOCK = 2048


@triton.jit
def _product(
    gate, up, m, k, K, g_m, g_k, u_m, u_k, root, GELU: tl.constexpr
):  # fmt: skip
    g = tl.load(gate + m * g_m + k * g_k, mask=k < K, other=0.0).to(tl.float32)
    u = tl.load(up + m * u_m + k * u_k, mask=k < K, other=0.0).to(tl.float32)
    z = g
    if GELU:
        z = 2.0 * root * (g + 0.044715 * (g * g * g))
    return tl.div_rn(g, 1.0 + exponential(-z)) * u


@triton.jit
def _act_mul(
    gate, up, y, scales, K, g_m, g_k, u_m, u_k, root,
    GELU: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = _product(gate, up, m, k, K, g_m, g_k, u_m, u_k, root, GELU)
        if CODES:
            rounded = value.to(gate.dtype.element_ty).to(tl.float32)
            largest, bad = seen(rounded, k < K, largest, bad)
        else:
            tl.store(y + m * K + k, value.to(y.dtype.element_ty), mask=k < K)
    if CODES:
        scale, damaged = row_scale(largest, bad)
        tl.store(scales + m, tl.where(damaged, float("nan"), scale))
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            value = _product(gate, up, m, k, K, g_m, g_k, u_m, u_k, root, GELU)
            rounded = value.to(gate.dtype.element_ty).to(tl.float32)
            tl.store(y + m * K + k, codes_of(rounded, scale, damaged), mask=k < K)


def _run(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    columns, rows = gate.shape[-1], gate.shape[:-1].numel()
    g_MK, u_MK = gate.reshape(rows, columns), up.reshape(rows, columns)
    y = torch.empty(rows, columns, dtype=dtype, device=gate.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=gate.device)
    if rows:
        _act_mul[(rows,)](
            g_MK, u_MK, y, scales, columns, *g_MK.stride(), *u_MK.stride(),
            math.sqrt(2 / math.pi), GELU=activation == "gelu_tanh", CODES=dtype == torch.int8,
            BLOCK=max(16, min(triton.next_power_of_2(columns), _LARGEST_BLOCK)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return y.view(gate.shape), scales.view(*gate.shape[:-1], 1)


def act_mul_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return act(gate) · up in their dtype."""
    return _run(gate, up, activation, gate.dtype)[0]


def act_mul_quantize_triton(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return (codes, scales)."""
    return _run(gate, up, activation, torch.int8)
