"""A row's KL from the logits that a sketch keeps, by `sketch_sums.cpp`. n rows, k ids each."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.native import library, why_not_built

__all__ = ["native_sums", "why_not_summed"]

_SOURCE = Path(__file__).with_name("sketch_sums.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math")
_ROW = 8
"""Numbers per row: `Found` in sketch_sums.cpp."""
_LEAST = 1 << 13
"""Logits that are worth a thread, 30 µs."""


@functools.cache
def why_not_summed() -> str | None:
    """Say why `sketch_sums.cpp` can't be used in this process, None when it can."""
    return why_not_built(_SOURCE, *_FLAGS)


def native_sums(
    old: Tensor, z: Tensor, log_normalizer: Tensor, tail_mass: Tensor, num_top: int
) -> Tensor:
    """Return float64 [8, n] of float32 logits [n, k] of both models: `num_top` kept, then draws.

    Nats, their standard error, mean |Δ| of the five and three largest; then how many differences
    aren't 0, how many of `z` are infinite, how many NaN, how many are too far apart for the sums
    (the first two are then meaningless).
    """
    rows = [each.contiguous() for each in (old, z, log_normalizer, tail_mass)]
    found = torch.empty(len(old), _ROW, dtype=torch.float64)
    threads = max(1, min(torch.get_num_threads(), old.numel() // _LEAST))
    size = np.array([len(old), num_top, old.shape[1], threads], np.int64)
    if len(old):
        _function()(*(each.data_ptr() for each in (*rows, found)), size.ctypes.data)
    return found.T


@functools.cache
def _function() -> Any:
    found = library(_SOURCE, *_FLAGS).sketch_sums
    found.argtypes, found.restype = [ctypes.c_void_p] * 6, None
    return found
