"""Linear layer with int4 weights in groups, two codes per byte."""

import torch
from torch import Tensor

from quantwatch_kernels.formats import INT4
from quantwatch_kernels.quantize.packed_linear import (
    LinearOp,
    PackedLinear,
    PackedWeight,
    flat_bfloat16,
    register_float_backends,
)
from quantwatch_kernels.quantize.packing import pack4, unpack4
from quantwatch_kernels.registry import Op

__all__ = ["INT4_LINEAR", "Int4Linear", "int4_aten_why_not"]

INT4_LINEAR: LinearOp = Op("int4_linear")
_NATIVE_GROUPS = (32, 64, 128, 256)


def int4_aten_why_not(out_features: int, in_features: int, group_size: int) -> str | None:
    """Say why `_weight_int4pack_mm_for_cpu` can't multiply a weight, None when it can."""
    if group_size not in _NATIVE_GROUPS:
        return f"the native int4 kernel takes groups of 32, 64, 128 or 256, not {group_size}"
    if in_features % group_size:
        return f"in_features {in_features} is not divisible by the group size {group_size}"
    if out_features % 16:
        return f"the native int4 kernel needs out_features divisible by 16, not {out_features}"
    return None


def _why_not(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> str | None:
    del bias
    if x.device.type != "cpu":
        return f"this native int4 kernel runs on CPU only, not {x.device.type}"
    return int4_aten_why_not(weight.out_features, weight.in_features, weight.group_size)


@INT4_LINEAR.register("aten", _why_not)
def _aten(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    packed, scales_and_zeros = weight.native()
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        flat_bfloat16(x), packed, weight.group_size, scales_and_zeros
    )
    y = y.view(*x.shape[:-1], weight.out_features).to(x.dtype)
    return y if bias is None else y + bias


register_float_backends(INT4_LINEAR)


class Int4Linear(PackedLinear):
    """Packed codes uint8 [out, ⌈in/2⌉] and float32 scales [out, groups]."""

    fmt = INT4
    op = INT4_LINEAR
    weight_packed: Tensor
    native_packed: Tensor | None
    native_scales: Tensor | None

    def pack(self, codes: Tensor) -> None:
        """Store the canonical packing; the native layout beside it is never saved."""
        self.register_buffer("weight_packed", pack4(codes))
        self.register_buffer("native_packed", None, persistent=False)
        self.register_buffer("native_scales", None, persistent=False)

    def codes(self) -> Tensor:
        """Return int8 codes [out, in]."""
        return unpack4(self.weight_packed, self.in_features)

    def native(self) -> tuple[Tensor, Tensor]:
        """Return the instruction set's packing and bfloat16 [groups, out, 2], made on first use.

        The kernel computes (code − 8)·scale + zero with codes 0 … 15, so ours are shifted by 8.
        """
        if self.native_packed is None or self.native_scales is None:
            shifted = (self.codes().to(torch.int32) + 8).contiguous()
            self.native_packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(shifted, 1)
            scales = self.scales.T.to(torch.bfloat16)
            self.native_scales = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
        return self.native_packed, self.native_scales
