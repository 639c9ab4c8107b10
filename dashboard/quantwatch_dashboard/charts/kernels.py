"""Pictures of the kernels: how much of its tolerance an operator uses over time, and its speed."""

from collections.abc import Sequence
from datetime import datetime

import plotly.graph_objects as go

from quantwatch.store.kernels import KernelSpeed
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, by_decades
from quantwatch_dashboard.charts.frame import frame, named, scaled

Line = tuple[str, Sequence[float | None]]
"""A back end, and its value per batch."""


def share_trend(times: Sequence[datetime], lines: Sequence[Line]) -> go.Figure:
    """Draw the largest error ÷ tolerance of each batch on a log axis; 1 is what is allowed.

    Times are in the reader's zone, oldest first. Raises ValueError without a line.
    """
    if not lines:
        raise ValueError("a trend needs at least one back end")
    axis = by_decades([value for _, values in lines for value in values], threshold=1.0)
    figure = go.Figure([_line(at, times, line, axis) for at, line in enumerate(lines)])
    figure.add_hline(y=1.0, line={"color": palette.CULPRIT, "width": 1.5, "dash": "dot"})
    figure.add_annotation(
        x=1, xref="paper", y=axis.coordinate(1.0), showarrow=False,
        text=palette.ink("tolerance", palette.CULPRIT),
        xanchor="right", yanchor="bottom", font={"size": 11},
    )  # fmt: skip
    figure.update_layout(
        frame(330),
        xaxis={"title": named("batch"), "type": "date"},
        yaxis=scaled(axis, "largest error ÷ tolerance"),
    )
    return figure


def speed_by_shape(speeds: Sequence[KernelSpeed]) -> go.Figure:
    """Draw the speed of each shape with its 95 % interval, one series per back end and variant.

    Raises ValueError without a speed.
    """
    if not speeds:
        raise ValueError("a picture of speeds needs at least one")
    shapes = list(dict.fromkeys(speed.shape for speed in speeds))
    places = {shape: len(shapes) - 1 - at for at, shape in enumerate(shapes)}
    series = list(dict.fromkeys((speed.backend, speed.variant) for speed in speeds))
    figure = go.Figure()
    for at, (backend, variant) in enumerate(series):
        own = [s for s in speeds if (s.backend, s.variant) == (backend, variant)]
        # Side by side, so that no interval hides another one.
        offset = (at - (len(series) - 1) / 2) * 0.6 / max(1, len(series))
        heights = [places[speed.shape] - offset for speed in own]
        figure.add_trace(_intervals(at, f"{backend} · {variant}", own, heights))
    figure.add_vline(x=1.0, line={"color": palette.MUTED, "width": 1.5, "dash": "dot"})
    figure.update_yaxes(
        tickvals=list(places.values()), ticktext=[text.shape(shape) for shape in shapes],
        range=[-0.7, len(shapes) - 0.3], zeroline=False, automargin=True,
        title=named("rows × outputs × inputs"),
    )  # fmt: skip
    marks = (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)
    figure.update_xaxes(
        type="log", zeroline=False, tickvals=marks, ticktext=[f"{mark:g} ×" for mark in marks],
        title=named("speed as a multiple of bfloat16 F.linear"),
    )  # fmt: skip
    height = 200 + min(26 * len(shapes) * max(1, len(series) // 2), 900)
    return figure.update_layout(frame(height))


def _line(at: int, times: Sequence[datetime], line: Line, axis: Axis) -> go.Scatter:
    backend, values = line
    color, dash, marker = palette.series_style(at)
    return go.Scatter(
        x=list(times),
        y=[axis.place(value) for value in values],
        text=[text.number(value) for value in values],
        name=text.label(backend),
        mode="lines+markers",
        connectgaps=True,
        line={"color": color, "dash": dash, "width": 2},
        marker={"symbol": marker, "size": 7},
        hovertemplate="%{text} of the tolerance<br>%{x|%Y-%m-%d %H:%M}",
    )


def _intervals(
    at: int, name: str, own: Sequence[KernelSpeed], heights: Sequence[float]
) -> go.Scatter:
    color, _, marker = palette.series_style(at)
    return go.Scatter(
        x=[speed.ratio for speed in own],
        y=list(heights),
        name=text.label(name),
        mode="markers",
        marker={"color": color, "symbol": marker, "size": 9},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [speed.ratio_high - speed.ratio for speed in own],
            "arrayminus": [speed.ratio - speed.ratio_low for speed in own],
            "color": color,
            "thickness": 1.5,
        },
        text=[_speed_words(speed) for speed in own],
        hovertemplate="%{text}",
    )


def _speed_words(speed: KernelSpeed) -> str:
    bounds = f"{text.number(speed.ratio_low)} … {text.number(speed.ratio_high)}"
    taken = f"{speed.seconds * 1e6:,.0f} µs, F.linear {speed.baseline_seconds * 1e6:,.0f} µs"
    return text.label(
        f"{text.number(speed.ratio)} × (95 %: {bounds}); {taken}; {speed.rounds} rounds, "
        f"{text.plural(speed.threads, 'thread')}"
    )
