"""What a conformance case is made of: what is asked for, what an operator gets, what is right.

The error of a case is one number: the largest |result − twin| ÷ scale over all elements, where the
scale is what rounding is measured against there (Σ|x·w| of a dot product; the value itself of a
statistic). So one wrong element in a million is seen, which a ratio of norms would hide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from quantwatch_kernels.registry import Op
from quantwatch_kernels.testing import VIEWS

__all__ = ["LAYOUTS", "Ask", "Made", "OpCase", "largest_error", "reference_case", "scale_of"]


def _poisoned_tail(x: Tensor) -> Tensor:
    """Return x as a corner of a larger matrix that holds NaN beyond its last row and column."""
    padding = (*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 17)
    larger = x.new_full(padding, torch.nan)
    corner = larger[..., : x.shape[-2], : x.shape[-1]]
    corner.copy_(x)
    return corner


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {**VIEWS, "poisoned tail": _poisoned_tail}
"""Five memory layouts of a matrix. "expanded" repeats its first row with stride 0."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One cell of the grid: what inputs are to be made of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    device: str = "cpu"

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """Return a seeded standard normal matrix of the asked dtype, layout and device."""
        generator = Generator().manual_seed(seed)
        plain = torch.randn(*shape, generator=generator).to(self.dtype)
        return LAYOUTS[self.layout](plain.to(self.device))


class Made(NamedTuple):
    """Arguments of the operator, and what is right: float64 values with the scale of errors."""

    args: tuple[Any, ...]
    values: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class OpCase:
    """An operator, the grid it is tested on, its twin and its tolerance."""

    op: Op[..., Any]
    variant: str
    """What isn't shape, dtype or layout: the weights' format. Empty where there is only one."""
    make: Callable[[Ask], Made]
    tolerance: Callable[[str, torch.dtype], float]
    """(back end, dtype) → largest error."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    layouts: tuple[str, ...] = tuple(LAYOUTS)


def reference_case(
    op: Op[..., Any],
    arguments: Callable[[Ask], tuple[Any, ...]],
    tolerance: Callable[[str, torch.dtype], float],
    shapes: tuple[tuple[int, ...], ...],
    variant: str = "",
) -> OpCase:
    """Return a case whose twin is the operator's own back end `reference`, in float64.

    An error is relative to the value, plus a hundredth of the mean over the result: a row whose KL
    is a thousandth of the others' needs no more digits. Integers must be equal.
    """

    def make(ask: Ask) -> Made:
        args = arguments(ask)
        found = op.run("reference", *args)
        values = (found,) if isinstance(found, Tensor) else tuple(found)
        return Made(args, values, tuple(map(scale_of, values)))

    return OpCase(op, variant, make, tolerance, shapes)


def scale_of(value: Tensor) -> Tensor:
    """Return what errors of a statistic are relative to: its size and a hundredth of the mean."""
    if not value.is_floating_point():
        return torch.full(value.shape, 1e-9, dtype=torch.float64, device=value.device)
    size = value.double().abs()
    finite = size[torch.isfinite(size)]
    floor = finite.mean().item() if finite.numel() else 0.0
    return size + 0.01 * floor + 1e-15


def largest_error(results: tuple[Tensor, ...], made: Made) -> float:
    """Return max |result − twin| ÷ scale; 0 where both are equal, NaN in both included.

    A NaN or an infinity on one side alone is an infinite error, as is any difference where the
    scale is 0. Raises ValueError when a shape differs.
    """
    worst = 0.0
    for result, value, scale in zip(results, made.values, made.scales, strict=True):
        if result.shape != value.shape:
            raise ValueError(f"shape {list(result.shape)} is not {list(value.shape)}")
        a, b = result.double(), value.double()
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs() / scale.double())
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = max(worst, error.max().item() if error.numel() else 0.0)
    return worst
