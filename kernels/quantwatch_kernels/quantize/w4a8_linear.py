"""Linear layer with 4-bit weights and int8 activations per token, computed as W8A8.

Scales of groups don't leave an integer sum over the whole row, unless they are whole multiples of
one scale per channel (`stepped`): w = ((code − zero) · step) · scale, and what stands in brackets
is an int8 code. So a layer is stored at 4 + 8/group + 16/K bits (zero points beside them) and
multiplies as fast and as exactly as int8 does; what is given up is that a group's scale has few
values. One scale per channel is such a multiple already, step 1. Free scales of groups are refused:
rounding them now would give other values than those that were chosen and measured.

In memory the int8 codes are kept beside the packed ones once the layer has run.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.packing import unpack
from quantwatch_kernels.quantize.qparams import QParams, check_matrix
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerChannel, PerGroup, WeightSpec
from quantwatch_kernels.quantize.row_codes import SYMMETRIC_ROWS
from quantwatch_kernels.quantize.w8a8_linear import (
    W8A8_BACKENDS,
    W8A8Linear,
    w8a8_why_not,
)
from quantwatch_kernels.registry import Op

__all__ = [
    "LARGEST_STEP",
    "W4A8_LINEAR",
    "ProgressiveWeight",
    "W4A8Linear",
    "progressive_weight",
    "w4a8_why_not",
]

LARGEST_STEP = 127 // INT4.qmax
"""Of int4; of uint4 it is 8 … 15, by the zero point."""
_CHANNEL = WeightSpec(INT8, PerChannel())


class ProgressiveWeight(NamedTuple):
    """Codes [N, K] of 4 bits, scales [N, 1], uint8 steps and zeros [N, G] or None (1 and 0)."""

    codes: Tensor
    steps: Tensor | None
    scales: Tensor
    zeros: Tensor | None
    spec: WeightSpec

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "ProgressiveWeight":
        """Take a quantized weight apart. Raises ValueError if its groups' scales are free."""
        scales, zeros, base = weight.qparams.scales, weight.qparams.zeros, weight.qparams.base
        columns, spec = weight.codes.shape[1], weight.spec
        if base is not None:
            # Products of a base and a step are within an ulp of it; NaN is a step of 1.
            steps = (scales / base.float()).round().nan_to_num(nan=1.0).to(torch.uint8)
            return cls(weight.codes, steps, base, zeros, spec)
        if spec.granularity.group_size(columns) < columns:
            raise ValueError(f"w4a8_linear: {_FREE}.")
        return cls(weight.codes, None, scales, zeros, spec)

    @property
    def group_size(self) -> int:
        """Inputs that share a step."""
        return self.spec.granularity.group_size(self.codes.shape[1])

    def expanded(self) -> QuantizedWeight:
        """Return the same values as int8 codes with a scale per channel."""
        codes = self.codes.to(torch.int16)
        if self.zeros is not None:
            codes = codes - self._by_column(self.zeros)
        if self.steps is not None:
            codes = codes * self._by_column(self.steps)
        return QuantizedWeight(codes.to(torch.int8), QParams(self.scales, None), _CHANNEL)

    def _by_column(self, per_group: Tensor) -> Tensor:
        spread = per_group.to(torch.int16).repeat_interleave(self.group_size, dim=1)
        return spread[:, : self.codes.shape[1]]


_FREE = 'scales of groups must be multiples of one per channel (scales = "stepped")'


def w4a8_why_not(columns: int, weights: WeightSpec, activations: ActivationSpec) -> str | None:
    """Say why this operator can't multiply such weights and activations, None when it can."""
    if weights.format.bits != 4 or weights.zero == "float":
        return f"weights must be int4, or uint4 with integer zeros, not {weights.to_json()}"
    if weights.granularity.group_size(columns) < columns and weights.scales != "stepped":
        return _FREE
    return w8a8_why_not(columns, _CHANNEL, activations)


def progressive_weight(weight_NK: Tensor, group_size: int) -> ProgressiveWeight:
    """Quantize a float matrix to int4. A row with a NaN or an infinity gets scale NaN.

    Raises ValueError unless it is a float matrix with columns and the groups have at least 2.
    """
    check_matrix(weight_NK)
    spec = WeightSpec(INT4, PerGroup(group_size), scales="stepped")
    if not weight_NK.shape[1]:
        raise ValueError("a progressive weight needs at least one column.")
    return ProgressiveWeight.of(quantize_weight(weight_NK, spec))


class W4A8Linear(W8A8Linear):
    """Buffers: `weight_packed` and `zeros` as in PackedLinear, `scales` [out, 1], `steps` or None.

    Raises ValueError for weights or activations that are not of this kind.
    """

    steps: Tensor | None

    def __init__(
        self,
        weight: ProgressiveWeight | QuantizedWeight,
        bias: nn.Parameter | None,
        activations: ActivationSpec | None = None,
        backend: str | None = None,
    ) -> None:
        """Pack a weight [out, in]; `activations` None is symmetric int8 per token."""
        activations = SYMMETRIC_ROWS if activations is None else activations
        if reason := w4a8_why_not(weight.codes.shape[1], weight.spec, activations):
            raise ValueError(f"w4a8_linear: {reason}.")
        parts = ProgressiveWeight.of(weight) if isinstance(weight, QuantizedWeight) else weight
        stored = QuantizedWeight(parts.codes, QParams(parts.scales, parts.zeros), parts.spec)
        PackedLinear.__init__(self, stored, bias, W4A8_LINEAR, backend)  # type: ignore[arg-type]
        self.register_buffer("steps", parts.steps)
        self.activations = activations

    def quantized(self) -> QuantizedWeight:
        """Return the weight as int8 codes with a scale per channel."""
        return self.progressive().expanded()

    def progressive(self) -> ProgressiveWeight:
        """Return the weight as it is stored, unpacked."""
        codes = unpack(self.weight_packed, self.spec.format, self.in_features)
        zeros = self.zeros
        if zeros is not None:
            groups = 1 if self.steps is None else self.steps.shape[1]
            zeros = unpack(zeros, self.spec.format, groups)
        return ProgressiveWeight(codes, self.steps, self.scales, zeros, self.spec)


W4A8_LINEAR: Op[[Tensor, W8A8Linear, Tensor | None], Tensor] = Op("w4a8_linear")
"""(input [.., in], weight, bias) → [.., out] in the input's dtype."""
for _name, (_run, _why_not) in W8A8_BACKENDS.items():
    W4A8_LINEAR.register(_name, _why_not)(_run)
