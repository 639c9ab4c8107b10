"""One line per candidate over the layers, on a log axis that says the truth about 0, NaN and ∞."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from quantwatch.domain import Json, layer_index
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, by_decades, by_units
from quantwatch_dashboard.charts.frame import frame, named, scaled
from quantwatch_dashboard.logic.lines import NO_GUIDES, Guides, LayerLine, Value


def layer_chart(
    lines: Sequence[LayerLine],
    places: Sequence[str],
    *,
    unit: str,
    is_log: bool = True,
    threshold: float | None = None,
    guides: Guides = NO_GUIDES,
) -> go.Figure:
    """Draw candidates over places on an axis that is named `unit`.

    `threshold` is a dashed line; `guides` are places with a line from top to bottom.
    """
    values = [v for line in lines for v in line.values]
    drawn = threshold if threshold is not None and threshold > 0 else None
    axis = by_decades(values, drawn) if is_log else by_units(values)
    traces = []
    for line in lines:
        traces.append(_trace(line, axis, places))
        if line.marked:
            traces.append(_rings(line, axis))
    figure = go.Figure(traces)
    for line in lines:
        if line.culprit is not None:
            _annotate(figure, line, axis, len(places))
    if threshold is not None:
        _threshold(figure, threshold, axis)
    _guide(figure, guides.culprit, places, {"color": palette.CULPRIT, "width": 1, "dash": "dot"})
    _guide(figure, guides.chosen, places, {"color": palette.CHOSEN, "width": 1.5})
    _layout(figure, axis, places, unit)
    return figure


def _guide(figure: go.Figure, place: str | None, places: Sequence[str], line: Json) -> None:
    if place is not None and place in places:
        figure.add_vline(x=list(places).index(place), line=line, opacity=0.7)


def _trace(line: LayerLine, axis: Axis, places: Sequence[str]) -> go.Scatter:
    color, dash, marker = palette.series_style(line.index)
    points = _points(line, places)
    return go.Scatter(
        x=[at for at, _, _ in points],
        y=[axis.place(value) for _, value, _ in points],
        customdata=[[text.label(place), text.number(value), place] for _, value, place in points],
        name=text.label(line.name),
        mode="lines+markers",
        line={
            "color": color,
            "dash": "solid" if line.strong else dash,
            "width": 3.2 if line.strong else 1.6,
        },
        marker={
            "symbol": [_symbol(value, marker) for _, value, _ in points],
            "size": 7 if line.strong else 5,
            "color": color,
        },
        opacity=1 if line.strong else 0.85,
        zorder=0 if line.strong else 1,
        hovertemplate="%{customdata[0]}: <b>%{customdata[1]}</b><extra>%{fullData.name}</extra>",
    )


def _points(line: LayerLine, places: Sequence[str]) -> list[tuple[int | None, Value, str]]:
    """Return place, value and name, with a gap between layers and what is no layer."""
    points: list[tuple[int | None, Value, str]] = []
    for at, (place, value) in enumerate(zip(places, line.values, strict=True)):
        if at and (layer_index(place) is None) != (layer_index(places[at - 1]) is None):
            points.append((None, None, ""))
        points.append((at, value, place))
    return points


def _symbol(value: Value, marker: str) -> str:
    if value is not None and not math.isfinite(value):
        return "x"
    return f"{marker}-open" if value == 0 else marker


def _rings(line: LayerLine, axis: Axis) -> go.Scatter:
    at = sorted(line.marked)
    return go.Scatter(
        x=at,
        y=[axis.place(line.values[i]) for i in at],
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": 15,
            "color": palette.CULPRIT,
            "line": {"width": 2.5},
        },
        showlegend=False,
        hoverinfo="skip",
        zorder=2,
    )


def _annotate(figure: go.Figure, line: LayerLine, axis: Axis, num_places: int) -> None:
    assert line.culprit is not None
    height = axis.place(line.values[line.culprit])
    if height is None:
        return
    label = text.label(text.scope(line.label))
    # Above the place where there is room on both sides: on a phone a label beside it is cut off.
    share = line.culprit / max(1, num_places - 1)
    anchor = "left" if share < 0.3 else "right" if share > 0.7 else "center"
    figure.add_annotation(
        x=line.culprit, y=axis.coordinate(height),
        text=palette.ink(f"<b>{label}</b>", palette.CULPRIT),
        ax={"left": 40, "right": -40, "center": 0}[anchor], ay=-26, xanchor=anchor,
        showarrow=True, arrowhead=0, arrowcolor=palette.CULPRIT, arrowwidth=1.5, standoff=8,
        font={"size": 13},
    )  # fmt: skip


def _threshold(figure: go.Figure, threshold: float, axis: Axis) -> None:
    if threshold <= 0:
        # "Must be equal": it has no place on a log axis, so it is told.
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=0, yref="paper", yanchor="bottom",
            text=palette.ink(f"threshold {threshold:g}, below this axis", palette.CULPRIT),
            showarrow=False, font={"size": 11},
        )  # fmt: skip
        return
    figure.add_hline(y=threshold, line={"color": palette.CULPRIT, "width": 1.2, "dash": "dash"})
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=axis.coordinate(threshold), yanchor="bottom",
        text=palette.ink(f"threshold {threshold:g}", palette.CULPRIT), showarrow=False,
        font={"size": 11},
    )  # fmt: skip


def _layout(figure: go.Figure, axis: Axis, places: Sequence[str], unit: str) -> None:
    ticks = _place_ticks(places)
    figure.update_layout(frame(360), yaxis=scaled(axis, unit))
    figure.update_xaxes(
        tickvals=list(ticks), ticktext=list(ticks.values()), tickangle=0,
        range=[-0.6, len(places) - 0.4], showgrid=False, zeroline=False,
        title=named("layer"),
    )  # fmt: skip


_ENDS = {"embedding": "emb", "head": "head"}
"""The ends that have a label; the final norm lies between the last layer and the head."""


def _place_ticks(places: Sequence[str]) -> dict[int, str]:
    """Return a label per place, at round layer numbers and at most 16 or so."""
    step = max(1, math.ceil(len(places) / 16))
    indices = [layer_index(place) for place in places]
    ends = {at: _ENDS[place] for at, place in enumerate(places) if place in _ENDS}
    beside = {at + side for at in ends for side in (-1, 1)}
    layers = {at: str(n) for at, n in enumerate(indices) if n is not None and n % step == 0}
    return ends | {at: label for at, label in layers.items() if at not in beside}
