"""Inputs and twins of the operators on rows: int8 codes with their scales, and the rotation.

Codes and scales are defined in float32, so every back end must give the same bits. The rotation's
twin is the dense matrix in float64, its errors are measured against Σ|x·h|.
"""

import torch

from quantwatch_kernels.conformance.case import Ask, Made, OpCase
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.row_ops import HADAMARD, QUANTIZE_ROWS

__all__ = ["row_cases"]

_ROWS = ((1, 576), (5, 1536), (3, 1), (17, 65), (2, 1041), (0, 64))
_ROTATED = ((1, 576), (3, 1536), (2, 12), (5, 64), (0, 64), (2, 344))
# One rounding of the result; in float32, where all of it rounds, twice the largest error measured.
_MIXED = {torch.float32: 2.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def row_cases() -> tuple[OpCase, ...]:
    """Return the cases of both operators."""
    return (
        OpCase(QUANTIZE_ROWS, "int8 per row", _rows, lambda _backend, _dtype: 0.0, _ROWS),
        OpCase(HADAMARD, "signs of seed 1", _rotation, _mixed, _ROTATED),
    )


def _mixed(backend: str, dtype: torch.dtype) -> float:
    del backend
    return _MIXED[dtype]


def _rows(ask: Ask) -> Made:
    x = ask.randn(*ask.shape)
    values = x.float().cpu()
    scales = values.abs().amax(-1, keepdim=True) / 127
    scales[scales == 0] = 1.0
    codes = (values / scales).round().clamp(-127, 127).to(torch.int8)
    found = tuple(each.to(ask.device) for each in (codes, scales))
    return Made((x,), found, tuple(torch.ones_like(each, dtype=torch.float64) for each in found))


def _rotation(ask: Ask) -> Made:
    x, rotation = ask.randn(*ask.shape), Hadamard(ask.shape[1], seed=1).to(ask.device)
    matrix = rotation.matrix().to(ask.device)
    return Made((x, rotation), (x.double() @ matrix,), (x.double().abs() @ matrix.abs(),))
