"""What the packed linear layers share: codes and scales as buffers, the bias kept once.

The arithmetic is an operator with three back ends. `aten` is the native kernel, which always
computes in bfloat16 (its float32 path is scalar and 20 to 100 times slower; scales are rounded to
bfloat16 too); `dequantized` is a float matrix product with the quantized values; `reference` is
that in float64.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import WeightFormat
from quantwatch_kernels.quantize.affine import choose_scales, dequantize, quantize
from quantwatch_kernels.registry import Op

__all__ = ["LinearOp", "PackedLinear", "PackedWeight", "flat_bfloat16", "register_float_backends"]


class PackedWeight(Protocol):
    """A quantized weight [out, in]."""

    scales: Tensor
    group_size: int
    in_features: int
    out_features: int

    def codes(self) -> Tensor:
        """Return int8 codes [out, in]."""

    def native(self) -> tuple[Tensor, Tensor]:
        """Return weight and scales in the layout of the `aten` kernel."""


LinearOp = Op[[Tensor, PackedWeight, Tensor | None], Tensor]
"""(input [.., in], weight, bias) → [.., out] in the input's dtype."""


class PackedLinear(nn.Module):
    """A linear layer with packed weights; subclasses say how codes are stored and multiplied."""

    scales: Tensor
    bias: nn.Parameter | None
    op: LinearOp
    fmt: WeightFormat

    def __init__(
        self, weight: Tensor, bias: nn.Parameter | None, group_size: int, backend: str
    ) -> None:
        """Quantize a float weight [out, in]. Raises ValueError for anything else."""
        super().__init__()
        scales = choose_scales(weight, self.fmt, group_size)
        self.out_features, self.in_features = weight.shape
        self.group_size = group_size
        self.backend = backend
        self.register_buffer("scales", scales)
        self.register_parameter("bias", bias)
        self.pack(quantize(weight, scales, self.fmt, group_size))

    def pack(self, codes: Tensor) -> None:
        """Store int8 codes [out, in] as buffers."""
        raise NotImplementedError

    def codes(self) -> Tensor:
        """Return int8 codes [out, in]."""
        raise NotImplementedError

    def native(self) -> tuple[Tensor, Tensor]:
        """Return weight and scales in the layout of the `aten` kernel."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """Return the quantized values, float32 [out, in]."""
        return dequantize(self.codes(), self.scales, self.group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply activations [.., in] of any float dtype; the result has their dtype."""
        return self.op.run(self.backend, x, self, self.bias)

    def extra_repr(self) -> str:
        """Say in `print(model)` what this layer is."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"group_size={self.group_size}, bias={self.bias is not None}, backend={self.backend}"
        )


def _values(weight: PackedWeight) -> Tensor:
    return dequantize(weight.codes(), weight.scales, weight.group_size)


def _dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, _values(weight).to(x.dtype), bias)


def _reference(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    product = x.double() @ _values(weight).double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def register_float_backends(op: LinearOp) -> None:
    """Register the two back ends that always apply, after the native one."""
    op.register("dequantized")(_dequantized)
    op.register("reference")(_reference)


def flat_bfloat16(x: Tensor) -> Tensor:
    """Return activations as the contiguous bfloat16 matrix that the native kernels want."""
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()
