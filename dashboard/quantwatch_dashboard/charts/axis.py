"""Axes that say the truth about exact zeros, NaN and infinities: each has a row of its own.

Layers are compared over decades (`by_decades`); a trend shows whether *one* value moved, so its
axis follows the values (`close_to`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantwatch_dashboard.logic.lines import Value

_LEAST_DECADES, _MOST_DECADES = 0.35, 12.0
_LEAST_SPAN = 0.02
"""Of the largest magnitude: noise in the last digits is not blown up to a mountain range."""
_LOWEST, _HIGHEST, _FARTHEST = -323, 308.2, 4e307
"""What a float can hold: decades of a log axis, and an end of a linear one with room beyond."""
_SPARE, _ROW = 0.08, 0.12
"""Room around the values, and for a row of its own, as shares of the span."""
_LEADS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.8, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)),
    (2.5, (1.0, 2.0, 5.0)),
)
"""Up to so many decades, these ticks of each."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high` in the axis's own coordinates: the decimal logarithm, or the value."""

    is_log: bool
    low: float
    high: float
    has_zero: bool = False
    has_nonfinite: bool = False

    @property
    def _span(self) -> float:
        return self.high - self.low

    @property
    def type(self) -> str:
        """What Plotly calls it."""
        return "log" if self.is_log else "linear"

    @property
    def range(self) -> tuple[float, float]:
        """The visible range, in coordinates."""
        below = _ROW if self.has_zero else 0.0
        above = _ROW if self.has_nonfinite else 0.0
        return (
            self.low - self._span * (_SPARE + below),
            self.high + self._span * (_SPARE + above),
        )

    def place(self, value: Value) -> float | None:
        """Return what Plotly is told for a value; None leaves a gap."""
        if value is None:
            return None
        if not math.isfinite(value):
            return self._told(self.high + self._span * _ROW)
        if self.is_log and value <= 0:
            return self._told(self.low - self._span * _ROW)
        return value

    def coordinate(self, height: float) -> float | None:
        """Return where Plotly puts an annotation: by its logarithm, unlike shapes and points.

        None where that is nowhere.
        """
        if not math.isfinite(height) or (self.is_log and height <= 0):
            return None
        return math.log10(height) if self.is_log else height

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return tick heights and labels, with the rows of what has no height."""
        heights = list(_log_ticks(self.low, self.high) if self.is_log else self._linear_ticks())
        labels = [tick_label(height) for height in heights]
        if self.is_log and self.has_zero:
            heights.insert(0, self._told(self.low - self._span * _ROW))
            labels.insert(0, "0 (exact)")
        if self.has_nonfinite:
            heights.append(self._told(self.high + self._span * _ROW))
            labels.append("NaN, ∞")
        return heights, labels

    def _told(self, coordinate: float) -> float:
        if not self.is_log:
            return coordinate
        return float(10.0 ** min(max(coordinate, _LOWEST), _HIGHEST))

    def _linear_ticks(self) -> Iterable[float]:
        rough = self._span / 5
        decade = 10.0 ** math.floor(math.log10(rough))
        step = next(decade * each for each in (1, 2, 2.5, 5, 10) if decade * each >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return (round(i * step, 12) for i in range(first, last + 1))


def by_decades(values: Sequence[Value], threshold: float | None = None) -> Axis:
    """Return a log axis of whole decades, at most 12, around positive values and a threshold."""
    close = close_to(values, is_log=True)
    places = _decades((*values, threshold))
    low, high = math.floor(min(places, default=-6.0)), math.ceil(max(places, default=0.0))
    high = min(high, int(_HIGHEST))
    low = min(max(low, high - int(_MOST_DECADES)), int(_HIGHEST) - 1)
    return Axis(True, low, max(high, low + 1), close.has_zero, close.has_nonfinite)


def by_units(values: Sequence[Value]) -> Axis:
    """Return a linear axis between whole numbers."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    within = [max(-_FARTHEST, min(v, _FARTHEST)) for v in known]
    low = math.floor(min(within, default=0.0))
    high = max(math.ceil(max(within, default=1.0)), low + 1)
    bad = any(v is not None and not math.isfinite(v) for v in values)
    return Axis(False, low, high, has_nonfinite=bad)


def close_to(values: Sequence[Value], *, is_log: bool, also: Iterable[float] = ()) -> Axis:
    """Return the axis on which these values, and finite ones that must be visible, are seen."""
    known = [v for v in values if v is not None]
    bad = any(not math.isfinite(v) for v in known)
    if not is_log:
        return Axis(
            False, *_ends([v for v in (*known, *also) if math.isfinite(v)]), has_nonfinite=bad
        )
    places = _decades((*known, *also))
    low, high = min(places, default=-6.0), max(places, default=0.0)
    low = max(low, high - _MOST_DECADES)
    spare = max(0.0, _LEAST_DECADES - (high - low)) / 2
    zero = any(v <= 0 for v in known if math.isfinite(v))
    return Axis(True, low - spare, high + spare, zero, bad)


def _decades(values: Iterable[Value]) -> list[float]:
    return [math.log10(v) for v in values if v is not None and math.isfinite(v) and v > 0]


def _ends(shown: Sequence[float]) -> tuple[float, float]:
    within = [max(-_FARTHEST, min(value, _FARTHEST)) for value in shown]
    low, high = min(within, default=0.0), max(within, default=1.0)
    least = _LEAST_SPAN * max(abs(low), abs(high)) or 1.0
    spare = max(0.0, least - (high - low)) / 2
    return low - spare, high + spare


def _log_ticks(low: float, high: float) -> Iterable[float]:
    """Yield 1, 2 and 5 of each decade, more within one; over many only the powers of ten."""
    decades = range(max(math.floor(low), _LOWEST), min(math.ceil(high), int(_HIGHEST)) + 1)
    step = max(1, math.ceil(len(decades) / 8))
    leads = next((found for most, found in _LEADS if high - low <= most), (1.0,))
    for decade in decades[::step]:
        for each in leads:
            height = each * 10.0**decade
            if low - 0.05 <= math.log10(height) <= high + 0.05:
                yield height


def tick_label(height: float) -> str:
    """Return a tick's label: round numbers need no zeros at their end."""
    shown = f"{height:g}" if height == 0 or 1e-3 <= abs(height) < 1e4 else f"{height:.2e}"
    mantissa, _, exponent = shown.partition("e")
    if exponent:
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        shown = f"{mantissa}e{int(exponent)}"
    return shown.replace("-", "−")
