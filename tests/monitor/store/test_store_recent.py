"""The copied headlines and the streak, kept by whatever ends a run."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from tests.dashboard.invented import START, Candidate, Spec
from tests.dashboard.invented_runs import save, save_ended

from quantwatch.domain import RunStatus, Verdict
from quantwatch.store.baselines import pin
from quantwatch.store.overview import check_states
from quantwatch.store.recent import KEPT
from quantwatch.store.session import open_database
from quantwatch.store.states import CheckState
from quantwatch.store.tables import RunRow

Night = Callable[[int, Verdict], None]


@pytest.fixture
def night(database_url: str, tmp_path: Path) -> Night:
    """Write the succeeded run of one night, in whatever order nights are given."""

    def write(number: int, verdict: Verdict) -> None:
        save(database_url, spec(number, verdict), tmp_path)

    return write


def spec(number: int, verdict: Verdict = Verdict.PASS) -> Spec:
    candidate = Candidate("a", 1e-2, verdict)
    at = START + timedelta(days=number)
    return Spec("c", f"r{number:03}", (candidate,), at, num_layers=1, num_prompts=1, num_tokens=12)


def state(database_url: str) -> CheckState:
    database = open_database(database_url, read_only=True)
    try:
        return check_states(database)[0]
    finally:
        database.close()


@pytest.mark.parametrize(
    ("nights", "since"),
    [
        pytest.param([(1, "pass")], 1, id="first run"),
        pytest.param([(1, "pass"), (2, "pass")], 1, id="as before"),
        pytest.param([(1, "pass"), (2, "regression"), (3, "regression")], 2, id="worse since"),
        pytest.param([(1, "warn"), (2, "pass"), (3, "warn")], 3, id="again"),
        pytest.param([(1, "pass"), (3, "pass"), (2, "warn")], 3, id="imported between"),
        pytest.param([(2, "pass"), (3, "pass"), (1, "pass")], 1, id="imported before"),
    ],
)
def test_since_is_the_start_of_the_streak(
    database_url: str, night: Night, nights: list[tuple[int, str]], since: int
) -> None:
    """Catches an age of the newest run where the age of the trouble is meant."""
    for number, verdict in nights:
        night(number, Verdict(verdict))
    assert state(database_url).since == START + timedelta(days=since)


def test_a_run_without_results_is_a_gap(database_url: str, night: Night) -> None:
    """Catches a failed night that is not on the sparkline, or a cancelled one that is."""
    night(1, Verdict.PASS)
    save_ended(database_url, spec(2), RunStatus.FAILED, "no memory")
    save_ended(database_url, spec(3), RunStatus.CANCELLED, "Ctrl-C")
    found = state(database_url)

    assert [(run.run_id, len(run.headlines)) for run in found.recent] == [("r001", 1), ("r002", 0)]
    assert found.since == START + timedelta(days=1)
    assert found.newest is not None
    assert found.newest.status is RunStatus.CANCELLED


def test_a_candidate_that_was_not_measured_has_no_value(database_url: str, tmp_path: Path) -> None:
    """Catches a candidate that failed to load and looks like a good one, or is not there."""
    candidates = (Candidate("a", 1e-2, failure="no such file"), Candidate("b", 1e-2))
    save(database_url, replace(spec(1), candidates=candidates), tmp_path)
    first, second = state(database_url).recent[0].headlines

    assert (first.candidate, first.value, first.kind) == ("a", None, "missing")
    assert (second.kind, second.verdict) == ("finite", Verdict.PASS)


def test_only_the_newest_stay(database_url: str, night: Night) -> None:
    """Catches a table that grows for ever, and failed nights that push out what was measured."""
    for number in range(10, 11 + KEPT):
        save_ended(database_url, spec(number), RunStatus.FAILED, "down")
    night(99, Verdict.PASS)
    night(1, Verdict.PASS)
    database = open_database(database_url)
    with database.writer() as session:
        kept = session.scalars(text("SELECT run_id FROM recent_point ORDER BY run_id")).all()
        session.execute(text("DELETE FROM latest_run"))
        session.execute(text("DELETE FROM run WHERE id = 'r099'"))
        left = session.scalar(text("SELECT count(*) FROM recent_point"))
    database.close()

    assert kept == ["r001", *(f"r{number:03}" for number in range(11, 11 + KEPT)), "r099"]
    assert left == KEPT + 1, "retention deletes a run, and its points go with it"


def test_what_lies_before_the_newest_results_goes(database_url: str, night: Night) -> None:
    """Catches an old failure, or an old result, that stays for ever."""
    save_ended(database_url, spec(0), RunStatus.FAILED, "down")
    for number in range(1, 2 + KEPT):
        night(number, Verdict.PASS)
        save_ended(
            database_url, spec(100 + number), RunStatus.FAILED, "down"
        ) if number == 5 else None
    assert [run.run_id for run in state(database_url).recent] == [
        *(f"r{number:03}" for number in range(2, 2 + KEPT)),
        "r105",
    ]


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        pytest.param({}, (), id="the same"),
        pytest.param({"metrics_version": 99}, ("metrics version",), id="metrics"),
        pytest.param({"capture_sha": "0" * 64}, ("capture settings",), id="capture"),
        pytest.param(
            {"suite_id": None, "num_prompts": 7}, ("suite", "number of prompts"), id="suite"
        ),
        pytest.param({"reference_variant_id": None}, ("reference",), id="reference"),
    ],
)
def test_a_baseline_of_something_else_is_told(
    database_url: str, night: Night, changed: dict[str, Any], differs: tuple[str, ...]
) -> None:
    """Catches a run held against one that measured other prompts, in another way."""
    night(1, Verdict.PASS)
    night(2, Verdict.PASS)
    database = open_database(database_url)
    pin(database, "c", "r001", actor="ann")
    if changed:
        with database.writer() as session:
            session.execute(update(RunRow).where(RunRow.id == "r001").values(**changed))
    database.close()
    found = state(database_url)
    assert found.baseline_run_id == "r001"
    assert found.differs == differs
