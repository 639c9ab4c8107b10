"""int8 × int8 in exact int32, scaled on the way out: the product of a W8A8 layer.

y = (Σₖ a·w − zero · Σₖ w) · s_channel · s_row + bias. Scales touch the sum, never the terms: int32
can't overflow up to K = 132104 (66311 with zero points: a code less its zero reaches 255), where a
float16 accumulator would long have (bug log 14).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.row_codes import RowCodes

__all__ = ["Int8Weight", "int8_matmul_triton"]


class Int8Weight(NamedTuple):
    """Codes int8 [N, K] (any strides), float32 scales [N], Σₖ codes int32 [N], bias [N] or None."""

    codes: Tensor
    scales: Tensor
    sums: Tensor
    bias: Tensor | None


@triton.jit
def _int8_matmul(
    a, w, y, row_scales, zeros, scales, sums, bias, M, N, K,
    stride_am, stride_ak, stride_wn, stride_wk,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    far_m, far_n = m.to(tl.int64), n.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_at = a + far_m[:, None] * stride_am + k[None, :] * stride_ak
        w_at = w + far_n[None, :] * stride_wn + k[:, None] * stride_wk
        a_block = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        w_block = tl.load(w_at, mask=(n[None, :] < N) & (k[:, None] < K), other=0)
        total = tl.dot(a_block, w_block, total, out_dtype=tl.int32)
    if HAS_ZERO:
        zero = tl.load(zeros + m, mask=m < M, other=0)
        total -= zero[:, None] * tl.load(sums + n, mask=n < N, other=0)[None, :]
    result = total.to(tl.float32) * tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    result = result * tl.load(row_scales + m, mask=m < M, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + far_m[:, None] * N + n[None, :], result.to(y.dtype.element_ty), mask=inside)


def int8_matmul_triton(rows: RowCodes, weight: Int8Weight, dtype: torch.dtype) -> Tensor:
    """Return the scaled product [M, N] in `dtype`."""
    (M, K), N = rows.codes.shape, len(weight.codes)
    y = torch.empty(M, N, dtype=dtype, device=rows.codes.device)
    if not y.numel():
        return y
    block_m, block_n = (16, 64) if M <= 16 else (64, 64)
    _int8_matmul[triton.cdiv(M, block_m), triton.cdiv(N, block_n)](
        rows.codes, weight.codes, y, rows.scales,
        rows.scales if rows.zeros is None else rows.zeros,
        weight.scales, weight.sums, weight.scales if weight.bias is None else weight.bias,
        M, N, K, *rows.codes.stride(), *weight.codes.stride(),
        HAS_ZERO=rows.zeros is not None, HAS_BIAS=weight.bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64, enable_fp_fusion=False,
    )  # fmt: skip
    return y
