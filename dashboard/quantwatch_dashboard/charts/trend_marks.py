"""What happened beside the numbers: what changed from run to run, and runs that failed."""

from collections.abc import Iterator, Sequence
from datetime import datetime, tzinfo
from itertools import groupby

from quantwatch.domain import Json
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.logic.history import Change, change_words
from quantwatch_dashboard.logic.trends import Trend

_MOST_LINES = 6


def traces(trend: Trend, zone: tzinfo) -> Iterator[Json]:
    """Yield vertical lines where something changed, and marks on the axis for failed runs.

    Both lie on a second axis from 0 to 1, so that zooming never moves them away.
    """
    if trend.changes:
        yield from _changes(trend.changes, zone)
    if trend.failures:
        yield _failures(trend, zone)


def _changes(changes: Sequence[Change], zone: tzinfo) -> Iterator[Json]:
    runs = [(key, list(group)) for key, group in groupby(changes, key=lambda c: (c.run_id, c.at))]
    times = [clock_text(at, zone) for (_, at), _ in runs]
    yield {
        "type": "scatter", "x": [each for time in times for each in (time, time, None)],
        "y": [each for _ in times for each in (0, 1, None)], "yaxis": "y2", "mode": "lines",
        "hoverinfo": "skip", "showlegend": False, "opacity": 0.8,
        "line": {"color": palette.CHANGED, "width": 1, "dash": "dot"},
    }  # fmt: skip
    yield {
        "type": "scatter", "x": times, "y": [1] * len(times), "yaxis": "y2", "mode": "markers",
        "cliponaxis": False, "name": "something changed",
        "marker": {"symbol": "triangle-down", "size": 10, "color": palette.CHANGED},
        "customdata": [[_told(group), run] for (run, _), group in runs],
        "hovertemplate": "<b>Changed</b> · %{x|%Y-%m-%d %H:%M}<br>%{customdata[0]}<extra></extra>",
    }  # fmt: skip


def _told(group: Sequence[Change]) -> str:
    lines = [_line(change, record) for change in group for record in change.records]
    more = text.more(len(lines), _MOST_LINES)
    return "<br>".join(filter(None, (*lines[:_MOST_LINES], more)))


def _line(change: Change, record: Json) -> str:
    whose = "" if change.candidate is None else f"{text.clip(change.candidate, 24)} · "
    return text.label(f"{whose}{change_words(record)}")


def _failures(trend: Trend, zone: tzinfo) -> Json:
    bar = {"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": palette.MUTED}}
    return {
        "type": "scatter", "x": [clock_text(mark.started_at, zone) for mark in trend.failures],
        "y": [0.012] * len(trend.failures), "yaxis": "y2", "mode": "markers", "marker": bar,
        "cliponaxis": False, "name": "⚡ no result",
        "customdata": [
            [f"Run {m.status.value}", text.label(text.clip(m.reason or "", 110)), m.run_id]
            for m in trend.failures
        ],
        "hovertemplate": "<b>%{customdata[0]}</b> · %{x|%Y-%m-%d %H:%M}<br>%{customdata[1]}"
        "<extra></extra>",
    }  # fmt: skip


def clock_text(when: datetime, zone: tzinfo) -> str:
    """Return an instant as Plotly's axis of time reads it: the reader's wall clock."""
    return when.astimezone(zone).replace(tzinfo=None).isoformat(timespec="seconds")
