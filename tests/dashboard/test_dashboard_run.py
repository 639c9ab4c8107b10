"""The run page: what the reader chooses, and every state that a run can be in."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import streamlit as st
from sqlalchemy import text
from streamlit.testing.v1 import AppTest
from tests.dashboard.invented import DEMO, Candidate, Spec
from tests.dashboard.invented_runs import make_run
from tests.dashboard.pages import boxes, html, open_page

from quantwatch.domain import Block, RunResult, RunStatus, Verdict
from quantwatch.metrics.registry import VERSION
from quantwatch.store import blocks, runs
from quantwatch.store.session import open_database
from quantwatch_dashboard.components import window
from quantwatch_dashboard.text import ANY

BASE, RUN = "01JB" + "0" * 22, "01JR" + "0" * 22
Save = Callable[[Spec], RunResult]


def open_run(**query: str) -> AppTest:
    """Open the page; it may never show an exception."""
    return open_page("run", **query)


def keys(page: AppTest) -> list[str]:
    """Return the pictures of a page by their keys."""
    return [chart.proto.id.rsplit("-", 1)[-1] for chart in page.get("plotly_chart")]


@pytest.fixture
def compared(empty_url: str, tmp_path: Path) -> str:
    """A run with a fault beside its baseline, which has none."""
    quiet = (*DEMO[:3], replace(DEMO[3], fault=None, verdict=Verdict.PASS))
    database = open_database(empty_url)
    for run_id, candidates, baseline in ((BASE, quiet, None), (RUN, DEMO, BASE)):
        result, suite, blocks = make_run(Spec(run_id=run_id, candidates=candidates))
        runs.begin_run(
            database, run_id=run_id, check="demo", config={}, started_at=result.started_at
        )
        runs.finish_run(database, replace(result, baseline_run_id=baseline), suite, blocks)
    database.close()
    return empty_url


def test_run_is_held_against_its_baseline(compared: str) -> None:
    """Catches a difference of the wrong run or sign: the planted fault is what became larger."""
    page = open_run(run=RUN, against="baseline", prompt="2")

    assert "Red: more than in the baseline run" in html(page)
    assert re.search(r"Worst: × [\d.]+ at layers\.(1[4-9]|2\d),", html(page))
    assert page.query_params["against"] in ("baseline", ["baseline"])


def test_headroom_is_in_bits_and_loses_bits(compared: str) -> None:
    """Catches headroom on the scale of errors, or whose loss is called a gain."""
    assert re.search(
        r"Worst: [\d.]+ bits at layers\.14", html(open_run(metric="headroom_bits", run=RUN))
    )
    lost = html(open_run(run=RUN, metric="headroom_bits", against="baseline"))
    assert "Red: less headroom" in lost
    assert re.search(r"Worst: [\d.]+ bits less at layers\.14", lost)


@pytest.mark.parametrize(
    ("change", "said"),
    [({}, "no baseline here"), ({"baseline_run_id": "gone"}, "no baseline here"),
     ({"baseline_mismatch": ("another suite",)}, "not comparable")],
    ids=["none", "not in this database", "not comparable"],
)  # fmt: skip
def test_missing_baseline_is_said(
    empty_url: str, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """Catches a switch that does nothing, and an exception for a baseline that was dropped."""
    result, suite, blocks = make_run(Spec(candidates=DEMO[:1]))
    database = open_database(empty_url)
    runs.begin_run(
        database, run_id=result.run_id, check="demo", config={}, started_at=result.started_at
    )
    runs.finish_run(database, replace(result, **change), suite, blocks)  # type: ignore[arg-type]
    database.close()
    box = next(b for b in open_run(against="baseline").selectbox if b.label == "Compared with")

    assert box.options == [f"nothing ({said})"]


def test_layer_is_marked_everywhere(save_run: Save) -> None:
    """Catches a layer that is chosen in one picture and not in the table beside it."""
    save_run(Spec())
    page = open_run(layer="layers.7.mlp")

    assert boxes(page)["Layer"] == "layers.7"
    assert re.findall(r'qw-chosen">(layers[^<]+)<', html(page)) == ["layers.7"]
    assert page.query_params["layer"] in ("layers.7", ["layers.7"])


@pytest.mark.parametrize("value", ["layers.99", "model", "<b>", ""], ids=repr)
def test_unknown_layer_is_none(save_run: Save, value: str) -> None:
    """Catches an exception for a layer that this model does not have."""
    save_run(Spec(candidates=DEMO[:1], num_prompts=1))

    assert boxes(open_run(layer=value))["Layer"] == ANY


def test_every_token_of_a_long_prompt_can_be_reached(save_run: Save) -> None:
    """Catches a browser that freezes on 30,000 tokens, and tokens that only the pooled picture has."""
    run = save_run(Spec(num_prompts=1, num_tokens=30_000, num_layers=2, candidates=DEMO[:1]))
    page = open_run(run=run.run_id, token="29999")

    assert "overview" in keys(page)
    assert page.number_input[0].value == 29_999
    assert page.slider[0].value == (30_000 - window.WIDTH, 29_999)
    assert "After token 29999" in html(page)
    assert "from" not in page.query_params

    moved = open_run(run=run.run_id, **{"from": "100", "to": "150", "token": "120"})
    assert moved.slider[0].value == (100, 150)
    assert f"{51 * 4:,} of {51 * 4:,} cells were measured" in html(moved)
    moved.slider[0].set_value((200, 260)).run()
    assert not moved.exception
    assert (moved.query_params["from"], moved.query_params["to"]) in (
        ("200", "260"),
        (["200"], ["260"]),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(("40", "20"), (20, 40)), (("-5", "x"), (0, 63)), (("10", "999999"), (10, 63)),
     (("9" * 400, "1"), (0, 63))],
    ids=["swapped", "no numbers", "beyond the prompt", "a book"],
)  # fmt: skip
def test_stretch_of_a_mistyped_address(
    save_run: Save, given: tuple[str, str], wanted: tuple[int, int]
) -> None:
    """Catches an exception, or an empty picture, for a stretch that is none."""
    save_run(Spec(num_prompts=1, candidates=DEMO[:1]))

    assert open_run(**{"from": given[0], "to": given[1]}).slider[0].value == wanted


def test_another_prompt_starts_afresh(save_run: Save) -> None:
    """Catches token and stretch of the last prompt that stay when another one is chosen."""
    save_run(Spec(num_prompts=2, candidates=DEMO[:1]))
    page = open_run(prompt="0", token="5", **{"from": "3", "to": "40"})
    page.selectbox(key="pick-prompt").select("1").run()

    assert not page.exception
    assert page.slider[0].value == (0, 63)
    assert "from" not in page.query_params


def test_chosen_token_is_named_with_both_models(save_run: Save) -> None:
    """Catches a token view of another token, without probabilities or without moved ranks."""
    save_run(Spec())
    shown = html(open_run(token="7", prompt="1", candidate="int4-g64"))

    assert "After token 7 " in shown
    assert all(f">{name}<" in shown for name in ("probability ≤", "difference", "rank"))
    assert re.search(r"[▲▼]\d", shown)


def test_births_are_told_for_each_prompt(save_run: Save) -> None:
    """Catches NaN that is counted but not located, or blamed on the layers that inherit it."""
    bad = Candidate("nan", 8e-3, Verdict.REGRESSION, nan_layer=9)
    run = save_run(Spec(candidates=(DEMO[0], bad), num_prompts=3))
    page = open_run(run=run.run_id)
    shown = html(page)

    assert "Where values stop being finite" in shown
    assert "every value is finite" in shown
    assert shown.count(">layers.9.attention<") == 3
    assert "births" in keys(page)
    assert "candidate=nan&amp;layer=layers.9" in shown


def test_a_closed_profile_reads_nothing(save_run: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the matrices of all candidates that are read on each redraw for a closed picture."""
    read: list[str] = []
    whole = blocks.get_column

    def noted(*given: Any) -> Block | None:
        read.append(given[2])
        return whole(*given)

    monkeypatch.setattr(blocks, "get_column", noted)
    run = save_run(Spec())
    page = open_run(run=run.run_id, metric="rel_error", tokens="every")
    assert "profile" not in keys(page)
    assert read == []
    page.session_state["profile-opened"] = True
    page.run()
    assert "profile" in keys(page)
    assert sorted(read) == sorted(c.name for c in run.candidates)


