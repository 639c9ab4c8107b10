"""The norms of two hidden states in one pass, by `tap.cpp`. n rows, H hidden width."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.native import library, why_not_built

__all__ = ["native_norms", "why_not_passed"]

_SOURCE = Path(__file__).with_name("tap.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math", "-pthread")
_NORMS = 5
_LEAST = 1 << 20
"""Numbers that are worth a thread of their own, half a millisecond: starting one takes a tenth."""


@functools.cache
def why_not_passed() -> str | None:
    """Say why `tap.cpp` can't be used in this process, None when it can."""
    return why_not_built(_SOURCE, *_FLAGS)


def native_norms(h: Tensor, other: Tensor) -> Tensor:
    """Return ‖h‖, ‖h − h'‖, ‖h'‖, max h', min h' of float32 [n, H] on the CPU, float64 [5, n]."""
    h, other = (each if each.stride(1) == 1 else each.contiguous() for each in (h, other))
    found = torch.empty(_NORMS, len(h), dtype=torch.float64)
    strides = h.stride(0), other.stride(0)
    threads = max(1, min(torch.get_num_threads(), h.numel() // _LEAST))
    size = np.array([*h.shape, *strides, threads], np.int64)
    if len(h):
        _function()(h.data_ptr(), other.data_ptr(), found.data_ptr(), size.ctypes.data)
    return found


@functools.cache
def _function() -> Any:
    found = library(_SOURCE, *_FLAGS).tap_norms
    found.argtypes, found.restype = [ctypes.c_void_p] * 4, None
    return found
