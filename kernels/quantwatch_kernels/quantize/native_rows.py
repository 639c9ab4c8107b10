"""Row-wise quantization in C++ (`rows.cpp`, built by `native.py` on first use).

In torch it takes ten operators and as many passes over memory, which eats half of what an int8
product saves. Without a compiler, or if the result isn't the torch operators' bit for bit,
`why_not` says so and the caller uses those.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from quantwatch_kernels.native import library, why_not_built
from quantwatch_kernels.quantize.row_codes import RowCodes, quantize_rows

__all__ = ["quantize_rows_native", "rescale_rows_native", "why_not"]

_SOURCE = Path(__file__).with_name("rows.cpp")
_EXACT = "-ffp-contract=off"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@functools.cache
def why_not() -> str | None:
    """Say why the native rows can't be used in this process, None when they can."""
    return why_not_built(_SOURCE, _EXACT) or _self_test()


def quantize_rows_native(x: Tensor) -> RowCodes:
    """Quantize a float matrix [M, K] symmetrically, as `quantize_rows` does."""
    if x.dtype not in _DTYPES:
        x = x.float()
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, 1)
    call = getattr(_library(), f"quantize_{_DTYPES[x.dtype]}")
    call(x.data_ptr(), rows, columns, codes.data_ptr(), scales.data_ptr())
    return RowCodes(codes, scales, None)


def rescale_rows_native(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return sums · scales · row_scales + bias, computed in float32 and rounded once.

    int32 [M, N], float32 [M, 1], float32 [N], [N] or None; all but the bias contiguous.
    """
    rows, columns = sums.shape
    y = torch.empty(rows, columns, dtype=dtype if dtype in _DTYPES else torch.float32)
    added = None if bias is None else bias.detach().float().contiguous()
    getattr(_library(), f"rescale_{_DTYPES[y.dtype]}")(
        sums.data_ptr(),
        row_scales.data_ptr(),
        scales.data_ptr(),
        None if added is None else added.data_ptr(),
        rows,
        columns,
        y.data_ptr(),
    )
    return y.to(dtype)


@functools.cache
def _library() -> ctypes.CDLL:
    rows = library(_SOURCE, _EXACT)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    for name in _DTYPES.values():
        quantize = getattr(rows, f"quantize_{name}")
        quantize.argtypes, quantize.restype = [pointer, size, size, pointer, pointer], None
        rescale = getattr(rows, f"rescale_{name}")
        rescale.argtypes, rescale.restype = [*[pointer] * 4, size, size, pointer], None
    return rows


def _self_test() -> str | None:
    """Compare with the torch operators on rows that have ties, zeros, a NaN and every size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 97, generator=generator) * torch.logspace(-44, 38, 40)[:, None]
    x[3] = 0.0
    x[5, 7], x[6, 8], x[7, 9] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.arange(97) / 2 + 15  # absmax 63: steps of about a half, many of them ties
    sums = torch.randint(-(2**30), 2**30, (40, 97), generator=generator, dtype=torch.int32)
    per_column = torch.rand(97, generator=generator)
    for dtype in _DTYPES:
        rows = x.to(dtype)
        ours, theirs = quantize_rows_native(rows), quantize_rows(rows)
        same = torch.equal(ours.codes, theirs.codes) and _identical(ours.scales, theirs.scales)
        y = rescale_rows_native(sums, ours.scales, per_column, per_column, dtype)
        expected = (sums.float() * per_column * theirs.scales + per_column).to(dtype)
        if not (same and _identical(y, expected)):
            return f"rows.cpp as built here differs from torch in {dtype}"
    return None


def _identical(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
