"""Numbers and words of Overview and Check: of the right run, candidate, baseline and checks."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import streamlit as st
from sqlalchemy import update
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.pages import html, open_page
from tests.dashboard.test_dashboard_history import CONFIG, NIGHT, START, recent, state
from tests.dashboard.test_dashboard_history import run as one_run

from quantwatch.domain import RunResult, Verdict
from quantwatch.store.baselines import pin
from quantwatch.store.session import open_database
from quantwatch.store.states import Headline
from quantwatch.store.tables import CheckRow, RunRow
from quantwatch_dashboard import text
from quantwatch_dashboard.components import check_card, checks
from quantwatch_dashboard.logic import ranking, series, standings
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.logic.standings import Wanted
from quantwatch_dashboard.logic.summaries import CheckSummary, summarize
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries import forgetting, overview
from quantwatch_dashboard.queries.trend import shown_trend

NOW, ZONE = START + 10 * NIGHT, ZoneInfo("UTC")
BASELINE = {name: Headline(name, 0.1, "finite", None, None) for name in "ab"}
SMALL = Spec(candidates=(Candidate("a", 1e-2), Candidate("b", 1e-1)), num_layers=1, num_prompts=1)
FOUR, TENTH = text.number(4.0), text.number(0.1)
IDS = [f"01JX{i:022d}" for i in range(9)]


def check(name: str = "c", **given: Any) -> CheckSummary:
    known = {"check": name, "baseline_run_id": "r0", "baseline": BASELINE}
    return summarize(state(**known | {"recent": (recent(2, 0.1, 0.4),)} | given))


def said(found: CheckSummary) -> tuple[str, str]:
    """Return the row of the overview and the card of the check's page."""
    row = checks.check_table([found], checks.Beside(NOW, ZONE))
    return str(row), str(check_card.card(found, check_card.Known(), NOW, ZONE))


def test_a_baseline_of_something_else_is_no_number() -> None:
    """Catches a ratio to a run that measured other prompts: the judge itself refuses it."""
    other, same = check("other", differs=("suite", "reference")), check("same")

    assert f"{FOUR} × its baseline" in said(same)[0]
    assert f"{FOUR} × its baseline of {TENTH}" in said(same)[1]
    assert other.bands == (None, None)
    assert standings.ratio(other, 1) is None
    for words in said(other):
        assert "not comparable with its baseline (different suite, reference)" in words
        assert "×" not in words
    found = standings.matching((other, same), Wanted(sort="change"), NOW)
    assert [one.check for one in found] == ["same", "other"]


def test_a_rolling_baseline_is_named() -> None:
    """Catches a ratio to one run that looks like the verdict's, which is to a mean of several."""
    found = check(config=CONFIG | {"baseline": {"kind": "rolling", "window": 5}})
    for words in said(found):
        assert f"{FOUR} × the newest run of its baseline&#x27;s window" in words


def test_now_is_the_decided_run() -> None:
    """Catches last week's value that is shown as "now" since nobody measures the candidate."""
    gone = check(recent=(recent(1, 0.1, 0.4), recent(2, 0.2), recent(3)))

    assert gone.now == (0.2, None)
    assert standings.ratio(gone, 1) is None
    only = check(recent=(recent(1, 0.1, 0.4), recent(2), recent(3)))
    row, card = said(only)
    assert "not measured in the newest run" in row
    assert "Output KL of a: not measured in the newest run with results." in card


def test_one_last_success() -> None:
    """Catches a row that shows when a run began, sorted by when it ended."""
    ended = replace(one_run(2, Verdict.PASS), finished_at=START + 3 * NIGHT)
    bare = check(decided=ended, last_success_at=None)
    known = check(decided=ended, last_success_at=START + 4 * NIGHT)

    assert bare.last_success == START + 3 * NIGHT
    assert known.last_success == START + 4 * NIGHT
    for words in said(known):
        assert f'datetime="{(START + 4 * NIGHT).isoformat()}"' in words
    found = standings.matching((known, bare), Wanted(sort="success"), NOW)
    assert found == (bare, known)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Verdict.REGRESSION, 0.1), (Verdict.WARN, 9.0)),
        ((Verdict.WARN, 0.2), (Verdict.WARN, 0.1)),
        ((Verdict.WARN, math.nan), (Verdict.WARN, 9.0)),
        ((Verdict.WARN, None), (Verdict.WARN, 9.0)),
        ((Verdict.PASS, 0.1), (None, None)),
    ],
    ids=["verdict", "size", "not a number", "unknown", "could not be measured"],
)
def test_who_matters_more(first: Any, second: Any) -> None:
    """Catches a bad candidate that hides behind a good one."""
    assert ranking.rank(*first) < ranking.rank(*second)