def test_finite_run_has_no_birth_map(save_run: Save) -> None:
    """Catches an empty section about NaN in every good run."""
    save_run(Spec(candidates=DEMO[:1]))

    assert "Where values stop being finite" not in html(open_run())


def test_headline_has_interval_and_floor(save_run: Save) -> None:
    """Catches a mean that is read as if it were exact."""
    save_run(Spec())
    shown = html(open_run())
    tiles = shown[shown.index("qw-tiles") : shown.index("Candidates side by side")]

    assert re.search(r"95 %: 0\.\d+ … 0\.\d+", tiles)
    assert "noise floor 3.00e−9" in tiles
    assert "Lower is better, best is 0." in tiles


@pytest.fixture
def live(empty_url: str) -> Iterator[str]:
    """A run that a worker measures."""
    database = open_database(empty_url)
    runs.begin_run(database, run_id=RUN, check="demo", config={}, started_at=datetime.now(UTC))
    runs.advance_run(database, RUN, RunStatus.MEASURING)
    with database.writer() as session:
        session.execute(
            text("UPDATE run SET stage = 'int8 <b>', tokens_done = 30, tokens_total = 120")
        )
    yield empty_url
    database.close()


def test_run_under_way_shows_its_progress(live: str) -> None:
    """Catches a page that says that a run which still goes on has no reason or no alerts."""
    shown = html(open_run(run=RUN))

    assert "30 of 120 tokens, 25 %" in shown
    assert "Measuring: int8 &lt;b&gt;" in shown
    assert "heartbeat" in shown
    assert "asked again every few seconds" in shown
    assert "No rule is breached" not in shown
    assert "no reason was recorded" not in shown


