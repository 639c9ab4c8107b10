"""What a rule's value was in the runs before, during and after an episode, against its limit."""

from collections.abc import Sequence
from datetime import datetime, tzinfo

import plotly.graph_objects as go

from quantwatch.report.numbers import Number
from quantwatch.store.alert_history import Judgement
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import Axis, close_to
from quantwatch_dashboard.charts.frame import frame, scaled
from quantwatch_dashboard.logic.lines import Value

_LOOKS = {
    "breach": ("x", palette.CULPRIT), "between": ("diamond", palette.WARN),
    "clear": ("circle", palette.CLEAR), "undecided": ("circle-open", palette.MUTED),
}  # fmt: skip
_OTHER = ("circle-open", palette.MUTED)


def judged_chart(
    judged: Sequence[Judgement],
    lasted: tuple[datetime, datetime],
    *,
    unit: str,
    is_log: bool,
    zone: tzinfo,
) -> go.Figure:
    """Draw the values over time; `lasted` is shaded. What was not measured leaves a gap."""
    limits = [one.threshold for one in judged]
    seen = [limit for limit in limits if limit is not None and (limit > 0 or not is_log)]
    axis = close_to([_value(one) for one in judged], is_log=is_log, also=seen)
    figure = go.Figure()
    first, last = (end.astimezone(zone) for end in lasted)
    figure.add_vrect(
        x0=first, x1=last, fillcolor=palette.CULPRIT, opacity=0.09, line_width=0, layer="below"
    )
    figure.add_scatter(
        x=[one.at.astimezone(zone) for one in judged],
        y=[axis.place(limit) for limit in limits],
        mode="lines",
        line={"color": palette.CULPRIT, "width": 1.2, "dash": "dash"},
        hoverinfo="skip",
    )
    figure.add_trace(_values(judged, axis, zone))
    figure.update_layout(frame(230, legend=0), yaxis=scaled(axis, unit))
    return figure


def _values(judged: Sequence[Judgement], axis: Axis, zone: tzinfo) -> go.Scatter:
    values = [_value(one) for one in judged]
    looks = [_LOOKS.get(one.outcome, _OTHER) for one in judged]
    return go.Scatter(
        x=[one.at.astimezone(zone) for one in judged],
        y=[axis.place(value) for value in values],
        mode="lines+markers",
        line={"color": palette.MUTED, "width": 1.2},
        marker={"symbol": [s for s, _ in looks], "color": [c for _, c in looks], "size": 9},
        customdata=[
            [text.label(one.outcome), text.number(value), text.instant(one.at, zone)]
            for one, value in zip(judged, values, strict=True)
        ],
        hovertemplate="%{customdata[1]} · %{customdata[0]}<br>%{customdata[2]}<extra></extra>",
    )


def _value(one: Judgement) -> Value:
    return text.plain(Number(one.value, one.value_kind))
