"""The two operators on rows in front of an integer product, each with its back ends.

`quantize_rows`: symmetric int8 codes per row. All back ends give the same bits; `reference` is the
definition (`activations`), the others are faster.

`hadamard`: the rotation of a row; `torch` is `Hadamard.forward`, `reference` its dense matrix in
float64. `triton` needs factors of at most 128.
"""

import torch
from torch import Tensor

from quantwatch_kernels.quantize import native_rows
from quantwatch_kernels.quantize.hadamard import Hadamard, hadamard_base
from quantwatch_kernels.quantize.row_codes import quantize_rows, quantize_rows_by_rule
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.quantize.triton.limits import hadamard_why_not
from quantwatch_kernels.registry import Op

__all__ = ["HADAMARD", "QUANTIZE_ROWS"]

Rows = tuple[Tensor, Tensor]
QUANTIZE_ROWS: Op[[Tensor], Rows] = Op("quantize_rows")
"""(matrix [M, K]) → symmetric int8 codes [M, K], scales [M, 1]."""

HADAMARD: Op[[Tensor, Hadamard], Tensor] = Op("hadamard")
"""(matrix [M, width], rotation) → the rotated rows in the matrix's dtype."""


def _native_why_not(x_MK: Tensor) -> str | None:
    if x_MK.device.type != "cpu":
        return f"rows.cpp runs on CPU only, not {x_MK.device.type}"
    return native_rows.why_not()


@QUANTIZE_ROWS.register("cpp", _native_why_not)
def _quantize_rows_cpp(x_MK: Tensor) -> Rows:
    codes, scales, _ = native_rows.quantize_rows_native(x_MK)
    return codes, scales


@QUANTIZE_ROWS.register("torch")
def _quantize_rows_torch(x_MK: Tensor) -> Rows:
    codes, scales, _ = quantize_rows(x_MK)
    return codes, scales


@QUANTIZE_ROWS.register("reference")
def _quantize_rows_reference(x_MK: Tensor) -> Rows:
    codes, scales, _ = quantize_rows_by_rule(x_MK)
    return codes, scales


@QUANTIZE_ROWS.register("triton", triton_why_not)
def _quantize_rows_triton(x_MK: Tensor) -> Rows:
    from quantwatch_kernels.quantize.triton.rows import quantize_rows_triton

    codes, scales, _ = quantize_rows_triton(x_MK)
    return codes, scales


@HADAMARD.register("torch")
def _hadamard_torch(x_MK: Tensor, rotation: Hadamard) -> Tensor:
    rotated: Tensor = rotation(x_MK)
    return rotated


@HADAMARD.register("reference")
def _hadamard_reference(x_MK: Tensor, rotation: Hadamard) -> Tensor:
    return (x_MK.double() @ rotation.matrix().to(x_MK.device)).to(x_MK.dtype)


def _hadamard_triton_why_not(x_MK: Tensor, rotation: Hadamard) -> str | None:
    if x_MK.dtype == torch.float64:
        return "the Triton kernel mixes in float32, not float64"
    reason = hadamard_why_not(rotation.block, hadamard_base(rotation.block))
    return reason or triton_why_not(x_MK, bfloat16=x_MK.dtype == torch.bfloat16)


@HADAMARD.register("triton", _hadamard_triton_why_not)
def _hadamard_triton(x_MK: Tensor, rotation: Hadamard) -> Tensor:
    from quantwatch_kernels.quantize.triton.hadamard import hadamard_triton

    return hadamard_triton(x_MK, rotation)
