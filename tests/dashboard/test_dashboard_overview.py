"""The overview in every state: filters in its address, pages, what is under way, who knows."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import streamlit as st
from sqlalchemy import update
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.invented_runs import save_ended
from tests.dashboard.pages import html, open_page

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, RunStatus
from quantwatch.store import checks, silences, triggers
from quantwatch.store.queue import NewRun
from quantwatch.store.session import open_database
from quantwatch.store.tables import RunRow
from quantwatch_dashboard.views import overview

CONFIG = CheckConfig.model_validate(
    {
        "reference": {"model": "m"},
        "candidates": [{"name": "int8", "model": "m"}],
        "suite": "core-v1:demo",
    }
)


def queue(url: str, check: str) -> str:
    """Queue a run, as a press on "Run now" does."""
    database = open_database(url)
    try:
        wanted = NewRun.of(check, CONFIG, "/x", slot_key="")
        return triggers.trigger(database, wanted, actor="ann", key="k" * 12).run_id
    finally:
        database.close()


def test_filters_are_in_the_address(demo_url: str) -> None:
    """Catches a filtered list that a colleague opens unfiltered."""
    page = open_page("overview", q="chat", sort="name")

    assert page.text_input[0].value == "chat"
    assert ">chat-int8<" in html(page)
    assert "check?check=demo" not in html(page).split("Newest runs")[0]
    page.text_input[0].set_value("").run()
    assert "q" not in page.query_params
    assert page.query_params["sort"] == "name"
    page.selectbox(key="filter-sort").select("worst").run()
    assert not page.query_params


@pytest.mark.parametrize(
    "query",
    [
        pytest.param({"verdict": "<script>", "state": "x", "sort": "'", "tag": "x"}, id="unknown"),
        pytest.param({"page": "999999"}, id="page beyond the last"),
        pytest.param({"page": "-1"}, id="no page"),
        pytest.param({"page": "9" * 5_000}, id="a number that is no page"),
    ],
)
def test_a_mistyped_address_shows_everything(demo_url: str, query: dict[str, str]) -> None:
    """Catches an exception, or an empty list, for an address that was cut."""
    shown = html(open_page("overview", **query))
    assert ">demo<" in shown
    assert ">chat-int8<" in shown


def test_nothing_fits(demo_url: str) -> None:
    """Catches an empty table that looks as if there were no checks."""
    shown = html(open_page("overview", q="no such check"))
    assert "No check fits" in shown
    assert "There are 2 checks" in shown


def test_many_checks_are_paged(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a page of two hundred rows, and a check that is on none of the pages."""
    monkeypatch.setattr(overview, "_PER_PAGE", 3)
    for i in range(8):
        save_ended(empty_url, Spec(check=f"c{i}", run_id=f"01JX{i:022d}"), RunStatus.FAILED, "x")
    seen = []
    for number in ("1", "2", "3"):
        shown = html(open_page("overview", page=number)).split("Newest runs")[0]
        seen += [name for i in range(8) if f">{(name := f'c{i}')}<" in shown]
    assert seen == [f"c{i}" for i in range(8)]
    assert "7–8 of 8 checks" in shown


def test_another_filter_begins_at_the_first_page(empty_url: str) -> None:
    """Catches a search whose only hit is on a page that nobody looks at."""
    for i in range(60):
        save_ended(
            empty_url, Spec(check=f"c{i:02d}", run_id=f"01JX{i:022d}"), RunStatus.FAILED, "x"
        )
    page = open_page("overview", page="3")
    assert "51–60 of 60 checks" in html(page)
    page.text_input[0].set_value("c").run()

    assert not page.exception
    assert "1–25 of 60 checks" in html(page)
    assert "page" not in page.query_params


def test_a_running_check_shows_stage_and_progress(demo_url: str) -> None:
    """Catches a check that seems idle while a worker measures it."""
    run_id = queue(demo_url, "demo")
    st.cache_resource.clear()
    waiting = html(open_page("overview"))
    database = open_database(demo_url)
    with database.writer() as session:
        going = update(RunRow).where(RunRow.id == run_id)
        session.execute(
            going.values(status="measuring", stage="int4 <b>", tokens_done=300, tokens_total=1200)
        )
    database.close()
    st.cache_resource.clear()
    measuring = html(open_page("overview"))

    assert "waits for a worker" in waiting
    assert "▶ running" in measuring
    assert "measuring: int4 &lt;b&gt;" in measuring
    assert 'aria-valuenow="25"' in measuring
    assert f"run?run={run_id}" in measuring


def test_who_knows_of_the_alerts(furnished: str) -> None:
    """Catches an alert that looks unattended although it is silenced."""
    database = open_database(furnished)
    with database.writer() as session:
        silences.add_silence(session, {"check": "demo"}, timedelta(hours=1), "ann", "known")
    checks.pause(database, "chat-int8", "ann", "holiday <script>")
    database.close()
    st.cache_resource.clear()
    shown = html(open_page("overview"))

    assert "1 critical" in shown
    assert "1 silenced" in shown
    assert "alerts?check=demo" in shown
    assert "‖ paused" in shown
    assert "Paused by ann: holiday &lt;script&gt;" in shown
    assert "in quarantine" in shown


def test_rows_lead_to_check_and_run(demo_url: str) -> None:
    """Catches a name that leads nowhere."""
    shown = html(open_page("overview"))
    assert 'href="check?check=demo"' in shown
    assert 'href="run?run=01JD0000000000000000000006"' in shown
    assert "Worse: demo since " in shown
    assert "chat-int8" in shown.split("Newest runs")[1]


def test_a_check_with_many_candidates_is_one_row(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a row as tall as the page."""
    many = tuple(Candidate(f"c{i}", 1e-2) for i in range(12))
    save_run(Spec(candidates=many, num_layers=1, num_prompts=1))
    assert "and 8 more" in html(open_page("overview"))


def test_old_runs_of_a_check_are_dated(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a verdict of last year that looks like tonight's."""
    long_ago = datetime.now(UTC) - timedelta(days=400)
    save_run(replace(Spec(num_layers=1, num_prompts=1), started_at=long_ago))
    assert "400 d ago" in html(open_page("overview"))
