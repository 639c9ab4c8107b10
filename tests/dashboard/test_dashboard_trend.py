"""A statistic over the runs: lines, limits, marks; small whatever the data."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.dashboard.test_dashboard_history import NIGHT, START

from quantwatch.domain import RunStatus, Severity, Verdict
from quantwatch.store.marks import RunMark
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.axis import by_decades, by_units, close_to
from quantwatch_dashboard.charts.tradeoff import tradeoff_chart
from quantwatch_dashboard.charts.trend import hidden_limits, trend_chart
from quantwatch_dashboard.components.picture import run_of
from quantwatch_dashboard.logic import bands, trends
from quantwatch_dashboard.logic.history import Change, Limit, Tradeoff, change_words
from quantwatch_dashboard.logic.trends import Compared, Line, Point, Trend

NAN, INF = math.nan, math.inf
HOSTILE = "<b>x</b><a href='javascript:alert(1)'>"


def point(night: int, value: float | None, verdict: Verdict | None = Verdict.PASS) -> Point:
    return Point(f"{night:026d}", START + night * NIGHT, value, verdict)


def line(values: Sequence[float | None], name: str = "a", index: int = 0) -> Line:
    return Line(name, index, tuple(point(i, value) for i, value in enumerate(values)))


def failed(night: int, reason: str) -> RunMark:
    at = START + night * NIGHT
    return RunMark(
        run_id=f"{night:026d}", status=RunStatus.FAILED, verdict=None, reason=reason, started_at=at,
        finished_at=at, trigger="schedule", parent_run_id=None, baseline_run_id=None, num_alerts=0,
        measured={}, environment={}, reference=None, candidates=(),
    )  # fmt: skip


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data if trace.name}


@pytest.mark.parametrize(
    ("values", "is_log", "low", "high"),
    [
        pytest.param([0.1, 0.2], True, -1, -0.699, id="follows the values"),
        pytest.param([0.1, 0.1], True, -1.175, -0.825, id="noise is not blown up"),
        pytest.param([1e-30, 1.0], True, -12, 0, id="twelve decades at most"),
        pytest.param([], True, -6.0, 0.0, id="nothing"),
        pytest.param([NAN, None], False, 0, 1, id="nothing finite"),
        pytest.param([0.91, 0.99], False, 0.91, 0.99, id="linear"),
        pytest.param([5.0, 5.0], False, 4.95, 5.05, id="constant"),
    ],
)  # fmt: skip
def test_axis_follows_the_values(
    values: list[float | None], is_log: bool, low: float, high: float
) -> None:
    """Catches a flat line on an axis of whole decades, where nobody sees a regression."""
    axis = close_to(values, is_log=is_log)
    assert [axis.low, axis.high] == pytest.approx([low, high], abs=0.03)
    heights, labels = axis.ticks()
    assert len(heights) == len(labels) >= 1
    assert heights == sorted(heights)


@pytest.mark.parametrize("is_log", [True, False], ids=["log", "linear"])
@pytest.mark.parametrize(
    "values", [[1e308, NAN, 0.0], [-1.7e308, 1.7e308, INF], [5e-324, 0.0]], ids=str
)
def test_axis_holds_whatever_a_float_holds(values: list[float], is_log: bool) -> None:
    """Catches an overflow instead of the page, where a value has run away."""
    layered = by_decades(values) if is_log else by_units(values)
    close = close_to(values, is_log=is_log)
    for axis, ends in ((layered, layered.range), (close, close.range)):
        placed = [axis.place(value) for value in values]
        assert all(math.isfinite(place) for place in (*placed, *axis.ticks()[0], *ends) if place)


def test_zeros_and_nonfinite_values_have_rows() -> None:
    """Catches an exact zero, or NaN, that is drawn as a number or left out."""
    axis = close_to([0.0, 0.1, 1.0, NAN], is_log=True)
    heights, labels = axis.ticks()

    assert labels[0] == "0 (exact)"
    assert labels[-1] == "NaN, ∞"
    assert axis.place(0.0) == heights[0] < 0.1
    assert axis.place(INF) == axis.place(NAN) == heights[-1] > 1
    assert axis.place(None) is None
    assert axis.range[0] < math.log10(heights[0])
    assert axis.range[1] > math.log10(heights[-1])


def test_trend_shows_verdicts_by_shape_and_color() -> None:
    """Catches a verdict that only a color tells, a bridged gap, and NaN that is drawn as nothing."""
    points = (
        point(0, 0.1), point(1, None, None), point(2, 0.2, Verdict.REGRESSION),
        point(3, NAN, Verdict.REGRESSION),
    )  # fmt: skip
    figure = trend_chart(
        Trend((Line(HOSTILE, 0, points),), HOSTILE), unit=HOSTILE, is_log=True, zone=UTC
    )
    drawn = next(trace for trace in figure.data if trace.customdata is not None)

    assert drawn.marker.symbol[0] != drawn.marker.symbol[2]
    assert drawn.marker.color[0] != drawn.marker.color[2]
    assert drawn.y[1] is None
    assert not drawn.connectgaps
    assert drawn.y[3] > 0.2
    assert drawn.customdata[2][-1] == points[2].run_id
    assert "✕ Regression" in traces(figure)
    assert "✓ Pass" not in traces(figure)
    assert "<b>" not in drawn.name
    assert figure.layout.yaxis.type == "log"
    assert (
        figure.layout.yaxis.title.text == "&lt;b&gt;x&lt;/b&gt;&lt;a href='javascript:alert(1)'&gt;"
    )


def test_changes_and_failures_are_marked_and_escaped() -> None:
    """Catches a driver update that nobody sees, and a reason that Plotly renders."""
    record = {
        "name": "environment.gpus.0.driver",
        "part": "driver",
        "value": HOSTILE,
        "baseline": "1",
    }
    change = Change(f"{1:026d}", START + NIGHT, None, (record,) * 9)
    trend = Trend(
        (line([0.1, 0.2]),), "a", changes=(change,), failures=(failed(3, HOSTILE),),
        pinned_run=f"{0:026d}",
    )  # fmt: skip
    figure = trend_chart(trend, unit="x", is_log=False, zone=UTC)
    found = traces(figure)
    changed, broken = found["something changed"], found["⚡ no result"]

    assert "&lt;b&gt;x" in changed.customdata[0][0]
    assert "gpus.0.driver: 1 → " in changed.customdata[0][0]
    assert changed.customdata[0][0].endswith("and 3 more")
    assert "<b>" not in broken.customdata[0][1]
    assert run_of([{"customdata": broken.customdata[0]}]) == f"{3:026d}"
    assert changed.yaxis == broken.yaxis == "y2"
    assert "baseline run" in found


def test_baseline_band_and_limits_belong_to_the_chosen_candidate() -> None:
    """Catches a limit that flattens the lines, or is silently not there."""
    limits = (
        Limit("near", 0.15, Severity.CRITICAL),
        Limit("far", 1e9, Severity.WARNING),
    )
    lines = (line([0.1, 0.12]), line([0.2, 0.2], "b", 1))
    trend = Trend(lines, "b", Compared(0.2, (0.0, 0.21), limits))
    figure = trend_chart(trend, unit="x", is_log=True, zone=UTC)
    said = [note.text for note in figure.layout.annotations]

    assert said == [palette.ink("baseline"), palette.ink("near 0.150", palette.CULPRIT)]
    assert hidden_limits(trend, is_log=True) == ["far 1.00e9"]
    assert figure.data[-1].name == "b"
    assert figure.layout.yaxis.range[1] < 1


def test_digests_are_short_and_other_words_are_not_cut_to_pieces() -> None:
    """Catches 64 hexadecimal digits in a hover card."""
    record = {"name": "weights_sha", "part": "weights", "value": "ab" * 32, "baseline": "cd" * 32}
    assert change_words(record) == "weights_sha: cdcdcdcdcdcd… → abababababab…"


def test_many_runs_are_thinned_but_the_spike_stays() -> None:
    """Catches a figure of megabytes, and a mean that hides the one bad night."""
    values: list[float | None] = [0.1] * 20_000
    values[7_777], values[12_345] = 3.0, NAN
    thin, left_out = trends.thinned([line(values), line(values, "b", 1)], most=2_000)
    kept = {p.run_id for p in thin[0].points}

    assert len(thin[0].points) == len(thin[1].points) <= 1_003
    assert left_out == 20_000 - len(thin[0].points)
    assert {f"{night:026d}" for night in (0, 7_777, 12_345, 19_999)} <= kept
    assert trends.thinned([line([0.1, 0.2])])[1] == 0


def test_a_figure_stays_below_two_megabytes() -> None:
    """Catches a decade of nights of eight candidates that a browser can't draw."""
    lines = [line([0.1 + 0.001 * (i % 7) for i in range(4_000)], f"c{k}", k) for k in range(8)]
    thin, left_out = trends.thinned(lines)
    record = {"name": "x" * 200, "part": "system", "value": "y" * 300, "baseline": "z" * 300}
    changes = tuple(
        Change(f"{i:026d}", START + i * NIGHT, None, (record,) * 20) for i in range(400)
    )
    broken = tuple(failed(i, "r" * 2_000) for i in range(400))
    trend = Trend(thin, "c0", changes=changes, failures=broken, left_out=left_out)
    figure = trend_chart(trend, unit="x", is_log=True, zone=UTC)

    assert len(figure.to_json()) < 2_000_000
    assert left_out > 0


