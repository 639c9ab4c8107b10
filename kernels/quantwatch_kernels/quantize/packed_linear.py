"""A linear layer with a packed weight: codes, scales and zeros as buffers, the bias kept once.

The arithmetic is an operator with several back ends: `aten` is the native kernel of a width (see
`int4_linear`, `int8_linear`), which always computes in bfloat16 (its float32 path is scalar and
20 to 100 times slower; scales are rounded to bfloat16 too); `dequantized` is a float matrix product
with the quantized values; `reference` is that in float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, within_range
from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.registry import Op

__all__ = [
    "LOWBIT_LINEAR",
    "Buffers",
    "LinearOp",
    "PackedLike",
    "PackedLinear",
    "flat_bfloat16",
    "register_float_backends",
]


class Buffers(NamedTuple):
    """What a packed layer stores; see PackedLinear."""

    weight_packed: Tensor
    scales: Tensor
    zeros: Tensor | None


class PackedLinear(nn.Module):
    """Buffers: `weight_packed` uint8 [out, ⌈in·bits/8⌉], `scales` [out, G], `zeros` or None.

    Integer zeros are packed like codes, [out, ⌈G·bits/8⌉]; float zeros are [out, G].
    """

    weight_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: nn.Parameter | None,
        op: "LinearOp",
        backend: str | None = None,
    ) -> None:
        """Pack a quantized weight [out, in]; `backend` None is the first one of `op`."""
        super().__init__()
        self._describe(weight.spec, weight.codes.shape[1], op, backend)
        packed = pack(weight.codes, self.spec.format)
        zeros = self._pack_zeros(weight.qparams.zeros)
        self._hold(Buffers(packed, weight.qparams.scales.contiguous(), zeros), bias)

    @classmethod
    def of_buffers(
        cls, buffers: "Buffers", like: "PackedLike", bias: nn.Parameter | None = None
    ) -> Self:
        """Build a layer around buffers that are packed already, as a checkpoint is loaded."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._describe(like.spec, like.in_features, like.op, like.backend)
        self._hold(buffers, bias)
        return self

    def _describe(
        self, spec: WeightSpec, in_features: int, op: "LinearOp", backend: str | None
    ) -> None:
        self.spec: WeightSpec = spec
        self.in_features = in_features
        self.op = op
        self.backend = backend
        self._native: dict[Callable[[QuantizedWeight], tuple[Tensor, ...]], tuple[Tensor, ...]] = {}

    def _hold(self, buffers: "Buffers", bias: nn.Parameter | None) -> None:
        self.out_features = len(buffers.weight_packed)
        for name, buffer in buffers._asdict().items():
            self.register_buffer(name, buffer)
        self.register_parameter("bias", bias)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.spec.granularity.group_size(self.in_features)

    def quantized(self) -> QuantizedWeight:
        """Return the weight, unpacked."""
        codes = unpack(self.weight_packed, self.spec.format, self.in_features)
        return QuantizedWeight(codes, QParams(self.scales, self._unpack_zeros()), self.spec)

    def native(self, make: Callable[[QuantizedWeight], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the layout that `make` makes, made on first use and never saved."""
        if make not in self._native:
            self._native[make] = make(self.quantized())
        return self._native[make]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply activations [.., in] of any float dtype; the result has their dtype."""
        return self.op.run(self.backend, x, self, self.bias)

    def extra_repr(self) -> str:
        """Say in `print(model)` what this layer is."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.spec.format.name}, group_size={self.group_size}, "
            f"bias={self.bias is not None}, backend={self.backend}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Forget native layouts when the buffers move or change dtype."""
        self._native.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Forget native layouts of the codes that were here: buffers are written in place."""
        self._native.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def _pack_zeros(self, zeros: Tensor | None) -> Tensor | None:
        if zeros is None or self.spec.zero == "float":
            return zeros
        return pack(zeros, self.spec.format)

    def _unpack_zeros(self) -> Tensor | None:
        if self.zeros is None or self.spec.zero == "float":
            return self.zeros
        return unpack(self.zeros, self.spec.format, self.scales.shape[1])


class PackedLike(NamedTuple):
    """What a packed layer is apart from its buffers."""

    spec: WeightSpec
    in_features: int
    op: "LinearOp"
    backend: str | None = None


LinearOp = Op[[Tensor, PackedLinear, Tensor | None], Tensor]
"""(input [.., in], weight, bias) → [.., out] in the input's dtype."""


def _dequantized(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    added = None if bias is None else bias.to(x.dtype)
    values = within_range(weight.quantized().values, x.dtype)
    return nn.functional.linear(x, values, added)


def _reference(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.quantized().values.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def register_float_backends(op: LinearOp) -> None:
    """Register the two back ends that always apply, after the native one."""
    op.register("dequantized")(_dequantized)
    op.register("reference")(_reference)


LOWBIT_LINEAR: LinearOp = Op("lowbit_linear")
"""Widths without a native kernel: 2, 3, 5, 6 and 7 bits."""
register_float_backends(LOWBIT_LINEAR)


def flat_bfloat16(x: Tensor) -> Tensor:
    """Return activations as the contiguous bfloat16 matrix that the native kernels want."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if not flat.numel():
        # Without elements any strides pass for contiguous; the kernels look at the strides.
        return flat.new_empty(flat.shape, dtype=torch.bfloat16)
    return flat.to(torch.bfloat16).contiguous()
