"""A trend small enough for a table row, as an SVG image. No script, no text from the database."""

import math
from collections.abc import Sequence

from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.svg import data_uri
from quantwatch_dashboard.logic.lines import Guide, Sparkline

_WIDTH, _HEIGHT, _EDGE = 220, 44, 5
_DECADES_AT_LEAST = 1.0


def sparkline(trends: Sequence[Sparkline], num_runs: int, guide: Guide | None = None) -> str:
    """Return a data URI of all trends on one log axis; 0 lies on the floor, NaN on top."""
    values = [v for t in trends for v in t.values if v is not None]
    values += [guide.baseline, guide.high] if guide is not None else []
    positive = [v for v in values if math.isfinite(v) and v > 0]
    low = math.log10(min(positive)) if positive else -1.0
    high = math.log10(max(positive)) if positive else 0.0
    middle, half = (low + high) / 2, max(high - low, _DECADES_AT_LEAST) / 2
    ends = middle - half, middle + half
    body = "" if guide is None else _band(guide, *ends)
    body += "".join(_line(t, num_runs, *ends) for t in trends)
    return data_uri(body, _WIDTH, _HEIGHT)


def _band(guide: Guide, low: float, high: float) -> str:
    color, _, _ = palette.series_style(guide.index)
    top, bottom = _inside(_y(guide.high, low, high)), _inside(_y(guide.low, low, high))
    at = _inside(_y(guide.baseline, low, high))
    return (
        f'<rect x="0" y="{top:.1f}" width="{_WIDTH}" height="{max(1.0, bottom - top):.1f}" '
        f'fill="{color}" fill-opacity="0.16"/><line x1="0" x2="{_WIDTH}" y1="{at:.1f}" '
        f'y2="{at:.1f}" stroke="{color}" stroke-width="1.1" stroke-dasharray="4 3"/>'
    )


def _inside(height: float) -> float:
    """A band may begin below what is drawn: it ends at the edge then."""
    return min(max(height, 1.0), _HEIGHT - 1.0)


def _line(trend: Sparkline, num_runs: int, low: float, high: float) -> str:
    color, _, _ = palette.series_style(trend.index)
    points = [
        None if value is None else (_x(i, num_runs), _y(value, low, high))
        for i, value in enumerate(trend.values)
    ]
    segments = _segments(points)
    lines = "".join(
        f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="'
        + " ".join(f"{x:.1f},{y:.1f}" for x, y in segment)
        + '"/>'
        for segment in segments
    )
    last = next((p for p in reversed(points) if p is not None), None)
    dot = (
        ""
        if last is None
        else f'<circle cx="{last[0]:.1f}" cy="{last[1]:.1f}" r="3" fill="{color}"/>'
    )
    return lines + dot


def _segments(points: list[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    """Split at the runs that have no value, so that no line pretends there was one."""
    segments: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            segments.append([])
        else:
            segments[-1].append(point)
    return [segment for segment in segments if len(segment) > 1]


def _x(index: int, num_runs: int) -> float:
    return _EDGE + (_WIDTH - 2 * _EDGE) * index / max(1, num_runs - 1)


def _y(value: float, low: float, high: float) -> float:
    if not math.isfinite(value):
        return 2.0
    if value <= 0:
        return _HEIGHT - 2.0
    share = (math.log10(value) - low) / (high - low)
    return _HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE)