def test_ranges_cut_points_and_what_happened_alike() -> None:
    """Catches marks that lie outside of the picture, and colors that change with the range."""
    marks = tuple(failed(night, "x") for night in range(5))
    points = [
        SeriesPoint(f"{n:026d}", START + n * NIGHT, c, 0.1, "finite", Verdict.PASS)
        for n in range(5)
        for c in "ab"
    ]
    newest = trends.newest_runs(marks, 2)
    lines = trends.lines_of(trends.within(points, newest), ["gone", "a", "b"])

    assert [(one.name, one.index, len(one.points)) for one in lines] == [("a", 1, 2), ("b", 2, 2)]
    assert trends.newest_runs(marks, None) == marks
    assert len(trends.failures(newest)) == 2


@pytest.mark.parametrize(
    ("baseline", "floor", "band"),
    [
        (1.0, 0.1, (0.7, 1.3)),
        (0.1, 0.1, (0.0, 0.4)),
        (None, 0.1, None),
        (1.0, None, None),
        (NAN, 0.1, None),
    ],
    ids=["both sides", "an error is not negative", "no baseline", "no floor", "NaN"],
)
def test_noise_band(
    baseline: float | None, floor: float | None, band: tuple[float, float] | None
) -> None:
    """Catches a band below zero on a log axis, or one around nothing."""
    found = bands.noise_band(baseline, [floor], is_log=True)
    assert found == (None if band is None else pytest.approx(band))


