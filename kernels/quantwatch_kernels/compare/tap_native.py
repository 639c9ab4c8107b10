"""The norms of two hidden states in one pass, by `tap.cpp`. n rows, H hidden width."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.native import library, why_not_built

__all__ = ["CANDIDATES", "native_norms", "why_not_passed"]

_SOURCE = Path(__file__).with_name("tap.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math")
_NORMS = 5
CANDIDATES = {torch.float32: "tap_norms_float32", torch.bfloat16: "tap_norms_bfloat16"}
"""What a candidate's hidden states may be, beside a reference's in float32."""
_LEAST = 1 << 16
"""Numbers that are worth a thread, 30 µs."""


@functools.cache
def why_not_passed() -> str | None:
    """Say why `tap.cpp` can't be used in this process, None when it can."""
    return why_not_built(_SOURCE, *_FLAGS)


def native_norms(h: Tensor, other: Tensor) -> Tensor:
    """Return ‖h‖, ‖h − h'‖, ‖h'‖, max h', min h' of h and h' [n, H] on the CPU, float64 [5, n].

    h is float32, h' one of `CANDIDATES`.
    """
    h, other = (each if each.stride(1) == 1 else each.contiguous() for each in (h, other))
    found = torch.empty(_NORMS, len(h), dtype=torch.float64)
    strides = h.stride(0), other.stride(0)
    threads = max(1, min(torch.get_num_threads(), h.numel() // _LEAST))
    size = np.array([*h.shape, *strides, threads], np.int64)
    if len(h):
        _function(other.dtype)(h.data_ptr(), other.data_ptr(), found.data_ptr(), size.ctypes.data)
    return found


@functools.cache
def _function(candidate: torch.dtype) -> Any:
    found = getattr(library(_SOURCE, *_FLAGS), CANDIDATES[candidate])
    found.argtypes, found.restype = [ctypes.c_void_p] * 4, None
    return found
