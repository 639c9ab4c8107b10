"""Ranges of groups by the smallest rounding error instead of the largest weight.

For each group the search takes the range low … high that minimises Σ h_j |ŵ_j − w_j|^p over a grid:
both ends shrunk together from 1 to 0.4 of the plain range, then each end alone around the best
(asymmetric formats). h is an importance per column (the diagonal of the inputs' Hessian) or 1; p is
2, or 2.4 to punish clipped outliers more. Errors are measured with the scale as it is stored, and
the plain range is in the grid: the result is never worse than it in this objective. A group that
isn't finite keeps its plain range, whose scale is NaN. Given up: a closed form, which a non-convex
objective doesn't have.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantwatch_kernels.quantize.qparams import (
    QParams,
    choose_qparams,
    group_range,
    grouped,
    qparams_as_stored,
    qparams_of_range,
)
from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec

__all__ = ["GroupCost", "column_cost", "hessian_cost", "mse_qparams", "search_qparams"]

GroupCost = Callable[[Tensor], Tensor]
"""Rounding errors [N, G, S], overwritten, → cost of each group [N, G]; padding must cost 0."""

_BOTH = tuple((1 - 0.025 * i, 1 - 0.025 * i) for i in range(1, 25))
_ONE = (0.7, 0.8, 0.86, 0.91, 0.955, 1.045, 1.09)
_HIGH = tuple((1.0, share) for share in _ONE)
_LOW = tuple((share, 1.0) for share in _ONE)
_CHUNK = 1 << 17  # weights at a time: the passes over a chunk stay in the cache


def mse_qparams(
    weight_NK: Tensor, spec: WeightSpec, importance_K: Tensor | None = None, norm: float = 2.0
) -> QParams:
    """Return the parameters with the smallest Σ importance · |error|^norm in each group.

    Raises ValueError for a norm below 1 and for importances that are no K finite numbers ≥ 0.
    """
    columns = weight_NK.shape[-1]
    return search_qparams(weight_NK, spec, column_cost(spec, columns, importance_K, norm))


def column_cost(
    spec: WeightSpec, columns: int, importance_K: Tensor | None = None, norm: float = 2.0
) -> GroupCost:
    """Return the cost Σ importance · |error|^norm for weights with this many columns."""
    if not norm >= 1:
        raise ValueError(f"the norm of rounding errors is at least 1; it is {norm}.")
    if importance_K is None:
        importance_K = torch.ones(columns)
    good = torch.isfinite(importance_K) & (importance_K >= 0)
    if importance_K.shape != (columns,) or not bool(good.all()):
        raise ValueError(
            f"importances must be {columns} finite numbers ≥ 0; they are "
            f"{list(importance_K.shape)}, {int((~good).sum())} of them bad."
        )
    size = spec.granularity.group_size(columns)
    padded = torch.nn.functional.pad(importance_K.float(), (0, -columns % size))
    importance_GS = padded.reshape(len(padded) // size, size)

    def cost(errors_NGS: Tensor) -> Tensor:
        powers = errors_NGS.square_() if norm == 2 else errors_NGS.abs_().pow_(norm)
        return torch.einsum("ngs,gs->ng", powers, importance_GS.to(powers.device))

    return cost


def hessian_cost(spec: WeightSpec, hessian_KK: Tensor) -> GroupCost:
    """Return the cost e H e of a group's errors e, H the block of its own columns."""
    columns = len(hessian_KK)
    size = spec.granularity.group_size(columns)
    missing = -columns % size
    padded = torch.nn.functional.pad(hessian_KK.float(), (0, missing, 0, missing))
    count = len(padded) // size
    blocks_GSS = padded.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def cost(errors_NGS: Tensor) -> Tensor:
        weighted = torch.bmm(errors_NGS.transpose(0, 1), blocks_GSS.to(errors_NGS.device))
        return (weighted.transpose(0, 1) * errors_NGS).sum(-1)

    return cost


def search_qparams(weight_NK: Tensor, spec: WeightSpec, cost: GroupCost) -> QParams:
    """Return the parameters whose ranges cost least among the grid's."""
    plain = choose_qparams(weight_NK, spec)
    if not weight_NK.numel():
        return plain
    # A tensor of float16 scales that doesn't fit is stored as float32: so are its candidates.
    stored = replace(spec, scale_dtype=plain.scales.dtype)
    rows, columns = weight_NK.shape
    size = spec.granularity.group_size(columns)
    low, high = (end.clone() for end in group_range(weight_NK, spec))
    step = rows if isinstance(spec.granularity, PerTensor) else max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        groups = grouped(weight_NK[part], size)
        low[part], high[part] = _best_range(groups, (low[part], high[part]), stored, cost)
    return qparams_of_range(low, high, stored)


def _best_range(
    groups_NGS: Tensor, plain: tuple[Tensor, Tensor], spec: WeightSpec, cost: GroupCost
) -> tuple[Tensor, Tensor]:
    best = plain
    least = _cost(groups_NGS, *best, spec, cost)
    for shares in (_BOTH,) if spec.format.symmetric else (_BOTH, _HIGH, _LOW):
        centre = best
        for low_share, high_share in shares:
            low, high = centre[0] * low_share, centre[1] * high_share
            found = _cost(groups_NGS, low, high, spec, cost)
            better = found < least  # False where it is NaN
            least = torch.where(better, found, least)
            best = (torch.where(better, low, best[0]), torch.where(better, high, best[1]))
    return best


def _cost(
    groups_NGS: Tensor, low: Tensor, high: Tensor, spec: WeightSpec, cost: GroupCost
) -> Tensor:
    """Return the cost of each group; infinite where the spec's scale dtype doesn't hold it."""
    qparams, fits = qparams_as_stored(low, high, spec)
    fmt, scales = spec.format, qparams.scales.float().unsqueeze(-1)
    steps = groups_NGS / scales
    if qparams.zeros is None:
        steps.round_().clamp_(fmt.qmin, fmt.qmax)
    else:
        zeros = qparams.zeros.float().unsqueeze(-1)
        if spec.zero == "integer":
            steps.round_().add_(zeros).clamp_(fmt.qmin, fmt.qmax).sub_(zeros)
        else:
            steps.add_(zeros).round_().clamp_(fmt.qmin, fmt.qmax).sub_(zeros)
    found = cost(steps.mul_(scales).sub_(groups_NGS)).masked_fill_(~fits, torch.inf)
    if isinstance(spec.granularity, PerTensor):
        return found.sum().expand_as(found)
    return found
