"""Linear layer with int8 weights: per channel natively, per group by dequantizing."""

import torch
from torch import Tensor

from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize.packed_linear import (
    LinearOp,
    PackedLinear,
    PackedWeight,
    flat_bfloat16,
    register_float_backends,
)
from quantwatch_kernels.registry import Op

__all__ = ["INT8_LINEAR", "Int8Linear", "int8_aten_why_not"]

INT8_LINEAR: LinearOp = Op("int8_linear")


def int8_aten_why_not(out_features: int, in_features: int, group_size: int) -> str | None:
    """Say why `_weight_int8pack_mm` can't multiply a weight, None when it can."""
    del out_features
    if group_size < in_features:
        return "the native int8 kernel takes one scale per channel, not per group"
    if in_features % 16:
        # torch 2.13 reads past the row's end in bfloat16: wrong by 1e37, or a crash.
        return f"the native int8 kernel needs in_features divisible by 16, not {in_features}"
    return None


def _why_not(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> str | None:
    del bias
    if x.device.type != "cpu":
        return f"the native int8 kernel runs on CPU only, not {x.device.type}"
    return int8_aten_why_not(weight.out_features, weight.in_features, weight.group_size)


@INT8_LINEAR.register("aten", _why_not)
def _aten(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    codes, scales = weight.native()
    y = torch._weight_int8pack_mm(flat_bfloat16(x), codes, scales)
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else y + bias


register_float_backends(INT8_LINEAR)


class Int8Linear(PackedLinear):
    """int8 codes [out, in] and float32 scales [out, groups]."""

    fmt = INT8
    op = INT8_LINEAR
    weight_codes: Tensor

    def pack(self, codes: Tensor) -> None:
        """Store the codes as they are."""
        self.register_buffer("weight_codes", codes.contiguous())

    def codes(self) -> Tensor:
        """Return int8 codes [out, in]."""
        return self.weight_codes

    def native(self) -> tuple[Tensor, Tensor]:
        """Return codes and bfloat16 scales [out]."""
        return self.weight_codes, self.scales[:, 0].to(torch.bfloat16)
