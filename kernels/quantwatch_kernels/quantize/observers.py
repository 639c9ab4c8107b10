"""Ranges of activations for static scales: what an observer saw over calibration batches.

- minmax: smallest and largest value. Exact; order and batch boundaries don't matter.
- moving_average: old · d + batch · (1 − d) of each batch's minimum and maximum, d = 0.95; the first
  batch initialises (from 0 the average of 1, 1, 1, 10, 1 would be 0.65). A batch of n values
  has d = 0.95^(n/N), N the largest batch so far: a partial batch weighs what it holds, wherever it
  comes, the same data cut into smaller batches doesn't forget faster, and no batch leaves the old
  value less than 0.95. Depends on the order, and never covers what is rare.
- histogram, mse: the range with the smallest squared error of rounding and clipping over the
  histogram of all values; `histogram` moves both ends by turns, `mse` shrinks both by one factor.
- percentile: 0.01 % of the values may lie beyond each end.

The histogram's bins are dyadic: width 2^k, cut at multiples of it, and when a value lies outside,
k grows and neighbours are merged. So it depends on the values alone, neither on their order nor on
batches. 2 · 2^13 bins, of which the largest value uses at least half on its side.

The range is widened to hold 0 only when the scale is made. An empty batch changes nothing; a batch
that isn't finite raises ValueError: a range without it would hide the fault.
"""

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from quantwatch_kernels.formats import IntFormat
from quantwatch_kernels.quantize.qparams import QParams, qparams_of_range
from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec

__all__ = [
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "Observer",
    "ObserverName",
    "make_observer",
    "tensor_qparams",
]

ObserverName = Literal["minmax", "moving_average", "histogram", "mse", "percentile"]
_HALF = 2**13
_KEPT = 0.95
_TAIL = 1e-4
_FACTORS = tuple(n / 100 for n in range(1, 101))
_AROUND = tuple(n / 50 for n in range(25, 76))


class Observer(Protocol):
    """Sees batches of activations of any shape."""

    def update(self, x: Tensor) -> None:
        """See a batch. Raises ValueError if it isn't finite."""

    def range(self, fmt: IntFormat) -> tuple[float, float]:
        """Return (low, high) for codes of `fmt`. Raises ValueError if nothing was seen."""


def make_observer(name: ObserverName) -> Observer:
    """Return a fresh observer. Raises ValueError for an unknown name."""
    makers: dict[str, Callable[[], Observer]] = {
        "minmax": MinMaxObserver,
        "moving_average": MovingAverageObserver,
        "histogram": lambda: HistogramObserver("histogram"),
        "mse": lambda: HistogramObserver("mse"),
        "percentile": lambda: HistogramObserver("percentile"),
    }
    if name not in makers:
        raise ValueError(f"unknown observer {name!r}; allowed are {', '.join(makers)}.")
    return makers[name]()


def tensor_qparams(low: float, high: float, fmt: IntFormat) -> QParams:
    """Return one scale and zero point [1, 1] for values low … high; the range is made to hold 0."""
    zero: Literal["none", "integer"] = "none" if fmt.symmetric else "integer"
    ends = torch.tensor([low, high], dtype=torch.float32)
    return qparams_of_range(ends[:1, None], ends[1:, None], WeightSpec(fmt, PerTensor(), zero))


class MinMaxObserver:
    """Keeps the smallest and the largest value."""

    def __init__(self) -> None:
        self._ends: tuple[float, float] | None = None

    def update(self, x: Tensor) -> None:
        """See a batch. Raises ValueError if it isn't finite."""
        if (ends := _ends(x)) is not None:
            low, high = self._ends or ends
            self._ends = min(low, ends[0]), max(high, ends[1])

    def range(self, fmt: IntFormat) -> tuple[float, float]:  # noqa: ARG002 — any format
        """Return the smallest and the largest value. Raises ValueError if nothing was seen."""
        return _seen(self._ends)


class MovingAverageObserver:
    """Averages the ends of batches, 0.95 on the old value per batch as large as the largest."""

    def __init__(self, kept: float = _KEPT) -> None:
        if not 0 <= kept < 1:
            raise ValueError(f"the old value's weight lies in [0, 1); it is {kept}.")
        self._kept = kept
        self._ends: tuple[float, float] | None = None
        self._largest = 0

    def update(self, x: Tensor) -> None:
        """See a batch. Raises ValueError if it isn't finite."""
        ends = _ends(x)
        if ends is None:
            return
        self._largest = max(self._largest, x.numel())
        if self._ends is None:
            self._ends = ends
            return
        kept = self._kept ** (x.numel() / self._largest)
        low, high = (
            kept * old + (1 - kept) * new for old, new in zip(self._ends, ends, strict=True)
        )
        self._ends = low, high

    def range(self, fmt: IntFormat) -> tuple[float, float]:  # noqa: ARG002 — any format
        """Return the averaged ends. Raises ValueError if nothing was seen."""
        return _seen(self._ends)


