"""The lens in one pass with products in bfloat16 (`lens_bfloat16.cpp`, then `lens.cpp`).

The head is rounded where it is multiplied, 48 ids at a time: no second copy of it is kept. n rows,
H hidden width, V ids.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.compare.lens_native import add_up, why_not_native
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.native import library, why_not_built

__all__ = ["COLUMNS", "PAIRS", "fused_sums_bfloat16", "why_not_native_bfloat16"]

_SOURCE = Path(__file__).with_name("lens_bfloat16.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math", "-pthread")
PAIRS = 256
"""Rows per call: the head is rounded once for so many."""
COLUMNS = 480
"""Ids per piece and thread, a multiple of the kernel's 48."""
_PANEL, _ROWS, _WORDS = 48, 8, 16
"""Ids, rows and words that the kernel does at a time."""


@functools.cache
def why_not_native_bfloat16() -> str | None:
    """Say why `lens_bfloat16.cpp` can't be used in this process, None when it can."""
    reason = why_not_native() or why_not_built(_SOURCE, *_FLAGS)
    if reason is None and not hasattr(library(_SOURCE, *_FLAGS), "lens_bfloat16_products"):
        return "this CPU has no avx512_bf16, or its C++ compiler doesn't know it"
    return reason


def fused_sums_bfloat16(
    pair: tuple[Tensor, Tensor],
    weight: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `lens_native.fused_sums` does with products in bfloat16: float32 [n, H] and [V, H].

    Hand in `PAIRS` rows at a time.
    """
    pieces = map(finish, _products(pair, weight))
    return add_up(pieces, len(pair[0]), len(weight), torch.get_num_threads())


def _products(pair: tuple[Tensor, Tensor], weight: Tensor) -> Iterator[Tensor]:
    """Yield products [2n, columns] of both models, `COLUMNS` ids at a time."""
    h, other = (x.contiguous() for x in pair)
    n, width = h.shape
    threads = max(1, torch.get_num_threads())
    # As `Size` in the kernel: a width is made of whole vectors of words, rows of whole tiles.
    words = -(-width // (2 * _WORDS)) * _WORDS
    padded = -(-2 * n // _ROWS) * _ROWS
    rows = workspace.take("lens words", padded, words, h.device)
    scratch = workspace.take("lens panels", threads, (words + padded) * _PANEL, h.device)
    pack, multiply = _functions()
    size = np.array([n, 0, width, 0, 0, threads], np.int64)
    pack(h.data_ptr(), other.data_ptr(), size.ctypes.data, rows.data_ptr())
    for piece in torch.split(weight, COLUMNS * threads):
        part = piece if piece.stride(1) == 1 else piece.contiguous()
        out = workspace.take("lens products", 2 * n, len(part), h.device)
        size[[1, 3, 4]] = len(part), part.stride(0), out.stride(0)
        size_at, out_at = size.ctypes.data, out.data_ptr()
        multiply(rows.data_ptr(), part.data_ptr(), size_at, out_at, scratch.data_ptr())
        # Added up in equal pieces whatever the number of threads: the same bits.
        yield from torch.split(out, COLUMNS, dim=1)


@functools.cache
def _functions() -> tuple[Any, Any]:
    found = library(_SOURCE, *_FLAGS)
    pack, multiply = found.lens_bfloat16_rows, found.lens_bfloat16_products
    pack.argtypes, pack.restype = [ctypes.c_void_p] * 4, None
    multiply.argtypes, multiply.restype = [ctypes.c_void_p] * 5, None
    return pack, multiply
