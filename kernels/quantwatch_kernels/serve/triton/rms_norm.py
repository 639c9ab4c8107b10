"""add + RMSNorm (+ int8 codes): one program a row, which stays in the cache between its passes.

Statistics and division are float32, `1 ÷ √(mean s² + ε)` rounded to nearest at each step. The sum
is rounded to the input's dtype before anything is computed of it. Codes are those of
`quantize_rows` on the rounded result, bit for bit (`quantize.triton.codes`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.triton.codes import codes_of, row_scale, seen
from quantwatch_kernels.serve.fused_norm import Norm

__all__ = ["add_rms_norm_quantize_triton", "add_rms_norm_triton"]

_LARGEST_BLOCK = 2048


@triton.jit
def _sum(x, residual, m, k, K, x_m, x_k, r_m, r_k, HAS_RESIDUAL: tl.constexpr):
    total = tl.load(x + m * x_m + k * x_k, mask=k < K, other=0.0)
    if HAS_RESIDUAL:
        more = tl.load(residual + m * r_m + k * r_k, mask=k < K, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
    return total


@triton.jit
def _normal(total, weight, k, K, inverse, GEMMA: tl.constexpr):
    w = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    unit = total.to(tl.float32) * inverse
    if GEMMA:
        return unit * (1.0 + w)
    return unit.to(total.dtype).to(tl.float32) * w


@triton.jit
def _add_rms_norm(
    x, residual, weight, y, summed, scales, K, width, eps, x_m, x_k, r_m, r_k,
    HAS_RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total = _sum(x, residual, m, k, K, x_m, x_k, r_m, r_k, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(summed + m * K + k, total, mask=k < K)
        squares += total.to(tl.float32) * total.to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, axis=0), width) + eps))
    largest = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        total = _sum(x, residual, m, k, K, x_m, x_k, r_m, r_k, HAS_RESIDUAL)
        normal = _normal(total, weight, k, K, inverse, GEMMA)
        if CODES:
            rounded = normal.to(x.dtype.element_ty).to(tl.float32)
            largest, bad = seen(rounded, k < K, largest, bad)
        else:
            tl.store(y + m * K + k, normal.to(y.dtype.element_ty), mask=k < K)
    if CODES:
        scale, damaged = row_scale(largest, bad)
        tl.store(scales + m, tl.where(damaged, float("nan"), scale))
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            total = _sum(x, residual, m, k, K, x_m, x_k, r_m, r_k, HAS_RESIDUAL)
            normal = _normal(total, weight, k, K, inverse, GEMMA)
            rounded = normal.to(x.dtype.element_ty).to(tl.float32)
            tl.store(y + m * K + k, codes_of(rounded, scale, damaged), mask=k < K)


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [M, K] in `dtype` (None: int8 codes), scales [M, 1] and the sum, as x is shaped."""
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    x_MK = x.reshape(rows, columns)
    r_MK = x_MK if residual is None else residual.reshape(rows, columns)
    y = torch.empty(rows, columns, dtype=dtype or torch.int8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    summed = y if residual is None else torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        _add_rms_norm[(rows,)](
            x_MK, r_MK, weight.contiguous(), y, summed, scales, columns, float(columns), norm.eps,
            *x_MK.stride(), *r_MK.stride(), HAS_RESIDUAL=residual is not None,
            GEMMA=norm.casting == "gemma", CODES=dtype is None,
            BLOCK=max(16, min(triton.next_power_of_2(columns), _LARGEST_BLOCK)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return y.view(x.shape), scales, x if residual is None else summed.view(x.shape)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return (normalized, sum), as `add_rms_norm` does."""
    llama = norm.casting == "llama"
    dtype = torch.promote_types(x.dtype, weight.dtype) if llama else x.dtype
    normalized, _, summed = _run(x, residual, weight, norm, dtype)
    return normalized, summed


def add_rms_norm_quantize_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, sum), as `add_rms_norm_quantize` does."""
    codes, scales, summed = _run(x, residual, weight, norm, None)
    return codes, scales.view(*x.shape[:-1], 1), summed
