"""B ÷ A over the layers with intervals: where two runs differ, and where that is clear."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.frame import frame, named

_LEAST = 1 / 64
"""Of the smallest ratio: where an interval ends that reaches 0, which has no place by log."""
_AROUND = 0.1
"""Decades that are shown around 1 at least."""
_TICKS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.5, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 2.5, 3)),
    (2.4, (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)),
)
"""Up to so many decades, these ticks; beyond them, every decade."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One place: B ÷ A, its interval, and whether it is clear: +1 more, −1 less, 0 neither."""

    place: str
    value: float
    low: float | None = None
    high: float | None = None
    clear: int = 0


def change_chart(ratios: Sequence[Ratio], *, unit: str) -> go.Figure:
    """Draw the ratios by log around 1. Raises ValueError without any."""
    if not ratios:
        raise ValueError("there is no ratio to draw")
    least = min(ratio.value for ratio in ratios) * _LEAST
    figure = go.Figure(_trace(ratios, least))
    figure.add_hline(y=1, line={"color": palette.MUTED, "width": 1})
    bounds = [_ends(ratio, least) for ratio in ratios]
    # A long interval must not squeeze the points.
    low = max(min(a for a, _ in bounds), min(ratio.value for ratio in ratios) / 4)
    high = min(max(b for _, b in bounds), 4 * max(ratio.value for ratio in ratios))
    ends = min(math.log10(low), -_AROUND), max(math.log10(high), _AROUND)
    margin = 0.06 * (ends[1] - ends[0])
    figure.update_layout(frame(300, legend=0))
    figure.update_yaxes(
        type="log", range=[ends[0] - margin, ends[1] + margin], zeroline=False,
        title=named(unit), tickvals=_ticks(*ends),
        ticktext=[f"× {tick:g}" for tick in _ticks(*ends)],
    )  # fmt: skip
    figure.update_xaxes(
        type="category", tickangle=0, nticks=16, title=named("layer"),
        showgrid=False,
    )  # fmt: skip
    return figure


def _ticks(low: float, high: float) -> list[float]:
    """Return ticks between two powers of ten."""
    fine = next((ticks for decades, ticks in _TICKS if high - low <= decades), None)
    if fine is None:
        step = max(1, math.ceil((high - low) / 8))
        first = -step * math.ceil(-low / step)
        fine = tuple(10.0**i for i in range(first, math.floor(high) + 1, step))
    return [tick for tick in fine if low <= math.log10(tick) <= high]


def _trace(ratios: Sequence[Ratio], least: float) -> go.Scatter:
    ends = [_ends(ratio, least) for ratio in ratios]
    colors = [
        (palette.WORSE if r.clear > 0 else palette.BETTER) if r.clear else palette.MUTED
        for r in ratios
    ]
    return go.Scatter(
        x=[text.label(text.scope(r.place)) for r in ratios],
        y=[r.value for r in ratios],
        error_y={
            "type": "data", "symmetric": False, "thickness": 1.2, "width": 0,
            "color": palette.MUTED,
            "array": [high - r.value for r, (_, high) in zip(ratios, ends, strict=True)],
            "arrayminus": [r.value - low for r, (low, _) in zip(ratios, ends, strict=True)],
        },
        mode="markers",
        marker={
            "color": colors, "size": [10 if r.clear else 7 for r in ratios],
            "symbol": [_symbol(r.clear) for r in ratios],
        },
        customdata=[[text.label(r.place), _words(r), r.place] for r in ratios],
        hovertemplate="%{customdata[0]}: <b>%{customdata[1]}</b><extra></extra>",
    )  # fmt: skip


def _symbol(clear: int) -> str:
    """Color is never alone: what is clear points the way it goes."""
    return {1: "triangle-up", -1: "triangle-down"}.get(clear, "circle-open")


def _ends(ratio: Ratio, least: float) -> tuple[float, float]:
    low = ratio.value if ratio.low is None else max(ratio.low, least)
    high = ratio.value if ratio.high is None else ratio.high
    return min(low, ratio.value), max(high, ratio.value)


def _words(ratio: Ratio) -> str:
    said = "equal" if ratio.value == 1 else text.factor(math.log2(ratio.value))
    if ratio.low is None or ratio.high is None:
        return said
    clear = {1: ", clearly more", -1: ", clearly less"}.get(ratio.clear, ", within chance")
    return f"{said} (95 %: {text.number(max(0.0, ratio.low))} … {text.number(ratio.high)}){clear}"
