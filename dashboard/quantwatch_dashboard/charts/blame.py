"""Propagated error against isolated error: who inherits an error, and who makes it."""

from collections.abc import Sequence

import plotly.graph_objects as go

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, by_decades
from quantwatch_dashboard.charts.frame import frame, scaled
from quantwatch_dashboard.logic.lines import Blamed


def blame_chart(found: Sequence[Blamed], chosen: str | None = None) -> go.Figure:
    """Draw each place as a point: right is its own fault, up is what arrives there, both log."""
    across = by_decades([v for one in found for v in one.isolated])
    up = by_decades([v for one in found for v in one.propagated])
    in_order = sorted(found, key=lambda one: one.strong)
    figure = go.Figure([_points(one, across, up) for one in in_order])
    for one in found:
        if one.culprit is not None:
            _name(figure, one, across, up)
    for one in found:
        if one.strong and chosen is not None and chosen in one.places:
            _ring(figure, one, list(one.places).index(chosen), (across, up))
    figure.update_layout(
        frame(360),
        xaxis=scaled(across, "isolated error, mean: its own fault →"),
        yaxis=scaled(up, "relative error, mean: what arrives here ↑"),
    )
    return figure


def _points(one: Blamed, across: Axis, up: Axis) -> go.Scatter:
    color, _, marker = palette.series_style(one.index)
    both = [
        (place, x, y)
        for place, x, y in zip(one.places, one.isolated, one.propagated, strict=True)
        if x is not None and y is not None
    ]
    return go.Scatter(
        x=[across.place(x) for _, x, _ in both],
        y=[up.place(y) for _, _, y in both],
        customdata=[[text.label(p), text.number(x), text.number(y)] for p, x, y in both],
        name=text.label(one.name),
        mode="markers",
        marker={
            "color": color, "symbol": marker, "size": 9 if one.strong else 6,
            "line": {"width": 0.6, "color": palette.OUTLINE},
        },
        opacity=1 if one.strong else 0.6,
        hovertemplate=(
            "<b>%{customdata[0]}</b><br>isolated %{customdata[1]}<br>relative %{customdata[2]}"
            "<extra>%{fullData.name}</extra>"
        ),
    )  # fmt: skip


def _name(figure: go.Figure, one: Blamed, across: Axis, up: Axis) -> None:
    assert one.culprit is not None
    x = across.place(one.isolated[one.culprit])
    y = up.place(one.propagated[one.culprit])
    if x is None or y is None:
        return
    label = palette.ink(
        f"<b>{text.label(text.scope(one.places[one.culprit]))}</b>", palette.CULPRIT
    )
    figure.add_annotation(
        x=across.coordinate(x), y=up.coordinate(y), text=label,
        ax=0, ay=-30, showarrow=True, arrowhead=0, standoff=6,
        arrowcolor=palette.CULPRIT, arrowwidth=1.5, font={"size": 13},
    )  # fmt: skip


def _ring(figure: go.Figure, one: Blamed, at: int, axes: tuple[Axis, Axis]) -> None:
    x, y = axes[0].place(one.isolated[at]), axes[1].place(one.propagated[at])
    figure.add_scatter(
        x=[x], y=[y], mode="markers", hoverinfo="skip", showlegend=False,
        marker={"symbol": "circle-open", "size": 17, "color": palette.CHOSEN,
                "line": {"width": 2.5}},
    )  # fmt: skip
