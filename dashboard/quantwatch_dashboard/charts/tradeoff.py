"""Quality against bits per weight: which candidate is worth its size. The front is a line."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from quantwatch.domain import Json
from quantwatch.store.kinds import from_kind
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, close_to
from quantwatch_dashboard.charts.frame import frame, named, scaled
from quantwatch_dashboard.charts.verdict_marks import shape
from quantwatch_dashboard.logic.history import Tradeoff


def tradeoff_chart(found: Sequence[Tradeoff], *, unit: str, is_log: bool) -> go.Figure:
    """Draw one point per candidate, smaller to the left; better is down for errors."""
    values = [from_kind(each.value, each.kind) for each in found]
    axis = close_to(values, is_log=is_log)
    placed = [(each, axis.place(v)) for each, v in zip(found, values, strict=True)]
    drawn = [(each, height) for each, height in placed if height is not None]
    traces = [_front(drawn), *(_point(each, height) for each, height in drawn)]
    notes = [_name(each, height, axis) for each, height in drawn]
    layout = _layout(axis, unit, [each.bits_per_weight for each in found])
    return go.Figure({"data": traces, "layout": layout | {"annotations": notes}})


def _front(drawn: Sequence[tuple[Tradeoff, float]]) -> Json:
    best = sorted((each.bits_per_weight, height) for each, height in drawn if each.is_best)
    return {
        "type": "scatter", "x": [bits for bits, _ in best], "y": [height for _, height in best],
        "mode": "lines", "name": "Pareto front: nothing is both smaller and better",
        "hoverinfo": "skip",
        "line": {"color": palette.MUTED, "width": 1.6, "dash": "dot", "shape": "hv"},
    }  # fmt: skip


def _point(each: Tradeoff, height: float) -> Json:
    color, _, _ = palette.series_style(each.index)
    drawn = shape(each.verdict)
    value = text.number(from_kind(each.value, each.kind))
    best = "on the Pareto front" if each.is_best else "another one is smaller and better"
    outline = {"width": 2.2, "color": drawn.color or color}
    symbol = "circle" if each.is_best else "circle-open"
    return {
        "type": "scatter", "x": [each.bits_per_weight], "y": [height], "mode": "markers",
        "showlegend": False, "name": text.label(each.candidate),
        "marker": {"symbol": symbol, "size": 13, "color": color, "line": outline},
        "customdata": [[value, text.size(each.size_bytes), drawn.word, best]],
        "hovertemplate": "<b>%{fullData.name}</b><br>%{customdata[0]} at %{x:.2f} bits per weight, "
        "%{customdata[1]}<br>%{customdata[2]}, %{customdata[3]}<extra></extra>",
    }  # fmt: skip


def _name(each: Tradeoff, height: float, axis: Axis) -> Json:
    return {
        "x": each.bits_per_weight, "y": axis.coordinate(height),
        "text": text.label(text.clip(each.candidate, 22)), "showarrow": False,
        "font": {"size": 12},
        # Nothing lies further down and to the left of the front, not even the line itself.
        "xanchor": "right", "xshift": -6, "yshift": -14,
    }  # fmt: skip


def _layout(axis: Axis, unit: str, bits: Sequence[float]) -> dict[str, Any]:
    low, high = min(bits, default=0.0), max(bits, default=16.0)
    spare = max(0.6, 0.14 * (high - low))
    return {
        **frame(340),
        "yaxis": scaled(axis, unit),
        "xaxis": {
            "range": [low - 2 * spare, high + spare], "zeroline": False,
            "title": named("bits per weight: smaller ←"),
        },
    }  # fmt: skip
