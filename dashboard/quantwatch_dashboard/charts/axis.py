"""Axes that say the truth about exact zeros, NaN and infinities: each has a row of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantwatch_dashboard.logic.lines import Value

_HIGHEST = 308.2
"""In decades: a float holds no higher place."""
_FARTHEST = 8e307
"""On a linear axis: its length must be a float, too."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, in decades when it is logarithmic.

    A log axis has a row for exact zeros below; both have one for non-finite values above.
    """

    low: int
    high: int
    has_zero: bool
    has_nonfinite: bool
    type: Literal["log", "linear"] = "log"

    @property
    def zero(self) -> float:
        """Where an exact 0 is drawn."""
        return float(10.0 ** (self.low - 0.7)) if self.type == "log" else 0.0

    @property
    def nonfinite(self) -> float:
        """Where NaN and infinities are drawn."""
        if self.type == "log":
            return float(10.0 ** min(self.high + 0.7, _HIGHEST))
        return self.high + 0.1 * (self.high - self.low)

    def place(self, value: Value) -> float | None:
        """Return the height at which a value is drawn; None leaves a gap."""
        if value is None:
            return None
        if not math.isfinite(value):
            return self.nonfinite
        return value if value > 0 or self.type == "linear" else self.zero

    def coordinate(self, height: float) -> float:
        """Return where Plotly puts an annotation: by its logarithm, unlike shapes and points."""
        return math.log10(height) if self.type == "log" else height

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return tick heights and labels."""
        step = max(1, math.ceil((self.high - self.low) / 7))
        marks = list(range(self.low, self.high + 1, step))
        if self.type == "log":
            heights = [10.0**d for d in marks]
            labels = [f"{10.0**d:g}" if -4 < d < 4 else f"1e{d}".replace("-", "−") for d in marks]
        else:
            heights, labels = [float(m) for m in marks], [str(m) for m in marks]
        if self.has_zero and self.type == "log":
            heights, labels = [self.zero, *heights], ["0 (exact)", *labels]
        if self.has_nonfinite:
            heights, labels = [*heights, self.nonfinite], [*labels, "NaN, ∞"]
        return heights, labels

    def range(self) -> tuple[float, float]:
        """Return the visible range, in decades when it is logarithmic."""
        if self.type == "linear":
            spare = 0.06 * (self.high - self.low)
            return self.low - spare, self.high + spare * (3 if self.has_nonfinite else 1)
        return self.low - (1.1 if self.has_zero else 0.15), self.high + (
            1.1 if self.has_nonfinite else 0.25
        )


def log_axis(values: Sequence[Value], threshold: float | None = None) -> Axis:
    """Return an axis of whole decades, at most 12, around the positive values and a threshold."""
    known = [v for v in values if v is not None]
    positive = [v for v in known if math.isfinite(v) and v > 0]
    within = positive + ([threshold] if threshold else [])
    low = math.floor(math.log10(min(within))) if within else -6
    high = min(math.ceil(math.log10(max(within))), int(_HIGHEST)) if within else 0
    low = min(max(low, high - 12), int(_HIGHEST) - 1)
    return Axis(
        low,
        max(high, low + 1),
        has_zero=any(v == 0 for v in known),
        has_nonfinite=any(not math.isfinite(v) for v in known),
    )


def linear_axis(values: Sequence[Value]) -> Axis:
    """Return an axis around the finite values."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    finite = [max(-_FARTHEST, min(v, _FARTHEST)) for v in known]
    low = math.floor(min(finite, default=0.0))
    high = max(math.ceil(max(finite, default=1.0)), low + 1)
    bad = any(v is not None and not math.isfinite(v) for v in values)
    return Axis(low, high, has_zero=False, has_nonfinite=bad, type="linear")
