"""Linear layer with 4-bit weights in groups, two codes per byte."""

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.packed_linear import (
    LinearOp,
    PackedLinear,
    flat_bfloat16,
    register_float_backends,
)
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.registry import Op

__all__ = ["INT4_LINEAR", "int4_aten_why_not"]

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
    packed, scales_and_zeros = weight.native(_native)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        flat_bfloat16(x), packed, weight.group_size, scales_and_zeros
    )
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else y + bias


register_float_backends(INT4_LINEAR)
