"""Color scales of heatmaps, with bands of their own for what has no place on the gradient.

`log_scale` for errors, `bits_scale` for headroom (linear, low is bad), `change_scale` for signed
differences. Below the gradient lie "not measured", −∞ and an exact 0 that has no logarithm; above
it +∞ and NaN. The color bar is the legend of everything on the picture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import tick_label
from quantwatch_dashboard.logic.cells import Kind

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]
Band = tuple[str, str]

_DEFAULT_RANGE = (1e-6, 1.0)
_BITS_RANGE = (0.0, 16.0)
"""float16 has 16 bits from 1 to its largest value; bfloat16 and float32 lie far above."""
_LARGEST = 4096.0
"""More bits than lie between any two float64."""
_MISSING: Band = ("not measured", palette.NOT_MEASURED)
_ZERO: Band = ("0 (exact)", palette.ZERO)
_LOW: Band = ("−∞", palette.NEGATIVE_INFINITY)
_HIGH: Band = ("+∞", palette.POSITIVE_INFINITY)
_NAN: Band = ("NaN", palette.NAN)


@dataclass(frozen=True, slots=True)
class Scale:
    """A gradient between two coordinates, and the bands that occur on the picture."""

    low: float
    high: float
    gradient: tuple[str, ...]
    below: tuple[Band, ...]
    above: tuple[Band, ...]
    is_log: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    """Coordinates and labels on the gradient."""

    @property
    def band(self) -> float:
        """Height of one band: half of it separates its name from the gradient's last mark."""
        return 0.09 * (self.high - self.low)

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest coordinate."""
        return (
            self.low - self.band * len(self.below),
            self.high + self.band * len(self.above),
        )

    def place(self, values: Values, missing: Mask) -> NDArray[np.float32]:
        """Return each cell's coordinate on the color axis."""
        # At the very end of the gradient a cell could take the color of the band beside it.
        inset = 1e-4 * (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            places = np.log10(np.maximum(values, 0.0)) if self.is_log else values.copy()
        places = np.clip(places, self.low + inset, self.high - inset)
        for label, mask in _kinds(values, missing).items():
            if label != _ZERO[0] or self.is_log:
                places[mask] = self._centre(label)
        return places.astype(np.float32)

    def _centre(self, label: str) -> float:
        for place, (name, _) in enumerate(self.below):
            if name == label:
                return self.low - self.band * (len(self.below) - place - 0.5)
        for place, (name, _) in enumerate(self.above):
            if name == label:
                return self.high + self.band * (place + 0.5)
        return self.low

    def colors(self) -> list[tuple[float, str]]:
        """Return the Plotly color scale: hard bands around a smooth gradient."""
        start, end = self.bounds
        stops: list[tuple[float, str]] = []
        edge = start
        for _, color in self.below:
            stops += [(edge, color), (edge + self.band, color)]
            edge += self.band
        gradient = np.linspace(self.low, self.high, len(self.gradient)).tolist()
        stops += list(zip(gradient, self.gradient, strict=True))
        edge = self.high
        for _, color in self.above:
            stops += [(edge, color), (edge + self.band, color)]
            edge += self.band
        shares = [(place - start) / (end - start) for place, _ in stops]
        # Edges that are equal may differ by rounding, and Plotly wants them in order and up to 1.
        places = np.maximum.accumulate(np.clip(shares, 0.0, 1.0)).tolist()
        return list(zip([*places[:-1], 1.0], (color for _, color in stops), strict=True))

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return coordinates and labels of the color bar: the gradient's, and each band's name."""
        named = [(self._centre(name), name) for name, _ in (*self.below, *self.above)]
        places, labels = zip(*self.marks, *named, strict=True)
        return list(places), list(labels)


def scale_for(
    kind: Kind, values: Values, missing: Mask, fixed: tuple[float, float] | None = None
) -> Scale:
    """Return the scale of a kind of value; `fixed` is in the value's own unit."""
    if kind == "log":
        return log_scale(values, missing, fixed)
    if kind == "bits":
        return bits_scale(values, missing, fixed)
    return change_scale(values, missing, fixed, ratio=kind == "ratio")


def log_scale(values: Values, missing: Mask, fixed: tuple[float, float] | None = None) -> Scale:
    """Choose whole decades around the positive cells (at most 8), or take the fixed range."""
    numbers = _finite(values, missing)
    numbers = numbers[numbers != 0]
    low, high = fixed or _range(numbers[numbers > 0])
    first, last = math.log10(low), math.log10(high)
    step = max(1, math.ceil((last - first) / 6))
    marks = [(float(d), tick_label(10.0**d)) for d in range(round(first), round(last) + 1, step)]
    below, above = _bands(values, missing, zero=True)
    ends = _ends(marks, (first, last), (bool((numbers < low).any()), bool((numbers > high).any())))
    return Scale(first, last, palette.INFERNO, below, above, is_log=True, marks=ends)


def bits_scale(values: Values, missing: Mask, fixed: tuple[float, float] | None = None) -> Scale:
    """Return the scale of headroom: linear, bright where little is left before an overflow."""
    numbers = _finite(values, missing)
    low, high = fixed or _span(np.clip(numbers, -_LARGEST, _LARGEST), _BITS_RANGE)
    below, above = _bands(values, missing, zero=False)
    marks = _even(low, high)
    ends = _ends(marks, (low, high), (bool((numbers < low).any()), bool((numbers > high).any())))
    return Scale(low, high, palette.INFERNO[::-1], below, above, marks=ends)


def change_scale(
    values: Values, missing: Mask, fixed: tuple[float, float] | None = None, *, ratio: bool
) -> Scale:
    """Return a diverging scale that is symmetric around "equal": blue is better, red is worse."""
    numbers = _finite(values, missing)
    largest = min(_LARGEST, float(np.abs(numbers).max(initial=0.0)))
    reach = fixed[1] if fixed else max(1.0, largest)
    step = math.ceil(reach / 4)
    reach = fixed[1] if fixed else step * math.ceil(reach / step)
    around = range(-int(reach // step), int(reach // step) + 1)
    marks = [(float(i * step), _change(i * step, ratio=ratio)) for i in around]
    outside = bool((numbers < -reach).any()), bool((numbers > reach).any())
    below, above = _bands(values, missing, zero=False)
    ends = _ends(marks, (-reach, reach), outside)
    return Scale(-reach, reach, palette.CHANGE, below, above, marks=ends)


def _finite(values: Values, missing: Mask) -> Values:
    found: Values = values[np.isfinite(values) & ~missing]
    return found


def _bands(
    values: Values, missing: Mask, *, zero: bool
) -> tuple[tuple[Band, ...], tuple[Band, ...]]:
    kinds = _kinds(values, missing)
    low = (_MISSING, _LOW, *((_ZERO,) if zero else ()))
    below, above = (
        tuple(band for band in bands if kinds[band[0]].any()) for bands in (low, (_HIGH, _NAN))
    )
    return below, above


def _kinds(values: Values, missing: Mask) -> dict[str, Mask]:
    return {
        _MISSING[0]: missing,
        _LOW[0]: np.isneginf(values) & ~missing,
        _ZERO[0]: (values == 0) & ~missing,
        _HIGH[0]: np.isposinf(values) & ~missing,
        _NAN[0]: np.isnan(values) & ~missing,
    }


def _ends(
    marks: Sequence[tuple[float, str]], ends: tuple[float, float], outside: tuple[bool, bool]
) -> tuple[tuple[float, str], ...]:
    """Return the marks, the outermost ones with ≤ and ≥ when cells lie beyond the gradient."""
    shown = list(marks)
    for at, end, sign, beyond in zip((0, -1), ends, "≤≥", outside, strict=True):
        if beyond and math.isclose(shown[at][0], end, abs_tol=1e-9):
            shown[at] = (shown[at][0], f"{sign} {shown[at][1]}")
    return tuple(shown)


def _even(low: float, high: float) -> list[tuple[float, str]]:
    step = max(1, math.ceil((high - low) / 8))
    count = math.floor((high - low) / step) + 1
    return [(low + i * step, f"{low + i * step:g}") for i in range(count)]


def _change(value: float, *, ratio: bool) -> str:
    if value == 0:
        return "equal"
    if not ratio:
        return f"{value:+g}".replace("-", "−")
    return text.factor(value)


def _span(numbers: Values, usual: tuple[float, float]) -> tuple[float, float]:
    if not numbers.size:
        return usual
    low, high = math.floor(float(numbers.min())), math.ceil(float(numbers.max()))
    return float(low), float(max(high, low + 1))


def _range(positive: Values) -> tuple[float, float]:
    if positive.size == 0:
        return _DEFAULT_RANGE
    high = min(308, math.ceil(math.log10(float(positive.max())) - 1e-9))
    low = math.floor(math.log10(float(positive.min())) + 1e-9)
    low = min(max(low, high - 8, -300), 307)
    return 10.0**low, 10.0 ** (high if high > low else low + 1)