def test_every_page_names_the_same_candidate(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a row that is about one candidate while the run page is about another."""
    before = replace(SMALL, run_id=IDS[0], candidates=(Candidate("a", 1e-3), Candidate("b", 1e-1)))
    now = replace(SMALL, run_id=IDS[1], started_at=before.started_at + NIGHT)
    save_run(before)
    result = save_run(now)
    url = pinned(IDS[0])
    summary = check_queries.summary(url, SMALL.check)
    lead = series.leading(result)

    assert (standings.ratio(summary, 0) or 0) > 2 * (standings.ratio(summary, 1) or 0)
    assert lead is not None
    assert summary.candidates[standings.lead(summary) or 0] == lead.name == "b"


def pinned(run_id: str, **changed: Any) -> str:
    """Pin a run of the check, then pretend that it measured something else."""
    url = os.environ["QUANTWATCH_DATABASE_URL"]
    database = open_database(url)
    pin(database, SMALL.check, run_id, actor="ann")
    if changed:
        with database.writer() as session:
            session.execute(update(RunRow).where(RunRow.id == run_id).values(**changed))
    database.close()
    st.cache_resource.clear()
    return str(url)


def test_the_line_of_an_old_baseline(
    save_run: Callable[[Spec], RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a line and a band that vanish when the pinned run is older than the trend."""
    monkeypatch.setattr(check_queries, "MOST_RUNS", 2)
    for i in range(4):
        at = SMALL.started_at + i * NIGHT
        save_run(replace(SMALL, run_id=IDS[i], started_at=at))
    url = pinned(IDS[0])
    summary = check_queries.summary(url, SMALL.check)
    for shown in (check_queries.HEADLINE, Statistic("rel_error", "layers.0", "p99")):
        trend = shown_trend(url, summary, shown, ("a", 90))
        (point,) = (p for p in check_queries.points_of(url, IDS[0], shown) if p.candidate == "a")
        assert point.value is not None
        assert trend.compared.baseline == point.value
        assert IDS[0] not in {p.run_id for line in trend.lines for p in line.points}


def test_no_line_to_what_is_not_comparable(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a dashed "baseline" of other prompts on the check's page."""
    save_run(replace(SMALL, run_id=IDS[0]))
    save_run(replace(SMALL, run_id=IDS[1], started_at=SMALL.started_at + NIGHT))
    url = pinned(IDS[0], capture_sha="0" * 64)
    summary = check_queries.summary(url, SMALL.check)
    compared = shown_trend(url, summary, check_queries.HEADLINE, ("a", 90)).compared
    page = html(open_page("check", check=SMALL.check))

    assert (compared.baseline, compared.band) == (None, None)
    assert "No line to compare with: not comparable with its baseline" in page
    assert "(different capture settings)" in page
    assert ">not comparable<" in page


def test_a_removed_check_is_apart(demo_url: str) -> None:
    """Catches a check that is worse for ever because it was renamed, and leads every page."""
    database = open_database(demo_url)
    with database.writer() as session:
        gone = update(CheckRow).where(CheckRow.name == "demo")
        session.execute(gone.values(removed_at=START + timedelta(days=9)))
    database.close()
    st.cache_resource.clear()
    shown = html(open_page("overview")).split("Newest runs")[0]

    assert "Worse:" not in shown
    assert "1 regression" not in shown
    assert "1 check" in shown
    assert shown.index(">chat-int8<") < shown.index("No longer configured") < shown.index(">demo<")
    assert 'href="run?run=' in shown
    assert check_queries.summary(demo_url, "demo").decided is not None
    assert "Output KL of int8" in html(open_page("check"))
    assert "int8-fault" not in html(open_page("check"))


def test_another_check_begins_at_its_first_page(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a list of runs that begins in the middle, or is empty, after another was chosen."""
    for i in range(42):
        at, name = SMALL.started_at + i * NIGHT, "one" if i < 21 else "two"
        save_run(replace(SMALL, check=name, run_id=f"01JX{i:022d}", started_at=at))
    page = open_page("check", check="one", page="2")
    assert "21–21 of 21 runs" in html(page)
    page.selectbox(key="pick-check").select("two").run()

    assert not page.exception
    assert "1–20 of 21 runs" in html(page)


def test_what_began_is_forgotten_once(demo_url: str) -> None:
    """Catches a cache that twenty open pages empty one after another, and prompts read anew."""
    kept, before = overview.checks(demo_url), frozenset({"01RUN"})
    forgetting.forget_standings(frozenset(), before)
    renewed = overview.checks(demo_url)
    forgetting.forget_standings(frozenset(), before)

    assert renewed is not kept
    assert overview.checks(demo_url) is renewed
    forgetting.forget_standings(before, frozenset())
    assert overview.checks(demo_url) is not renewed
