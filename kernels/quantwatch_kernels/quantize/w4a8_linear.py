"""Linear layer with 4-bit weights in groups and int8 activations per token, computed as W8A8.

Scales of groups don't leave an integer sum over the whole row, unless they are multiples of one
scale per channel: w = (code · step) · scale, code −7 … 7, step 1 … 18 per group, and code · step is
an int8 code of the same grid (progressive quantization, as in QServe, here symmetric). So a layer
is stored at 4 + 8/group + 32/K bits and multiplies as fast and as exactly as int8 does; what is
given up is that scales of groups come in eighteenths of the row's largest. Per group the step that
leaves the smaller squared error is taken, of the two around absmax/7 (the padding of a short last
group has none).

In memory the int8 codes are kept beside the packed ones once the layer has run.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.qparams import QParams, check_matrix, grouped, storable
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerChannel, PerGroup, WeightSpec
from quantwatch_kernels.quantize.row_codes import SYMMETRIC_ROWS
from quantwatch_kernels.quantize.w8a8_linear import (
    W8A8_BACKENDS,
    W8A8Linear,
    w8a8_why_not,
)
from quantwatch_kernels.registry import Op

__all__ = ["LARGEST_STEP", "W4A8_LINEAR", "ProgressiveWeight", "W4A8Linear", "progressive_weight"]

LARGEST_STEP = 127 // INT4.qmax
_CHANNEL = WeightSpec(INT8, PerChannel())


class ProgressiveWeight(NamedTuple):
    """Codes int8 −7 … 7 [N, K], steps uint8 1 … 18 [N, G], float32 scales [N, 1]."""

    codes: Tensor
    steps: Tensor
    scales: Tensor
    group_size: int

    def expanded(self) -> QuantizedWeight:
        """Return the same values as int8 codes with a scale per channel."""
        steps = self.steps.to(torch.int8).repeat_interleave(self.group_size, dim=1)
        codes = self.codes * steps[:, : self.codes.shape[1]]
        return QuantizedWeight(codes, QParams(self.scales, None), _CHANNEL)


def progressive_weight(weight_NK: Tensor, group_size: int) -> ProgressiveWeight:
    """Quantize a float matrix to nearest. A row with a NaN or an infinity gets scale NaN.

    Raises ValueError unless it is a float matrix with columns and the groups have at least 2.
    """
    check_matrix(weight_NK)
    size, columns = PerGroup(group_size).size, weight_NK.shape[1]
    if not columns:
        raise ValueError("a progressive weight needs at least one column.")
    groups = grouped(weight_NK, size)
    wanted = groups.abs().amax(-1) / INT4.qmax
    scales = storable(wanted.amax(1, keepdim=True) / LARGEST_STEP, torch.float32)
    multiple = (wanted / scales).nan_to_num(nan=1.0)
    low, high = (end.clamp(1, LARGEST_STEP) for end in (multiple.floor(), multiple.ceil()))
    low_codes, low_error = _codes(groups, scales * low, columns)
    high_codes, high_error = _codes(groups, scales * high, columns)
    lower = low_error < high_error
    steps = torch.where(lower, low, high).to(torch.uint8)
    chosen = torch.where(lower[..., None], low_codes, high_codes).to(torch.int8)
    return ProgressiveWeight(chosen.flatten(1)[:, :columns].contiguous(), steps, scales, size)


def _codes(groups: Tensor, scales_NG: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return codes [N, G, size] and each group's squared error [N, G] on the real columns."""
    steps = groups / scales_NG[..., None]
    codes = steps.round().nan_to_num(nan=0.0).clamp(INT4.qmin, INT4.qmax)
    errors = ((steps - codes) * scales_NG[..., None]).square().flatten(1)
    errors[:, columns:] = 0
    return codes, errors.view_as(groups).sum(-1)


class W4A8Linear(W8A8Linear):
    """Buffers: `weight_packed` int4 as in PackedLinear, `scales` [out, 1], `steps` [out, G]."""

    steps: Tensor

    def __init__(
        self,
        weight: ProgressiveWeight,
        bias: nn.Parameter | None,
        activations: ActivationSpec | None = None,
        backend: str | None = None,
    ) -> None:
        """Pack a weight [out, in]; `activations` None is symmetric int8 per token."""
        activations = SYMMETRIC_ROWS if activations is None else activations
        if reason := w8a8_why_not(weight.codes.shape[1], _CHANNEL, activations):
            raise ValueError(f"w4a8_linear: {reason}.")
        spec = WeightSpec(INT4, PerGroup(weight.group_size))
        stored = QuantizedWeight(weight.codes, QParams(weight.scales, None), spec)
        PackedLinear.__init__(self, stored, bias, W4A8_LINEAR, backend)  # type: ignore[arg-type]
        self.register_buffer("steps", weight.steps)
        self.activations = activations

    def quantized(self) -> QuantizedWeight:
        """Return the weight as int8 codes with a scale per channel."""
        codes = super().quantized().codes
        return ProgressiveWeight(codes, self.steps, self.scales, self.group_size).expanded()


W4A8_LINEAR: Op[[Tensor, W8A8Linear, Tensor | None], Tensor] = Op("w4a8_linear")
"""(input [.., in], weight, bias) → [.., out] in the input's dtype."""
for _name, (_run, _why_not) in W8A8_BACKENDS.items():
    W4A8_LINEAR.register(_name, _why_not)(_run)