def test_silent_worker_is_told(live: str) -> None:
    """Catches a bar that stands still without a word, since its worker is gone."""
    database = open_database(live)
    with database.writer() as session:
        session.execute(text("UPDATE run SET heartbeat_at = '2026-11-01 00:00:00.000000'"))
    database.close()

    assert "the worker is silent" in html(open_run(run=RUN))


def test_failed_run_shows_every_attempt_as_text(
    end_run: Callable[..., None], empty_url: str
) -> None:
    """Catches a traceback that is rendered, or kept from those who have to repair it."""
    end_run(Spec(run_id=RUN), RunStatus.FAILED, "out of memory")
    database = open_database(empty_url)
    trail = (
        "Traceback:\n" + "".join(f"  line {i}\n" for i in range(9)) + "E: <script>alert(1)</script>"
    )
    with database.writer() as session:
        session.execute(
            text(
                "UPDATE run_attempt SET reason_code = 'oom', error_class = 'MemoryError', message = :m"
            ),
            {"m": trail},
        )
    database.close()
    shown = html(open_run(run=RUN))

    assert "oom · MemoryError" in shown
    assert "line 8" in shown
    assert "11 lines" in shown
    assert "<script" not in shown


def test_run_of_other_metrics_says_so(save_run: Save, empty_url: str) -> None:
    """Catches numbers of an older definition that are explained by today's."""
    run = save_run(Spec(candidates=DEMO[:1]))
    assert "version of the metrics" not in html(open_run())
    database = open_database(empty_url)
    with database.writer() as session:
        session.execute(text("UPDATE run SET metrics_version = 0"))
    database.close()
    st.cache_resource.clear()

    assert f"version 0 of the metrics, this program knows version {VERSION}" in html(
        open_run(run=run.run_id)
    )


def test_dropped_matrices_are_a_sentence(save_run: Save, empty_url: str) -> None:
    """Catches an exception on an old run of which retention left the statistics only."""
    run = save_run(Spec())
    database = open_database(empty_url)
    with database.writer() as session:
        session.execute(text("DELETE FROM block"))
    database.close()
    page = open_run(run=run.run_id)

    assert "dropped by retention" in html(page)
    assert keys(page) == ["lens", "isolated", "blame"]


def test_downloads_are_offered(save_run: Save) -> None:
    """Catches a table that can be looked at and not taken along."""
    save_run(Spec(candidates=DEMO[:1]))
    labels = {button.proto.label for button in open_run(prompt="2").get("download_button")}

    assert labels == {
        "Top tokens, CSV", "Layer table, CSV", "Worst tokens, CSV", "Matrix of prompt 2, CSV",
        "Measured tokens of all prompts, CSV", "All measurements, CSV", "Report, HTML",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (["layers.3", 2, 17], {"layer": "layers.3", "prompt": "2", "token": "17"}),
        (["layers.3", "2", "17"], {"layer": "layers.3", "prompt": "2", "token": "17"}),
        (["layers.3", "0.012", "layers.3.mlp"], {"layer": "layers.3"}),
        (["L3", "0", "layers.3"], {"layer": "layers.3"}),
        (
            {"0": "layers.3", "1": 2, "2": 17},
            {"layer": "layers.3", "prompt": "2", "token": "17"},
        ),
        ([], {}),
        (None, {}),
        ([None, None, None], {}),
    ],
    ids=[
        "cell",
        "cell as text",
        "layer chart",
        "layer chart at 0",
        "as an object",
        "nothing",
        "none",
        "gap",
    ],
)
def test_click_goes_into_the_address(data: object, wanted: dict[str, str]) -> None:
    """Catches a click that is lost, and one on a gap that raises."""
    script = (
        "import streamlit as st\nfrom quantwatch_dashboard.components import picture\n"
        f"st.session_state['x'] = {{'selection': {{'points': [{{'customdata': {data!r}}}]}}}}\n"
        "picture._chosen('x')()\n"
    )
    page = AppTest.from_string(script).run()

    assert not page.exception
    found = {k: v[0] if isinstance(v, list) else v for k, v in dict(page.query_params).items()}
    assert found == wanted


def test_links_of_tables_open_this_page(save_run: Save) -> None:
    """Catches a link whose address does not restore what it names."""
    save_run(Spec())
    shown = html(open_run())
    worst = re.findall(r'href="run\?([^"]+token=[^"]+)"', shown)

    assert len(worst) == 20
    assert all(
        set(parse_qs(q.replace("&amp;", "&"))) == {"run", "candidate", "prompt", "token"}
        for q in worst
    )
