"""The page of a check in every state: trend, candidates, runs, and what can be done."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.pages import AsPerson, boxes, html, open_page, press
from tests.dashboard.test_dashboard_overview import queue

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch.store import audit, baselines
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import ScheduleRow
from quantwatch_dashboard.roles import Role

RUN = "01JD0000000000000000000006"
SMALL: dict[str, Any] = {"num_layers": 1, "num_prompts": 1}


@pytest.fixture(autouse=True)
def _operator(as_person: AsPerson) -> None:
    as_person(Role.OPERATOR)


def test_a_regression_in_words_numbers_and_pictures(demo_url: str) -> None:
    """Catches a page that does not say at a glance what is worse, since when, and than what."""
    page = open_page("check", check="demo")
    shown = html(page)

    assert "int8-fault: layers.14.mlp.down_proj" in shown
    assert "qw-tone-regression" in shown
    assert len(page.get("plotly_chart")) == 2
    assert "Candidates side by side" in shown
    assert "1–7 of 7 runs" in shown
    assert boxes(page)["Candidate"] == "int8-fault"
    assert "In the run where it began, nothing changed that is recorded" in shown
    assert f'href="run?run={RUN}"' in shown


def test_without_a_name_it_is_the_worst_check(demo_url: str) -> None:
    """Catches a menu entry that leads to an empty page."""
    assert "<h1>demo</h1>" in html(open_page("check"))


def test_address_restores_the_trend(demo_url: str) -> None:
    """Catches a link in a message that opens another statistic."""
    wanted = {
        "metric": "lens_kl", "place": "layers.14", "statistic": "p99", "candidate": "int4-g64",
        "range": "30", "alone": "1", "runs": "with a change",
    }  # fmt: skip
    page = open_page("check", check="demo", **wanted)

    assert boxes(page) | {
        "Metric": "lens_kl", "Place": "layers.14", "Statistic": "p99", "Candidate": "int4-g64",
        "Range": "30", "Show": "with a change",
    } == boxes(page)  # fmt: skip
    assert page.toggle[0].value
    assert {key: page.query_params[key] for key in wanted} == wanted
    assert "Per-layer KL" in html(page)


def test_a_mistyped_address_shows_the_headline(demo_url: str) -> None:
    """Catches an exception for an address that was cut."""
    page = open_page(
        "check", check="demo", metric="<b>", place="layers.99", statistic="p98", candidate="x",
        range="1e9", page="x", pin="y",
    )  # fmt: skip
    assert boxes(page)["Metric"] == "logit_kl"
    assert len(page.get("plotly_chart")) == 2


def test_a_check_of_failed_runs_only(end_run: Callable[..., None]) -> None:
    """Catches a monitor's failure that looks like a verdict, and a trend of nothing."""
    end_run(Spec(), RunStatus.FAILED, "disk full <b>")
    page = open_page("check", check="demo")
    shown = html(page)

    assert "No run has succeeded yet" in shown
    assert "Nothing was measured yet" in shown
    assert "disk full &lt;b&gt;" in shown
    assert "qw-tone-regression" not in shown
    assert not page.get("plotly_chart")


