"""Linear layer with int8 weights: per channel natively, per group by dequantizing."""

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

__all__ = ["INT8_LINEAR", "int8_aten_why_not"]

INT8_LINEAR: LinearOp = Op("int8_linear")


def int8_aten_why_not(out_features: int, in_features: int, spec: WeightSpec) -> str | None:
    """Say why `_weight_int8pack_mm` can't multiply a weight, None when it can."""
    del out_features
    if not spec.format.symmetric:
        return "the native int8 kernel takes no zero points"
    if spec.granularity.group_size(in_features) < in_features:
        return "the native int8 kernel takes one scale per channel, not per group"
    if in_features % 16:
        # torch 2.13 reads past the row's end in bfloat16: wrong by 1e37, or a crash.
        return f"the native int8 kernel needs in_features divisible by 16, not {in_features}"
    return None


def _why_not(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> str | None:
    del bias
    if x.device.type != "cpu":
        return f"the native int8 kernel runs on CPU only, not {x.device.type}"
    return int8_aten_why_not(weight.out_features, weight.in_features, weight.spec)


def _native(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    return weight.codes, weight.qparams.scales[:, 0].to(torch.bfloat16).contiguous()


@INT8_LINEAR.register("aten", _why_not)
def _aten(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    codes, scales = weight.native(_native)
    y = torch._weight_int8pack_mm(flat_bfloat16(x), codes, scales)
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else y + bias


register_float_backends(INT8_LINEAR)
