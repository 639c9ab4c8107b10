"""Float activations × 4-bit weights in groups, unpacked in registers.

y = x · ((code − zero) · scale) + bias, two codes per byte, low nibble first (`packing`). A weight
is dequantized in float32 and rounded to the activations' dtype once, sums are float32 whatever that
dtype is (bug log 14), float32 products are exact products, not TF32. Any group size, a short last
group, odd K and N.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Int4Weight", "int4_matmul_triton"]


class Int4Weight(NamedTuple):
    """Packed uint8 [N, ⌈K/2⌉], float32 scales and zeros (steps, or None if signed) [N, G]."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    bias: Tensor | None


@triton.jit
def _int4_matmul(
    x, packed, y, scales, zeros, bias, M, N, K, G, stride_xm, stride_xk, BYTES,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    far_m, far_n = m.to(tl.int64), n.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = x + far_m[:, None] * stride_xm + k[None, :] * stride_xk
        x_block = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        inside = (n[None, :] < N) & (k[:, None] < K)
        at = far_n[None, :] * BYTES + (k // 2)[:, None]
        byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
        code = (byte >> ((k % 2) * 4)[:, None]) & 15
        group = far_n[None, :] * G + (k // GROUP)[:, None]
        if HAS_ZERO:
            steps = code.to(tl.float32) - tl.load(zeros + group, mask=inside, other=0.0)
        else:
            steps = (code - tl.where(code > 7, 16, 0)).to(tl.float32)
        w_block = steps * tl.load(scales + group, mask=inside, other=0.0)
        total = tl.dot(x_block, w_block.to(x_block.dtype), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    stored = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + far_m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=stored)


def int4_matmul_triton(x_MK: Tensor, weight: Int4Weight) -> Tensor:
    """Return the product [M, N] in the activations' dtype; `x_MK` may have any strides."""
    (M, K), N = x_MK.shape, len(weight.packed)
    y = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if not y.numel():
        return y
    block_m, block_n = (16, 64) if M <= 16 else (64, 64)
    _int4_matmul[triton.cdiv(M, block_m), triton.cdiv(N, block_n)](
        x_MK, weight.packed, y, weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.bias is None else weight.bias,
        M, N, K, weight.scales.shape[1], *x_MK.stride(), weight.packed.shape[1],
        GROUP=weight.group_size, HAS_ZERO=weight.zeros is not None,
        HAS_BIAS=weight.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y