class HistogramObserver:
    """Counts all values in dyadic bins and chooses the range from the counts."""

    def __init__(self, rule: Literal["histogram", "mse", "percentile"]) -> None:
        self._rule = rule
        self._extremes = MinMaxObserver()
        self._exponent: int | None = None
        """Bins are 2^exponent wide; bin _HALF starts at 0."""
        self._counts = torch.zeros(2 * _HALF, dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        """See a batch. Raises ValueError if it isn't finite."""
        ends = _ends(x)
        if ends is None:
            return
        self._extremes.update(x)
        self._make_room(max(-ends[0], ends[1]))
        assert self._exponent is not None
        steps = x.detach().double() * math.ldexp(1.0, -self._exponent)
        bins = steps.floor().long().flatten() + _HALF
        self._counts += torch.bincount(bins.cpu(), minlength=2 * _HALF)

    def range(self, fmt: IntFormat) -> tuple[float, float]:
        """Return the range that the rule chooses. Raises ValueError if nothing was seen."""
        low, high = self._extremes.range(fmt)
        if low == high:
            return low, high
        if self._rule == "percentile":
            return self._quantile(_TAIL, low, high), self._quantile(1 - _TAIL, low, high)
        used = self._counts.nonzero().flatten()
        centres = self._edge(used + 0.5)
        shares = self._counts[used].double()
        low, high = min(low, 0.0), max(high, 0.0)
        if fmt.symmetric:
            low, high = -max(-low, high), max(-low, high)
        if self._rule == "mse" or fmt.symmetric:
            return _best([(low * f, high * f) for f in _FACTORS], centres, shares, fmt)
        low, high = _best([(low * f, high * f) for f in _FACTORS], centres, shares, fmt)
        for _ in range(2):
            low, high = _best([(low, high * f) for f in _AROUND], centres, shares, fmt)
            low, high = _best([(low * f, high) for f in _AROUND], centres, shares, fmt)
        return low, high

    def _make_room(self, largest: float) -> None:
        """Widen the bins until ±largest lies inside."""
        # The bound is symmetric (−2^k alone would fit narrower bins), so that the width depends on
        # the magnitude only. Zeros fit any bins: those of the smallest normal float32.
        needed = math.frexp(max(largest, 2.0**-126))[1] - _HALF.bit_length() + 1
        if self._exponent is None:
            self._exponent = needed
        while self._exponent < needed:
            merged = self._counts.view(-1, 2).sum(1)
            self._counts = torch.zeros_like(self._counts)
            self._counts[_HALF // 2 : _HALF // 2 + _HALF] = merged
            self._exponent += 1

    def _edge(self, position: Tensor) -> Tensor:
        """Return the value at a position among the bins' edges, float64."""
        assert self._exponent is not None
        return (position.double() - _HALF) * math.ldexp(1.0, self._exponent)

    def _quantile(self, share: float, low: float, high: float) -> float:
        """Return the value below which `share` of all values lie, uniform within a bin."""
        below = self._counts.double().cumsum(0)
        wanted = share * below[-1]
        index = int(torch.searchsorted(below, wanted).clamp(max=2 * _HALF - 1))
        inside = self._counts[index].double()
        part = (wanted - (below[index] - inside)) / inside.clamp(min=1)
        value = float(self._edge(torch.tensor(float(index)) + part.clamp(0, 1)))
        return min(max(value, low), high)


def _best(
    ranges: list[tuple[float, float]], values: Tensor, counts: Tensor, fmt: IntFormat
) -> tuple[float, float]:
    """Return the range with the smallest squared error; of equals the widest."""
    errors = []
    for low, high in ranges:
        made = tensor_qparams(low, high, fmt)
        scale = made.scales.double()[0]
        zero = 0.0 if made.zeros is None else made.zeros.double()[0]
        codes = ((values / scale).round() + zero).clamp(fmt.qmin, fmt.qmax)
        errors.append(float((counts * ((codes - zero) * scale - values).square()).sum()))
    smallest = min(errors)
    return max(
        (r for r, error in zip(ranges, errors, strict=True) if error == smallest),
        key=lambda ends: ends[1] - ends[0],
    )


def _ends(x: Tensor) -> tuple[float, float] | None:
    if not x.numel():
        return None
    low, high = (end.item() for end in torch.aminmax(x.detach().double()))
    if not (math.isfinite(low) and math.isfinite(high)):
        count = int((~torch.isfinite(x)).sum())
        raise ValueError(f"{count} of {x.numel()} calibration activations are not finite.")
    return low, high


def _seen(ends: tuple[float, float] | None) -> tuple[float, float]:
    if ends is None:
        raise ValueError("no activation was observed: calibration never reached it.")
    return ends
