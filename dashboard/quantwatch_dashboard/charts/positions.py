"""Output KL by position in a prompt: does a candidate fall behind the further a text goes?"""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from quantwatch.domain import Json, PositionRange
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, by_decades
from quantwatch_dashboard.charts.frame import frame, named, scaled


def position_chart(
    found: Mapping[str, Sequence[PositionRange]], places: Sequence[str], *, unit: str
) -> go.Figure:
    """Draw a line per candidate over ranges of positions, with standard errors where known.

    `found` holds every candidate of the run in order, one metric of each; `places` are the names of
    all ranges from left to right. A mean of nothing finite lies on a row of its own.
    """
    axis = by_decades([_value(each) for ranges in found.values() for each in ranges])
    lines = [_line(index, name, ranges, axis) for index, (name, ranges) in enumerate(found.items())]
    layout: dict[str, Any] = {
        **frame(300),
        "yaxis": scaled(axis, unit),
        "xaxis": {
            "type": "category", "categoryorder": "array", "categoryarray": list(places),
            "range": [-0.5, len(places) - 0.5], "title": named("position in the prompt"),
        },
    }  # fmt: skip
    return go.Figure({"data": lines, "layout": layout})


def _value(each: PositionRange) -> float:
    return float("nan") if each.mean is None else each.mean


def _line(index: int, name: str, ranges: Sequence[PositionRange], axis: Axis) -> Json:
    color, dash, marker = palette.series_style(index)
    errors = [0.0 if each.se is None or each.mean is None else each.se for each in ranges]
    said = [[text.number(_value(r)), _error(r), f"{r.n:,}"] for r in ranges]
    return {
        "type": "scatter", "mode": "lines+markers", "name": text.label(name),
        "x": [each.name for each in ranges], "y": [axis.place(_value(each)) for each in ranges],
        "error_y": {"type": "data", "array": errors, "visible": any(errors), "thickness": 1.2},
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"color": color, "symbol": marker, "size": 8},
        "customdata": said,
        "hovertemplate": "<b>%{fullData.name}</b><br>positions %{x}: %{customdata[0]}"
        "%{customdata[1]}, %{customdata[2]} tokens<extra></extra>",
    }  # fmt: skip


def _error(each: PositionRange) -> str:
    return " (no error: fewer than two prompts)" if each.se is None else f" ± {each.se:.2g}"
