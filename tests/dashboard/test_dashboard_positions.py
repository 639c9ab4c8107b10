"""The chart of KL by position, and where the run page shows it."""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from streamlit.testing.v1 import AppTest
from tests.dashboard.invented import DEMO, Spec
from tests.dashboard.invented_runs import make_run
from tests.dashboard.pages import html, open_page

from quantwatch.domain import PositionRange
from quantwatch.store import runs
from quantwatch.store.session import open_database
from quantwatch_dashboard.charts.positions import position_chart

RUN = "01JR" + "0" * 22
ROWS = [
    PositionRange("logit_kl", 0, 15, 320, 0, 1e-3, 2e-4),
    PositionRange("logit_kl", 16, 31, 16, 0, 4e-3, None),
    PositionRange("lens_kl", 0, 15, 20, 0, 2e-2, 1e-3),
    PositionRange("lens_kl", 16, 31, 2, 2, None, None),
]
PLACES = ["0–15", "16–31"]


def test_lines_errors_and_words() -> None:
    """Catches an error of 0 that stands for one that isn't known, or ranges out of order."""
    figure = position_chart({"int4": ROWS[:2]}, PLACES, unit="nats")
    line = figure.data[0]
    assert list(line.x) == PLACES
    assert list(line.y) == [1e-3, 4e-3]
    assert list(line.error_y.array) == [2e-4, 0.0]
    assert line.customdata[1][1] == " (no error: fewer than two prompts)"
    assert list(figure.layout.xaxis.categoryarray) == PLACES


def test_nothing_finite_has_a_row_of_its_own() -> None:
    """Catches a gap where all values of a range are NaN."""
    figure = position_chart({"a": ROWS[2:], "b": []}, PLACES, unit="nats")
    assert figure.data[0].y[1] > 2e-2
    assert "NaN, ∞" in figure.layout.yaxis.ticktext


@pytest.fixture
def opened(empty_url: str) -> Callable[..., AppTest]:
    def opened(rows: list[PositionRange]) -> AppTest:
        result, suite, blocks = make_run(Spec(run_id=RUN, candidates=DEMO))
        told = {candidate.name: [asdict(row) for row in rows] for candidate in result.candidates}
        database = open_database(empty_url)
        runs.begin_run(database, run_id=RUN, check="demo", config={}, started_at=result.started_at)
        kept = {**result.capture, "by_position": told} if rows else result.capture
        runs.finish_run(database, replace(result, capture=kept), suite, blocks)
        database.close()
        return open_page("run", run=RUN)

    return opened


@pytest.mark.parametrize(
    ("rows", "charts"), [(ROWS, 2), (ROWS[:1], 0), ([], 0)], ids=["two", "one range", "before"]
)
def test_the_run_page_shows_it(
    opened: Callable[..., AppTest], rows: list[PositionRange], charts: int
) -> None:
    """Catches a page that fails on old runs, or a chart of a single range."""
    page = opened(rows)
    ids = [chart.proto.id for chart in page.get("plotly_chart")]
    assert sum("positions-" in each for each in ids) == charts
    assert ("KL by position" in html(page)) == bool(charts)
