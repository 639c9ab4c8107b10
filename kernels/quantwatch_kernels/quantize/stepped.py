"""Scales of groups as whole multiples of one scale per row, for products in integers.

scale = step · base, step 1 … 127 ÷ m, where m is the largest |code − zero| of a group: 7 and 18
for int4, 8 … 15 and 15 … 8 for uint4, by its zero point. So (code − zero) · step is an int8 code of
one grid for the whole row (progressive quantization, as in QServe), whose sums need no scale of a
group. A row's base is as small as its largest group allows. Each group takes the smaller squared
error (by importance of its columns) of the two multiples around the scale that it would have had;
its zero point stays. Given up: a group whose range is a small part of the row's has few to choose
from. With a base of 16 bits every value is exact in float32.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantwatch_kernels.quantize.mse import GroupCost, column_cost
from quantwatch_kernels.quantize.qparams import QParams, grouped, storable
from quantwatch_kernels.quantize.recipe import WeightSpec

__all__ = ["with_steps"]

_LARGEST_CODE = 127


def with_steps(
    weight_NK: Tensor, qparams: QParams, spec: WeightSpec, importance_K: Tensor | None = None
) -> QParams:
    """Return the parameters with stepped scales and their base if the spec asks, else as they are.

    A row with a NaN or an infinity gets scales of NaN.
    """
    if spec.scales != "stepped":
        return qparams
    rows, columns = weight_NK.shape
    if not columns:
        return replace(qparams, base=torch.ones(rows, 1, device=weight_NK.device))
    groups = grouped(weight_NK, spec.granularity.group_size(columns))
    scales = qparams.scales.float()
    limit = torch.floor(_LARGEST_CODE / _reach(qparams, spec))
    # A group that rounds to zeros asks for nothing: its scale is 1 then, not a small one.
    empty = groups.abs().amax(-1) <= scales / 2
    wanted = torch.where(empty, 0.0, scales)
    base = storable((wanted / limit).amax(1, keepdim=True), spec.scale_dtype)
    multiple = (wanted / base.float()).nan_to_num(nan=1.0)
    low, high = (end.clamp(min=1).minimum(limit) for end in (multiple.floor(), multiple.ceil()))
    cost = column_cost(spec, columns, None if importance_K is None else importance_K.cpu())
    costs = [_cost(groups, step * base.float(), qparams, spec, cost) for step in (low, high)]
    steps = torch.where(costs[0] < costs[1], low, high)
    return QParams(steps * base.float(), qparams.zeros, base)


def _reach(qparams: QParams, spec: WeightSpec) -> Tensor:
    """Return the largest |code − zero| of each group, float32 [N, G]."""
    if qparams.zeros is None:
        return torch.full_like(qparams.scales, spec.format.qmax, dtype=torch.float32)
    zeros = qparams.zeros.float()
    return torch.maximum(zeros, spec.format.qmax - zeros)


def _cost(
    groups_NGS: Tensor, scales_NG: Tensor, qparams: QParams, spec: WeightSpec, cost: GroupCost
) -> Tensor:
    fmt, scales = spec.format, scales_NG[..., None]
    zeros = 0.0 if qparams.zeros is None else qparams.zeros.float()[..., None]
    codes = ((groups_NGS / scales).round() + zeros).clamp(fmt.qmin, fmt.qmax) - zeros
    return cost(codes * scales - groups_NGS)
