"""Row-wise symmetric int8 quantization: one program a row, two passes over its blocks.

The rules are those of `row_codes`, bit for bit: division rounded to nearest (`/` is 2 ulp off on a
GPU), halves to even by adding 1.5·2²³ (no `rint` outside libdevice, which the interpreter lacks),
clamped before the cast (a GPU may saturate where others wrap).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.row_codes import RowCodes

__all__ = ["quantize_rows_triton"]

_LARGEST_BLOCK = 2048


@triton.jit
def _quantize_rows(x, codes, scales, K, stride_m, stride_k, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + m * stride_m + k * stride_k, mask=k < K, other=0.0).to(tl.float32)
        size = tl.abs(values)
        finite = size < float("inf")  # false for NaN, too
        bad = tl.maximum(bad, tl.where(finite, 0, 1))
        largest = tl.maximum(largest, tl.where(finite, size, 0.0))
    damaged = tl.max(bad, axis=0) > 0
    scale = tl.div_rn(tl.max(largest, axis=0), 127.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + m, tl.where(damaged, float("nan"), scale))
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + m * stride_m + k * stride_k, mask=k < K, other=0.0).to(tl.float32)
        values = tl.where(damaged, 0.0, values)
        steps = tl.minimum(tl.maximum(tl.div_rn(values, scale), -127.0), 127.0)
        steps = (steps + 12582912.0) - 12582912.0
        tl.store(codes + m * K + k, steps.to(tl.int8), mask=k < K)


def quantize_rows_triton(x_MK: Tensor) -> RowCodes:
    """Quantize a float matrix of any strides, as `quantize_rows` does."""
    rows, columns = x_MK.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=x_MK.device)
    scales = torch.empty(rows, 1, device=x_MK.device)
    if rows:
        block = max(16, min(triton.next_power_of_2(columns), _LARGEST_BLOCK))
        strides = x_MK.stride(0), x_MK.stride(1)
        _quantize_rows[(rows,)](
            x_MK, codes, scales, columns, *strides, BLOCK=block, enable_fp_fusion=False
        )
    return RowCodes(codes, scales, None)
