"""One statistic of all candidates over the runs, with verdicts, limits and what changed.

Points, failed runs and changes carry their run's id as the last of their `customdata`.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta, tzinfo

import plotly.graph_objects as go

from quantwatch.domain import Json, Severity, Verdict
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette, trend_marks
from quantwatch_dashboard.charts.axis import Axis, close_to
from quantwatch_dashboard.charts.frame import frame, scaled
from quantwatch_dashboard.charts.verdict_marks import VERDICT_SHAPES, shape
from quantwatch_dashboard.logic.trends import Compared, Line, Point, Trend

_FAR = 1.5
"""A limit so many spans beyond the values is named at the edge: it would flatten the lines."""

_SHORTEST = timedelta(hours=1)
"""An axis of less than this counts milliseconds."""


def trend_chart(trend: Trend, *, unit: str, is_log: bool, zone: tzinfo) -> go.Figure:
    """Draw the lines over time; the chosen candidate's baseline, noise and limits behind them."""
    axis = _axis(trend, is_log)
    in_order = sorted(trend.lines, key=lambda line: line.name == trend.strong)
    traces = [
        *(_line(line, axis, zone, strong=line.name == trend.strong) for line in in_order),
        *_pinned(trend, axis, zone),
        *trend_marks.traces(trend, zone),
        *_verdict_legend(trend),
    ]
    # Built as a whole: Plotly checks and copies everything anew with each thing that is added.
    return go.Figure({"data": traces, "layout": _layout(trend, axis, unit, zone)})


def _axis(trend: Trend, is_log: bool) -> Axis:
    plain = close_to(trend.values, is_log=is_log)
    return close_to(trend.values, is_log=is_log, also=_near(trend.compared, plain))


def _near(compared: Compared, axis: Axis) -> list[float]:
    """Return what else must be visible: not a limit that is very far away."""
    reach = _FAR * (axis.high - axis.low)
    wanted = [limit.value for limit in compared.limits]
    wanted += [compared.baseline] if compared.baseline is not None else []
    wanted += [compared.band[1]] if compared.band is not None else []
    return [v for v in wanted if _is_within(v, axis, reach)]


def _is_within(value: float, axis: Axis, spare: float = 0.0) -> bool:
    height = axis.coordinate(value)
    return height is not None and axis.low - spare <= height <= axis.high + spare


def _line(line: Line, axis: Axis, zone: tzinfo, *, strong: bool) -> Json:
    color, dash, _ = palette.series_style(line.index)
    shapes = [shape(point.verdict) for point in line.points]
    many = len(line.points) > 150
    return {
        "type": "scatter",
        "x": [trend_marks.clock_text(point.at, zone) for point in line.points],
        "y": [axis.place(point.value) for point in line.points],
        "customdata": [_said(point) for point in line.points],
        "name": text.label(text.clip(line.name, 40)),
        "mode": "lines+markers",
        "connectgaps": False,
        "line": {
            "color": color,
            "dash": "solid" if strong else dash,
            "width": 2.4 if strong else 1.4,
        },
        "marker": {
            "symbol": [each.symbol for each in shapes],
            "color": [each.color or color for each in shapes],
            "size": [max(3, each.size - (2 if many else 0)) for each in shapes],
        },
        "opacity": 1 if strong else 0.75,
        "hovertemplate": "<b>%{customdata[0]}</b> · %{x|%Y-%m-%d %H:%M}<br>%{customdata[1]}"
        "<extra>%{fullData.name}</extra>",
    }


def _said(point: Point) -> list[str]:
    value = text.plus_minus(point.value, point.se) if point.se else text.number(point.value)
    return [value, shape(point.verdict).word, point.run_id]


def _levels(trend: Trend, axis: Axis) -> Iterator[tuple[float, str, str]]:
    """Yield value, words and color of each horizontal line that can be seen."""
    chosen, compared = trend.chosen, trend.compared
    if chosen is None:
        return
    color, _, _ = palette.series_style(chosen.index)
    if compared.baseline is not None and _is_within(compared.baseline, axis):
        yield compared.baseline, compared.words, color
    for limit in compared.limits:
        if _is_within(limit.value, axis):
            name = text.label(text.clip(limit.rule, 30))
            red = palette.CULPRIT if limit.severity is Severity.CRITICAL else palette.WARNED
            yield limit.value, f"{name} {text.number(limit.value)}", red


