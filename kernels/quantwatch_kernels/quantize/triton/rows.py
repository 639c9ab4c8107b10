"""Row-wise symmetric int8 quantization: one program a row, two passes over its blocks.

The rules are those of `codes`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.row_codes import RowCodes
from quantwatch_kernels.quantize.triton.codes import codes_of, row_scale, seen

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
        largest, bad = seen(values, k < K, largest, bad)
    scale, damaged = row_scale(largest, bad)
    tl.store(scales + m, tl.where(damaged, float("nan"), scale))
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(x + m * stride_m + k * stride_k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(codes + m * K + k, codes_of(values, scale, damaged), mask=k < K)


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
