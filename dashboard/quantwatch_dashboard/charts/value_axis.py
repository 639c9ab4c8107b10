"""An axis for one statistic over time: as close as its values allow, and honest about the rest.

Layers are compared over decades (`axis`); a trend shows whether *one* value moved, so this axis
follows the values. Zeros of a log axis, NaN and infinities have a row of their own.
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


@dataclass(frozen=True, slots=True)
class ValueAxis:
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

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return tick heights and labels, with the rows of what has no height."""
        heights = list(_log_ticks(self.low, self.high) if self.is_log else self._linear_ticks())
        labels = [_label(height) for height in heights]
        if self.is_log and self.has_zero:
            heights.insert(0, self._told(self.low - self._span * _ROW))
            labels.insert(0, "0 (exact)")
        if self.has_nonfinite:
            heights.append(self._told(self.high + self._span * _ROW))
            labels.append("NaN, ∞")
        return heights, labels

    def _told(self, coordinate: float) -> float:
        return float(10.0 ** min(coordinate, _HIGHEST)) if self.is_log else coordinate

    def _linear_ticks(self) -> Iterable[float]:
        rough = self._span / 5
        decade = 10.0 ** math.floor(math.log10(rough))
        step = next(decade * each for each in (1, 2, 2.5, 5, 10) if decade * each >= rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return (round(i * step, 12) for i in range(first, last + 1))


def axis_of(values: Sequence[Value], *, is_log: bool, also: Iterable[float] = ()) -> ValueAxis:
    """Return the axis on which these values, and finite ones that must be visible, are seen."""
    known = [v for v in values if v is not None]
    shown = [v for v in (*known, *also) if math.isfinite(v)]
    bad = any(not math.isfinite(v) for v in known)
    if not is_log:
        return ValueAxis(False, *_ends(shown), has_nonfinite=bad)
    places = [math.log10(v) for v in shown if v > 0]
    low, high = min(places, default=-6.0), max(places, default=0.0)
    low = max(low, high - _MOST_DECADES)
    spare = max(0.0, _LEAST_DECADES - (high - low)) / 2
    zero = any(v <= 0 for v in known if math.isfinite(v))
    return ValueAxis(True, low - spare, high + spare, zero, bad)


def _ends(shown: Sequence[float]) -> tuple[float, float]:
    within = [max(-_FARTHEST, min(value, _FARTHEST)) for value in shown]
    low, high = min(within, default=0.0), max(within, default=1.0)
    least = _LEAST_SPAN * max(abs(low), abs(high)) or 1.0
    spare = max(0.0, least - (high - low)) / 2
    return low - spare, high + spare


def _log_ticks(low: float, high: float) -> Iterable[float]:
    """Yield 1, 2 and 5 of each decade; over many decades only the powers of ten."""
    decades = range(max(math.floor(low), _LOWEST), min(math.ceil(high), int(_HIGHEST)) + 1)
    step = max(1, math.ceil(len(decades) / 8))
    leads = (1.0, 2.0, 5.0) if high - low <= 2.5 else (1.0,)
    for decade in decades[::step]:
        for each in leads:
            height = each * 10.0**decade
            if low - 0.05 <= math.log10(height) <= high + 0.05:
                yield height


def _label(height: float) -> str:
    """Return a tick's label: round numbers need no zeros at their end."""
    shown = f"{height:g}" if height == 0 or 1e-3 <= abs(height) < 1e5 else f"{height:.0e}"
    return shown.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
