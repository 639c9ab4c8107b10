"""Linear layer with int8 weights: per channel natively, per group by dequantizing.

Per decoder block of SmolLM2-135M the native kernel is 1.9 × as fast as bfloat16 `F.linear` for one
row, 1.05 × for 10, 0.9 × for 14. See `by_rows`.
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
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.registry import Op

__all__ = ["FAST_ROWS", "INT8_LINEAR", "int8_aten_why_not"]

FAST_ROWS = 10
"""Up to so many rows the native kernel is faster than bfloat16 `F.linear`."""
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
    count_if_slow("int8_linear", x, FAST_ROWS)
    codes, scales = weight.native(_native)
    y = torch._weight_int8pack_mm(flat_bfloat16(x), codes, scales)
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else (y + bias).to(x.dtype)


def _values(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return what the native kernel multiplies with, rounded to bfloat16 [out, in]."""
    codes, scales = _native(weight)
    return ((codes.float() * scales[:, None].float()).to(torch.bfloat16),)


register_by_rows(INT8_LINEAR, _aten, _why_not, _values, FAST_ROWS)
register_float_backends(INT8_LINEAR)