def test_front_and_candidates_that_are_not_finite() -> None:
    """Catches a front through NaN, and a name that Plotly renders."""
    found = [
        Tradeoff("small", 0, 4.0, 10, 0.5, "finite", Verdict.WARN, True),
        Tradeoff(HOSTILE, 1, 8.0, None, 0.1, "finite", Verdict.PASS, True),
        Tradeoff("worse", 2, 9.0, 30, 0.7, "finite", None, False),
        Tradeoff("nan", 3, 8.0, 20, None, "nan", Verdict.REGRESSION, False),
        Tradeoff("none", 4, 8.0, 20, None, "missing", None, False),
    ]
    figure = tradeoff_chart(found, unit="Output KL, nats", is_log=True)
    front, *points = figure.data

    assert list(front.x) == [4.0, 8.0]
    assert list(front.y) == [0.5, 0.1]
    assert [p.name for p in points] == [
        "small",
        f"{HOSTILE}".replace("<", "&lt;").replace(">", "&gt;"),
        "worse",
        "nan",
    ]
    assert points[2].marker.symbol == "circle-open"
    assert all("<b>" not in note.text for note in figure.layout.annotations)
    assert tradeoff_chart([], unit="x", is_log=True).layout.yaxis.type == "log"


@pytest.mark.parametrize(
    ("points", "run"),
    [
        ([{"customdata": ["0.1", "✓ Pass", "0" * 26]}], "0" * 26),
        ([{"customdata": {"0": "x", "1": "0" * 26}}], "0" * 26),
        ([{"customdata": ["not a run"]}], None),
        ([{"x": 1}], None),
        ([], None),
    ],
    ids=["list", "table", "something else", "no data", "nothing"],
)
def test_a_click_names_a_run(points: list[Any], run: str | None) -> None:
    """Catches a click that opens something that is no run."""
    assert run_of(points) == run


def test_an_hour_apart_is_an_hour_apart() -> None:
    """Catches times that are drawn in another zone than they are written in."""
    two = Line("a", 0, (point(0, 1.0), Point("r", START + timedelta(hours=1), 1.0, None)))
    figure = trend_chart(Trend((two,), "a"), unit="x", is_log=False, zone=UTC)
    assert list(figure.data[0].x) == ["2026-11-01T03:00:00", "2026-11-01T04:00:00"]


def test_what_changed_where_it_began() -> None:
    """Catches a cause that is taken from another night, or made up for the first one."""
    marks = tuple(replace(failed(n, ""), verdict=Verdict.PASS) for n in range(3))
    change = Change(f"{1:026d}", START + NIGHT, None, ())

    assert trends.began([change], marks, START + NIGHT) == (change,)
    assert trends.began([change], marks, START + 2 * NIGHT) == ()
    assert trends.began([change], marks, START) is None
    assert trends.began([change], marks, None) is None


@pytest.mark.parametrize(("apart_s", "wide"), [(0, True), (60, True), (90_000, False)])
def test_an_axis_of_one_moment_counts_no_milliseconds(apart_s: float, wide: bool) -> None:
    """Catches ticks like 12:16:33.9995 under the first run of a check."""
    moments = [START, START + timedelta(seconds=apart_s)]
    points = tuple(Point(f"r{i}", at, 0.1, Verdict.PASS) for i, at in enumerate(moments))
    figure = trend_chart(Trend((Line("a", 0, points),), "a"), unit="x", is_log=False, zone=UTC)
    shown = figure.layout.xaxis.range
    assert (shown is not None) is wide
    if wide:
        first, last = (datetime.fromisoformat(each).replace(tzinfo=UTC) for each in shown)
        assert last - first == timedelta(hours=1)
        assert first <= moments[0] <= moments[1] <= last
