"""The color scale of all heatmaps: logarithmic, with bands of their own for what has no logarithm.

Below the gradient lie "not measured", −∞ and 0 (exact); above it +∞ and NaN. The color bar
is the legend of everything on the picture, and its ticks say the real values.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantwatch_dashboard.charts import palette

_DEFAULT_RANGE = (1e-6, 1.0)


@dataclass(frozen=True, slots=True)
class LogScale:
    """Colours for `low` … `high` (both positive), clamped outside, and the bands that occur."""

    low: float
    high: float
    below: tuple[tuple[str, str], ...]
    above: tuple[tuple[str, str], ...]
    clamped: tuple[bool, bool] = (False, False)
    """Whether cells lie below `low` or above `high`; the ends of the color bar then say so."""

    @property
    def band(self) -> float:
        """Height of one band, in decades."""
        return 0.06 * (math.log10(self.high) - math.log10(self.low))

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest coordinate, in decades."""
        return (
            math.log10(self.low) - self.band * len(self.below),
            math.log10(self.high) + self.band * len(self.above),
        )

    def place(self, values: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return each cell's coordinate on the color axis."""
        low, high = math.log10(self.low), math.log10(self.high)
        # At the very end of the gradient a cell could take the color of the band beside it.
        inset = 1e-4 * (high - low)
        with np.errstate(divide="ignore", invalid="ignore"):
            places = np.log10(np.clip(values, self.low, self.high))
            places = np.clip(places, low + inset, high - inset)
        for label, mask in _kinds(values, missing).items():
            if mask.any():
                places[mask] = self._centre(label)
        return places.astype(np.float32)

    def _centre(self, label: str) -> float:
        low, high = math.log10(self.low), math.log10(self.high)
        for place, (name, _) in enumerate(self.below):
            if name == label:
                return low - self.band * (len(self.below) - place - 0.5)
        names = [name for name, _ in self.above]
        return high + self.band * (names.index(label) + 0.5)

    def colors(self) -> list[tuple[float, str]]:
        """Return the Plotly color scale: hard bands around a smooth gradient."""
        start, end = self.bounds
        stops: list[tuple[float, str]] = []
        edge = start
        for _, color in self.below:
            stops += [((edge - start) / (end - start), color)]
            edge += self.band
            stops += [((edge - start) / (end - start), color)]
        stops += _gradient(math.log10(self.low), math.log10(self.high), start, end)
        edge = math.log10(self.high)
        for _, color in self.above:
            stops += [((edge - start) / (end - start), color)]
            edge += self.band
            stops += [((edge - start) / (end - start), color)]
        # Edges that are equal may differ by rounding, and Plotly wants them in order and up to 1.
        places = np.maximum.accumulate(np.clip([place for place, _ in stops], 0.0, 1.0)).tolist()
        return list(zip([*places[:-1], 1.0], (color for _, color in stops), strict=True))

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return coordinates and labels of the color bar: decades, and the name of each band."""
        low, high = math.log10(self.low), math.log10(self.high)
        step = max(1, math.ceil((high - low) / 6))
        decades = list(range(round(low), round(high) + 1, step))
        places = [float(d) for d in decades]
        labels = [_decade(d) for d in decades]
        if self.clamped[0] and decades[0] == round(low):
            labels[0] = f"≤ {labels[0]}"
        if self.clamped[1] and decades[-1] == round(high):
            labels[-1] = f"≥ {labels[-1]}"
        for name, _ in (*self.below, *self.above):
            places.append(self._centre(name))
            labels.append(name)
        return places, labels


def log_scale(
    values: NDArray[np.float64],
    missing: NDArray[np.bool_],
    fixed: tuple[float, float] | None = None,
) -> LogScale:
    """Choose whole decades around the positive cells (at most 8), or take the fixed range."""
    kinds = _kinds(values, missing)
    numbers = values[np.isfinite(values) & (values != 0) & ~missing]
    low, high = fixed or _range(numbers[numbers > 0])
    clamped = bool((numbers < low).any()), bool((numbers > high).any())
    below = tuple(
        (name, color)
        for name, color in (
            ("not measured", palette.NOT_MEASURED),
            ("−∞", palette.NEGATIVE_INFINITY),
            ("0 (exact)", palette.ZERO),
        )
        if kinds[name].any()
    )
    above = tuple(
        (name, color)
        for name, color in (("+∞", palette.POSITIVE_INFINITY), ("NaN", palette.NAN))
        if kinds[name].any()
    )
    return LogScale(low, high, below, above, clamped)


def _kinds(values: NDArray[np.float64], missing: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    return {
        "not measured": missing,
        "−∞": np.isneginf(values) & ~missing,
        "0 (exact)": (values == 0) & ~missing,
        "+∞": np.isposinf(values) & ~missing,
        "NaN": np.isnan(values) & ~missing,
    }


def _range(positive: NDArray[np.float64]) -> tuple[float, float]:
    if positive.size == 0:
        return _DEFAULT_RANGE
    high = min(308, math.ceil(math.log10(float(positive.max())) - 1e-9))
    low = math.floor(math.log10(float(positive.min())) + 1e-9)
    low = min(max(low, high - 8, -300), 307)
    return 10.0**low, 10.0 ** (high if high > low else low + 1)


def _gradient(low: float, high: float, start: float, end: float) -> list[tuple[float, str]]:
    places = np.linspace(low, high, len(palette.INFERNO))
    return [
        ((float(p) - start) / (end - start), c)
        for p, c in zip(places, palette.INFERNO, strict=True)
    ]


def _decade(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -4 < exponent < 4 else f"1e{exponent}".replace("-", "−")
