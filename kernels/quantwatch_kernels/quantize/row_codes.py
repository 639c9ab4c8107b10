"""Activations as int8 codes with a scale per row, for products in integers.

Scales, zeros and codes are those of `activations` with a dynamic 8-bit spec per token; asymmetric
codes 0 … 255 and their zeros are stored less 128, as int8 and int32, which leaves their difference
as it is. What the plain symmetric case gets here is speed: half the passes over memory.

A row of zeros, or so small that its scale underflows, has scale 1 and codes of zero. A row with a
NaN or an infinity has scale NaN and codes 0, so that its result is NaN and no other row's is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize.activations import input_qparams, quantize_input
from quantwatch_kernels.quantize.recipe import ActivationSpec

__all__ = ["SYMMETRIC_ROWS", "RowCodes", "quantize_rows", "quantize_rows_by_rule", "row_values"]

SYMMETRIC_ROWS = ActivationSpec(INT8)
"""Dynamic, per token, scale = absmax / 127."""
_NORMAL = torch.finfo(torch.float32).smallest_normal
_SHIFT = 128
_ROUNDER = 1.5 * 2**23
"""Added to |x| < 2²², it leaves x rounded half to even in the lowest bits of the float32."""


class RowCodes(NamedTuple):
    """Codes int8 [M, K], scales float32 [M, 1], zeros int32 [M, 1] or None: (code − zero)·scale."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def quantize_rows(x_MK: Tensor, spec: ActivationSpec = SYMMETRIC_ROWS) -> RowCodes:
    """Quantize a float matrix row by row. Raises ValueError unless it is a float matrix."""
    if x_MK.ndim != 2 or not x_MK.is_floating_point():
        raise ValueError(f"rows must be a float matrix; they are {x_MK.dtype} {list(x_MK.shape)}.")
    if not x_MK.shape[1]:
        ones = torch.ones(len(x_MK), 1, device=x_MK.device)
        zeros = None if spec.format.symmetric else torch.zeros_like(ones, dtype=torch.int32)
        return RowCodes(x_MK.to(torch.int8), ones, zeros)
    if not spec.format.symmetric or spec.clip_ratio != 1:
        return quantize_rows_by_rule(x_MK, spec)
    values = x_MK.to(torch.float32, copy=True)
    scales = values.abs().amax(-1, keepdim=True).div_(127)
    if not bool(((scales >= _NORMAL) & (scales < torch.inf)).all()):
        return quantize_rows_by_rule(x_MK, spec)
    # Twice as fast as round and a cast from float: those don't use vectors.
    codes = values.div_(scales).add_(_ROUNDER).view(torch.int32).to(torch.int8)
    return RowCodes(codes, scales, None)


def row_values(rows: RowCodes) -> Tensor:
    """Return the quantized values, float32 [M, K]."""
    codes = rows.codes.to(torch.int32)
    return (codes if rows.zeros is None else codes - rows.zeros).float() * rows.scales


def quantize_rows_by_rule(x_MK: Tensor, spec: ActivationSpec = SYMMETRIC_ROWS) -> RowCodes:
    """Quantize a matrix with at least one column as `activations` does: the definition."""
    made = input_qparams(x_MK, spec)
    codes = quantize_input(x_MK, made, spec)
    if made.zeros is None:
        return RowCodes(codes, made.scales, None)
    shifted = (codes.to(torch.int16) - _SHIFT).to(torch.int8)
    return RowCodes(shifted, made.scales, made.zeros.to(torch.int32) - _SHIFT)
