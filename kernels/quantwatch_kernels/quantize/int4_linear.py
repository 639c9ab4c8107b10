"""Linear layer with 4-bit weights in groups, two codes per byte.

The native kernel reads a quarter of bfloat16's memory and pays with arithmetic: per decoder block
of SmolLM2-135M 2.5 × as fast as `F.linear` for one row, 1.1 × for 16, 0.8 × for 32. See `by_rows`.
"""

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.by_rows import count_if_slow, register_by_rows
from quantwatch_kernels.quantize.packed_linear import (
    LinearOp,
    PackedLinear,
    flat_bfloat16,
    register_float_backends,
)
from quantwatch_kernels.quantize.qparams import spread
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["FAST_ROWS", "INT4_LINEAR", "int4_aten_why_not"]

FAST_ROWS = 16
"""Up to so many rows the native kernel is faster than bfloat16 `F.linear`."""
INT4_LINEAR: LinearOp = Op("int4_linear")
_NATIVE_GROUPS = (32, 64, 128, 256)


def int4_aten_why_not(out_features: int, in_features: int, spec: WeightSpec) -> str | None:
    """Say why `_weight_int4pack_mm_for_cpu` can't multiply a weight, None when it can."""
    group_size = spec.granularity.group_size(in_features)
    if group_size not in _NATIVE_GROUPS:
        return f"the native int4 kernel takes groups of 32, 64, 128 or 256, not {group_size}"
    if in_features % group_size:
        return f"in_features {in_features} is not divisible by the group size {group_size}"
    if out_features % 16:
        return f"the native int4 kernel needs out_features divisible by 16, not {out_features}"
    return None


def _why_not(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> str | None:
    del bias
    if x.device.type != "cpu":
        return f"this native int4 kernel runs on CPU only, not {x.device.type}"
    return int4_aten_why_not(weight.out_features, weight.in_features, weight.spec)


def _native(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return the instruction set's packing and bfloat16 [G, out, 2].

    The kernel computes (code − 8)·scale + zero with codes 0 … 15: symmetric codes are shifted by 8,
    a zero point z in steps becomes (8 − z)·scale.
    """
    shift = 8 if weight.spec.format.symmetric else 0
    shifted = (weight.codes.to(torch.int32) + shift).contiguous()
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(shifted, 1)
    scales = weight.qparams.scales.float()
    zeros = weight.qparams.zeros
    offsets = torch.zeros_like(scales) if zeros is None else (8 - zeros.float()) * scales
    pairs = torch.stack([scales.T, offsets.T], -1).to(torch.bfloat16).contiguous()
    return packed, pairs


@INT4_LINEAR.register("aten", _why_not)
def _aten(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    count_if_slow("int4_linear", x, FAST_ROWS)
    packed, scales_and_zeros = weight.native(_native)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        flat_bfloat16(x), packed, weight.group_size, scales_and_zeros
    )
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


def _values(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return what the native kernel multiplies with, rounded to bfloat16 [out, in]."""
    columns = weight.codes.shape[1]
    size = weight.spec.granularity.group_size(columns)
    _, pairs = _native(weight)
    scales, offsets = (spread(pairs[..., n].T, size, columns) for n in (0, 1))
    shift = 0 if weight.spec.format.symmetric else 8
    return (((weight.codes.float() - shift) * scales + offsets).to(torch.bfloat16),)


register_by_rows(INT4_LINEAR, _aten, _why_not, _values, FAST_ROWS)
register_float_backends(INT4_LINEAR)


def _triton_why_not(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> str | None:
    del weight, bias
    if x.dtype == torch.float64:
        return "the Triton kernel sums in float32, not float64"
    return triton_why_not(x, bfloat16=x.dtype == torch.bfloat16)


def _triton_layout(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return float32 scales and zeros [out, G]; without zeros the scales alone."""
    zeros = weight.qparams.zeros
    scales = weight.qparams.scales.float().contiguous()
    return (scales,) if zeros is None else (scales, zeros.float().contiguous())


@INT4_LINEAR.register("triton", _triton_why_not)
def _triton(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    from quantwatch_kernels.quantize.triton.int4_matmul import Int4Weight, int4_matmul_triton

    scales, *zeros = weight.native(_triton_layout)
    packed = Int4Weight(
        weight.weight_packed, scales, zeros[0] if zeros else None, weight.group_size, bias
    )
    flat = x.reshape(x.shape[:-1].numel(), weight.in_features)
    return int4_matmul_triton(flat, packed).view(*x.shape[:-1], weight.out_features)
