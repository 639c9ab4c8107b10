"""From records to what the pages say: pure functions on a run with a planted fault."""

import csv
import io
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch.store.records import RunSummary, SeriesPoint
from quantwatch_dashboard import series
from quantwatch_dashboard.charts.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.summaries import summarize, worst

NIGHT = timedelta(days=1)
START = datetime(2026, 11, 1, tzinfo=UTC)


def test_lines_cover_every_layer_and_candidate(planted: RunResult) -> None:
    """Catches layers in text order (10 before 2) and a candidate without a line."""
    places = series.layers(planted)
    lines = series.lens_lines(planted, "int8-fault", "mean")

    assert places == tuple(f"layers.{i}" for i in range(30))
    assert [line.name for line in lines] == ["bf16", "int8", "int4-g64", "int8-fault"]
    assert [line.strong for line in lines] == [False, False, False, True]
    before, at = (lines[3].values[i] for i in (13, 14))
    assert before is not None
    assert at is not None
    assert before < 0.01
    assert at > 0.15


def test_only_the_planted_layer_is_marked(planted: RunResult) -> None:
    """Catches an annotation on the largest of equally large errors: that is nobody's fault."""
    part = series.culprit_part(planted.candidates[3])
    lines = series.isolated_lines(planted, "int8-fault", part)
    places = series.isolated_places(planted, part)

    assert part == "mlp.down_proj"
    assert [sorted(line.marked) for line in lines] == [
        [],
        [],
        [],
        [places.index("layers.14.mlp.down_proj")],
    ]
    assert lines[3].label == "layers.14.mlp.down_proj"
    assert series.outlier(planted, planted.candidates[3]) == "layers.14"
    assert series.outlier(planted, planted.candidates[2]) is None


@pytest.mark.parametrize(
    ("rules", "threshold"),
    [([], 0.15), ([{"name": "layer-kl", "threshold": 0.4}], 0.4), ([{"name": "other"}], 0.15)],
    ids=["default", "overridden", "another rule"],
)
def test_lens_threshold(planted: RunResult, rules: list[dict[str, Any]], threshold: float) -> None:
    """Catches a line at 0.15 in a run that was judged by another limit."""
    quiet = replace(planted, alerts=(), config={"rules": rules})

    assert series.lens_threshold(quiet) == threshold


def test_layer_csv_is_exact(planted: RunResult) -> None:
    """Catches rounded numbers, and NaN or unmeasured cells that are written as 0."""
    rows = series.layer_rows(planted.candidates[3])
    odd = replace(rows[0], mean_kl=math.nan, max_kl=math.inf, p99_kl=None)
    read = list(csv.DictReader(io.StringIO(series.layer_csv([odd, *rows[1:]]).decode())))

    assert len(read) == 30
    assert (read[0]["mean_kl"], read[0]["max_kl"], read[0]["p99_kl"]) == ("nan", "inf", "")
    row = planted.candidates[3].find("lens_kl", "layers.14")
    assert row is not None
    assert float(read[14]["mean_kl"]) == row.mean


def night(
    number: int, verdict: Verdict | None, status: RunStatus = RunStatus.SUCCEEDED
) -> RunSummary:
    at = START + number * NIGHT
    return RunSummary(
        f"r{number}", "c", status, verdict, at, at, "s", 1, (("a", verdict),), 0, None
    )


def test_since_is_the_start_of_the_streak() -> None:
    """Catches an age of the newest run where the age of the trouble is meant."""
    newest_first = [
        night(4, Verdict.REGRESSION),
        night(3, Verdict.REGRESSION),
        night(2, Verdict.PASS),
        night(1, Verdict.REGRESSION),
    ]

    assert summarize("c", newest_first, [], max_runs=9).since == START + 3 * NIGHT


def test_failed_run_is_trouble_not_a_verdict() -> None:
    """Catches a monitor's crash that hides the last verdict, or looks like a regression."""
    runs = [night(3, None, RunStatus.FAILED), night(2, Verdict.PASS)]
    summary = summarize("c", runs, [], max_runs=9)

    assert summary.decided == runs[1]
    assert summary.trouble == runs[0]


def test_worst_check_is_first() -> None:
    """Catches an overview in alphabetical order."""
    found = [
        summarize(name, [night(1, verdict, status)], [], max_runs=9)
        for name, verdict, status in (
            ("a", Verdict.PASS, RunStatus.SUCCEEDED),
            ("b", None, RunStatus.FAILED),
            ("c", Verdict.REGRESSION, RunStatus.SUCCEEDED),
            ("d", Verdict.WARN, RunStatus.SUCCEEDED),
        )
    ]

    assert [s.check for s in sorted(found, key=lambda s: s.order)] == ["c", "b", "d", "a"]


def test_trend_has_a_gap_where_a_run_failed() -> None:
    """Catches values that slide to another night, and NaN that becomes a gap."""
    runs = [night(3, Verdict.PASS), night(2, None, RunStatus.FAILED), night(1, Verdict.PASS)]
    points = [
        SeriesPoint("r1", START, "a", 0.5, "finite", None),
        SeriesPoint("r3", START, "a", None, "nan", None),
    ]
    trend = summarize("c", runs, points, max_runs=9).trends[0]

    assert trend.values[:2] == [0.5, None]
    assert trend.values[2] is not None
    assert math.isnan(trend.values[2])


def test_worst_tokens_lead_with_nan() -> None:
    """Catches NaN tokens that sort behind every number."""
    places = tuple(TokenPlace(0, j, j, "x") for j in range(4))
    values = np.array([[1.0, math.nan, 3.0, 9.0]])
    grid = TokenGrid(("model",), places, values, np.array([[False, False, False, True]]))

    assert [token.place.position for token in worst([grid], 2)] == [1, 2]
