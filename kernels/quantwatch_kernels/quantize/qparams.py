"""Scales and zero points of groups: from the range, or by the smallest error.

w ≈ (code − zero) · scale, N rows (output channels), K columns (inputs), G = ⌈K / group size⌉ groups
per row. Arithmetic is float32 whatever the weight's dtype (in float16 255/0.001 is infinite); the
scale is then rounded to the dtype it is stored in, *before* codes and zero are chosen, so that
rounding it costs precision of the grid and shifts no value: every one is within half a stored step.
With a zero point a 16-bit scale that would leave an end of the range further outside is rounded up,
and a tensor with a float zero that 16 bits move by more than half a step (a group far from 0 for
its width) keeps float32 scales and zeros.

- symmetric: scale = absmax / qmax.
- asymmetric, integer zero: the range is widened to hold 0, scale = (max − min) / qmax,
  zero = clamp(round(−min / scale)). Without the widening a group 10.5 … 14 would become 3.5
  (llm-awq#193).
- asymmetric, float zero: scale = (max − min) / qmax, zero = −min / scale, any value.

A group of zeros, or one so small that its scale underflows, has scale 1 and dequantizes to exact
zeros. A group with a NaN or infinite weight has scale NaN: the fault stays measurable.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec

__all__ = [
    "QParams",
    "check_matrix",
    "choose_qparams",
    "group_range",
    "grouped",
    "qparams_as_stored",
    "qparams_of_range",
    "spread",
    "storable",
]

_FP16_NORMAL = torch.finfo(torch.float16).smallest_normal
_FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class QParams:
    """Scales [N, G] (positive, or NaN where a group isn't finite) and zero points [N, G] or None.

    Zeros are in steps: uint8 if integers, of the scales' dtype otherwise.
    """

    scales: Tensor
    zeros: Tensor | None
    base: Tensor | None = None
    """[N, 1], where scales are stepped: what they are whole multiples of (`stepped`)."""


def grouped(weight_NK: Tensor, group_size: int) -> Tensor:
    """Return float32 [N, G, group_size]; a short last group is filled by repeating its last column.

    Repeating changes neither minimum nor maximum. K must be positive.
    """
    weight = weight_NK.float()
    missing = -weight.shape[1] % group_size
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(-1, missing)], 1)
    return weight.reshape(len(weight), weight.shape[1] // group_size, group_size)


def spread(per_group_NG: Tensor, group_size: int, columns: int) -> Tensor:
    """Return per-group values at every column, float32 [N, K]."""
    return per_group_NG.float().repeat_interleave(group_size, dim=-1)[:, :columns]


def choose_qparams(weight_NK: Tensor, spec: WeightSpec) -> QParams:
    """Return the parameters that hold each group's whole range.

    Raises ValueError unless the weight is a float matrix.
    """
    check_matrix(weight_NK)
    low, high = group_range(weight_NK, spec)
    return qparams_of_range(low, high, spec)


def check_matrix(weight: Tensor) -> None:
    """Raise ValueError unless `weight` is a float matrix."""
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"a weight must be a float matrix; it is {weight.dtype} {list(weight.shape)}."
        )


def group_range(weight_NK: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each group, float32 [N, G]; NaN where one isn't finite."""
    rows, columns = weight_NK.shape
    if not columns:
        empty = torch.zeros(rows, 0, device=weight_NK.device)
        return empty, empty.clone()
    groups = grouped(weight_NK, spec.granularity.group_size(columns))
    low, high = groups.amin(-1), groups.amax(-1)
    if isinstance(spec.granularity, PerTensor) and rows:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return low.where(finite, torch.nan), high.where(finite, torch.nan)


def qparams_of_range(low: Tensor, high: Tensor, spec: WeightSpec) -> QParams:
    """Return the parameters for groups that span low … high (float32, any equal shape).

    float32 where the spec's scale dtype doesn't hold one of them.
    """
    made, fits = qparams_as_stored(low, high, spec)
    if not bool(fits.all()):
        made, _ = qparams_as_stored(low, high, replace(spec, scale_dtype=torch.float32))
    return made


def qparams_as_stored(low: Tensor, high: Tensor, spec: WeightSpec) -> tuple[QParams, Tensor]:
    """Return parameters in the spec's scale dtype, and which groups it holds (true in float32)."""
    fmt, dtype = spec.format, spec.scale_dtype
    if spec.zero == "integer":
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if fmt.symmetric:
        width = torch.maximum(-low, high) / fmt.qmax
    else:
        # Divided first: high − low overflows in a group that spans float32's whole range.
        width = high / fmt.qmax - low / fmt.qmax
    if spec.zero == "float":
        width = torch.where(high > low, width, low.abs())
    wanted = _usable(width)
    scales = _rounded(wanted, dtype)
    fits = _holds(wanted, dtype)
    if fmt.symmetric:
        return QParams(scales, None), fits
    exact, zeros = _zeros(low, scales, spec)
    if dtype != torch.float32:
        ends = [end / scales.float() + zeros.float() for end in (low, high)]
        outside = (ends[0] < -0.5) | (ends[1] > fmt.qmax + 0.5)
        if bool(outside.any()):
            scales = torch.where(outside, _next_up(scales), scales)
            exact, zeros = _zeros(low, scales, spec)
        if spec.zero == "float":
            fits = fits & ~((zeros.float() - exact).abs() > 0.5)
    return QParams(scales, zeros), fits


def _zeros(low: Tensor, scales: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor]:
    """Return zero points before and after rounding to what is stored."""
    exact = -low / scales.float()
    if spec.zero == "float":
        return exact, exact.to(scales.dtype)
    rounded = exact.round().nan_to_num(nan=0.0).clamp(0, spec.format.qmax)
    return exact, rounded.to(torch.uint8)


def storable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive float32 scales to `dtype`; 0 becomes 1, what isn't finite NaN.

    float16 holds only 6.1e-5 … 65504 at full precision: a tensor with a scale outside stays
    float32, which `num_bytes` of the stored tensor shows.
    """
    scales = _usable(scales)
    return _rounded(scales, dtype) if bool(_holds(scales, dtype).all()) else scales


def _usable(scales: Tensor) -> Tensor:
    scales = torch.where(scales == 0, 1.0, scales)
    return torch.where(torch.isfinite(scales), scales, torch.nan)


def _holds(scales: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float16:
        return torch.ones_like(scales, dtype=torch.bool)
    return ~((scales < _FP16_NORMAL) | (scales > _FP16_MAX))


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    stored = scales.to(dtype)
    # Rounding may leave the dtype's range: bfloat16 has no subnormal of float32's last 16 bits.
    stored = torch.where(stored == 0, 1.0, stored)
    return torch.where(stored.isinf(), torch.finfo(dtype).max, stored)


def _next_up(scales: Tensor) -> Tensor:
    """Return the next larger number of a 16-bit dtype for positive ones, the largest for itself."""
    above = (scales.view(torch.int16) + 1).view(scales.dtype)
    return torch.where(torch.isfinite(above), above, scales)