def test_one_run_is_enough(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a trend that needs two points, and an axis of no width."""
    save_run(Spec(**SMALL, candidates=(Candidate("only", 1e-2),)))
    page = open_page("check", check="demo")

    assert len(page.get("plotly_chart")) == 2
    assert "1–1 of 1 runs" in html(page)
    assert "nothing to compare it with" in html(page)
    assert not page.toggle


def test_the_last_layer_of_a_deep_model(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a picker that assumes 30 layers."""
    save_run(Spec(num_layers=126, num_prompts=1, candidates=(Candidate("a", 1e-2),)))
    page = open_page("check", metric="lens_kl", place="layers.125")
    assert boxes(page)["Place"] == "layers.125"


def test_candidates_that_are_not_finite_or_not_measured(
    save_run: Callable[[Spec], RunResult],
) -> None:
    """Catches a logarithm of nothing, and a candidate that is silently left out."""
    broken = Candidate("broken", 0.0, None, failure="weights are corrupt")
    nan = Candidate("nan", math.nan, Verdict.REGRESSION, nan_layer=0)
    save_run(Spec(**SMALL, candidates=(Candidate("exact", 0.0), broken, nan)))
    shown = html(open_page("check", check="demo"))

    assert shown.count("Not measured") >= 1
    assert "could not be loaded" in shown
    for name in ("exact", "broken", "nan"):
        assert f">{name}<" in shown
        assert not open_page("check", check="demo", candidate=name).exception


def test_a_run_under_way_is_on_the_page(demo_url: str) -> None:
    """Catches a page that shows last night's results while a run replaces them."""
    run_id = queue(demo_url, "demo")
    st.cache_resource.clear()
    shown = html(open_page("check", check="demo"))
    assert f"run?run={run_id}" in shown
    assert "waits for a worker" in shown


def test_schedule_and_next_runs(demo_url: str) -> None:
    """Catches a schedule that can't be read any more, or has no next run."""
    database = open_database(demo_url)
    with database.writer() as session:
        names = {check: i for i, check in enumerate(("chat-int8", "demo"), 1)}
        for settings, check_id in (({"every": "6h", "zone": "Mars/X"}, 1),
                                   ({"cron": "0 2 * * *", "zone": "UTC"}, 2)):  # fmt: skip
            session.add(
                ScheduleRow(
                    check_id=check_id, settings=settings, settings_sha="x", anchor_at=Spec().started_at,
                    look_at=Spec().started_at,
                )
            )  # fmt: skip
    database.close()
    shown = {name: html(open_page("check", check=name)) for name in names}

    assert sum("0 2 * * * UTC" in each for each in shown.values()) == 1
    assert sum("not planned yet" in each for each in shown.values()) == 1


def test_pausing_asks_for_a_reason_and_resuming_does_not(furnished: str, db: Database) -> None:
    """Catches an action that is not carried out, not audited, or contradicts itself afterwards."""
    page = press(open_page("check", check="demo"), "Pause …")
    page.text_input(key="words-pause-demo").set_value("holiday <b>")
    press(page, "Pause")
    assert "Paused just now" in html(page)
    assert "holiday &lt;b&gt;" in html(page)
    press(page, "Resume")

    assert "It runs again from its next slot on." in html(page)
    assert "slots are skipped" not in html(page)
    assert [entry.action for entry in audit.list_entries(db)][:2] == ["resumed", "paused"]


def test_run_now_queues_one_run(furnished: str) -> None:
    """Catches a button that starts a run per click."""
    page = press(open_page("check", check="demo"), "Run now")
    said = re.search(r"Run (01\w{24}) waits for a worker", html(page))
    assert said is not None
    press(page, "Run now")
    assert f"Run {said[1]} waits" in html(page)


def test_pinning_and_unpinning_the_baseline(furnished: str, db: Database) -> None:
    """Catches a baseline that is not the run that was chosen."""
    page = open_page("check", check="demo")
    chosen = str(page.selectbox(key="filter-pin").value)
    assert chosen != RUN, "a regression must not be offered first"
    press(page, "Pin this run")
    assert baselines.get_pinned(db, "demo") == chosen
    assert f"Later runs are compared with …{chosen[-8:]}" in html(page)
    press(page, "Unpin the baseline …")
    press(page, "Unpin the baseline")
    assert baselines.get_pinned(db, "demo") is None


def test_a_viewer_sees_what_is_not_allowed(furnished: str, as_person: AsPerson) -> None:
    """Catches a button that fails only after it was pressed."""
    as_person(Role.VIEWER)
    page = open_page("check", check="demo")
    labels = ("Run now", "Pause", "Pin this run")
    found = [button for button in page.button if button.label in labels]

    assert {button.label for button in found} == set(labels)
    assert all(button.disabled for button in found)


def test_a_check_in_quarantine_is_released_by_an_admin(furnished: str, as_person: AsPerson) -> None:
    """Catches a check that never runs again."""
    as_person(Role.ADMIN)
    page = open_page("check", check="poisonous")
    assert "in quarantine" in html(page)
    press(press(page, "End quarantine …"), "End quarantine")
    assert "in quarantine" not in html(page)


def test_another_check_by_the_picker(demo_url: str) -> None:
    """Catches a picker whose choice is lost."""
    page = open_page("check", check="demo", metric="lens_kl")
    page.selectbox(key="pick-check").select("chat-int8").run()

    assert not page.exception
    assert "<h1>chat-int8</h1>" in html(page)
    assert page.query_params["check"] == "chat-int8"


@pytest.mark.parametrize("check", ["compare", "demo"])
def test_what_nobody_could_run_says_so_beforehand(
    save_run: Callable[[Spec], RunResult],
    as_person: AsPerson,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: str,
) -> None:
    """Catches a button that looks as if it worked, and explains itself after the click."""
    monkeypatch.chdir(tmp_path)
    as_person(Role.ADMIN)
    save_run(Spec(check=check))
    page = open_page("check", check=check)
    [button] = [button for button in page.button if button.label == "Run now"]

    assert button.disabled
    assert "knows no quantwatch.toml" in button.help
    assert ("may be of other models" in html(page)) is (check == "compare")
