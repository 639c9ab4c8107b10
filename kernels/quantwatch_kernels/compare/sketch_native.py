"""A few rows of a head times hidden states, by `sketch.cpp`. n rows, k ids each, H hidden width."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.compare.readout import check_width
from quantwatch_kernels.native import library, why_not_built

__all__ = ["native_head_rows", "why_not_gathered"]

_SOURCE = Path(__file__).with_name("sketch.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math")
_FUNCTIONS = {torch.float32: "head_rows_float32", torch.bfloat16: "head_rows_bfloat16"}


def why_not_gathered(dtype: torch.dtype) -> str | None:
    """Say why `sketch.cpp` can't multiply rows of this dtype here, None when it can."""
    if dtype not in _FUNCTIONS:
        return f"sketch.cpp has no rows of {dtype}"
    return _why_not_built()


@functools.cache
def _why_not_built() -> str | None:
    return why_not_built(_SOURCE, *_FLAGS)


def native_head_rows(h: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Return the products float32 [n, k] of hidden states [n, H] and rows `ids` of weight [V, H].

    `ids` is int32 [n, k]; both others are float32 or bfloat16, on the CPU. Raises ValueError for
    states that aren't as wide as the head takes, IndexError for ids that it hasn't.
    """
    check_width(h, weight)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
        raise IndexError(
            f"ids from {int(ids.min())} to {int(ids.max())}; the head has {len(weight)}"
        )
    h, ids = h.contiguous(), ids.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty(ids.shape, dtype=torch.float32)
    size = np.array([*ids.shape, h.shape[1], weight.stride(0), torch.get_num_threads()], np.int64)
    pointers = (h.data_ptr(), ids.data_ptr(), weight.data_ptr(), out.data_ptr())
    if out.numel():
        _function(h.dtype)(*pointers, size.ctypes.data)
    return out


@functools.cache
def _function(dtype: torch.dtype) -> Any:
    found = getattr(library(_SOURCE, *_FLAGS), _FUNCTIONS[dtype])
    found.argtypes, found.restype = [ctypes.c_void_p] * 5, None
    return found