def _shapes(trend: Trend, axis: Axis) -> Iterator[Json]:
    """Yield the chosen candidate's band, then baseline and limits."""
    across = {"xref": "x domain", "x0": 0, "x1": 1}
    if trend.chosen is not None and trend.compared.band is not None:
        color, _, _ = palette.series_style(trend.chosen.index)
        low, high = trend.compared.band
        bottom = low if not axis.is_log or low > 0 else 10.0 ** axis.range[0]
        yield {
            "type": "rect", **across, "y0": bottom, "y1": high, "fillcolor": color,
            "opacity": 0.16, "line": {"width": 0}, "layer": "below",
        }  # fmt: skip
    for value, _, color in _levels(trend, axis):
        style = {"color": color, "width": 1.2, "dash": "dash"}
        yield {"type": "line", **across, "y0": value, "y1": value, "line": style}


def _notes(trend: Trend, axis: Axis) -> Iterator[Json]:
    for value, words, color in _levels(trend, axis):
        yield {
            "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom",
            "text": palette.ink(words, color),
            "y": axis.coordinate(value), "showarrow": False,
            "font": {"size": 11},
        }  # fmt: skip


def _pinned(trend: Trend, axis: Axis, zone: tzinfo) -> Iterator[Json]:
    """Yield a ring around the baseline run on the chosen line."""
    points = trend.chosen.points if trend.chosen is not None else ()
    found = next((p for p in points if p.run_id == trend.pinned_run), None)
    if found is not None and found.value is not None:
        ring = {"symbol": "circle-open", "size": 15, "color": palette.CHOSEN, "line": {"width": 2}}
        yield {
            "type": "scatter", "x": [trend_marks.clock_text(found.at, zone)],
            "y": [axis.place(found.value)], "mode": "markers", "marker": ring,
            "name": "baseline run", "hoverinfo": "skip",
        }  # fmt: skip


def _verdict_legend(trend: Trend) -> Iterator[Json]:
    """Yield an entry for each verdict that occurs; passing is the rule and needs none."""
    there = {point.verdict for line in trend.lines for point in line.points}
    for verdict in Verdict:
        if verdict is not Verdict.PASS and verdict in there:
            known = VERDICT_SHAPES[verdict]
            marker = {"symbol": known.symbol, "color": known.color, "size": known.size}
            yield {
                "type": "scatter", "x": [None], "y": [None], "mode": "markers",
                "name": known.word, "hoverinfo": "skip", "marker": marker,
            }  # fmt: skip


def _span(trend: Trend, zone: tzinfo) -> Json:
    """Return a range for runs so close together that their axis would count milliseconds."""
    moments = [point.at for line in trend.lines for point in line.points]
    moments += [mark.started_at for mark in trend.failures]
    if not moments or max(moments) - min(moments) >= _SHORTEST:
        return {}
    middle, half = min(moments) + (max(moments) - min(moments)) / 2, _SHORTEST / 2
    return {"range": [trend_marks.clock_text(middle + half * sign, zone) for sign in (-1, 1)]}


def _layout(trend: Trend, axis: Axis, unit: str, zone: tzinfo) -> Json:
    return {
        # Above are the marks of what changed.
        **frame(420, above=28),
        "xaxis": {"type": "date", "showgrid": False, "zeroline": False, **_span(trend, zone)},
        "yaxis": scaled(axis, unit),
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "shapes": list(_shapes(trend, axis)),
        "annotations": list(_notes(trend, axis)),
    }  # fmt: skip


def hidden_limits(trend: Trend, *, is_log: bool) -> Sequence[str]:
    """Return limits that lie too far from the values to be drawn, in words."""
    axis = _axis(trend, is_log)
    return [
        f"{limit.rule} {text.number(limit.value)}"
        for limit in trend.compared.limits
        if not _is_within(limit.value, axis)
    ]
