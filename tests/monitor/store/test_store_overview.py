"""How all checks stand, from a database that `benchmarks/fill.py` wrote: right, and never slow."""

import importlib.util
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, create_engine, event, text

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch.store import marks, runs
from quantwatch.store.marks import run_marks
from quantwatch.store.overview import check_states, unended_runs
from quantwatch.store.queue import NewRun, skip
from quantwatch.store.reading import read_alerts, read_results
from quantwatch.store.records import RunSummary
from quantwatch.store.session import Database, open_database
from quantwatch.store.states import CheckState
from quantwatch.store.summaries import get_series, list_runs, measured_places, points_of
from quantwatch.store.upgrade import migrations_folder

FILL = Path(__file__).parents[3] / "benchmarks" / "fill.py"
CHECKS, NIGHTS = 14, 34
SIZE = ("--checks", str(CHECKS), "--nights", str(NIGHTS), "--layers", "3", "--block-nights", "1")


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def filled(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Database, Any]]:
    """A filled database, and what the script printed of it."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('filled')}/quantwatch.db"
    else:
        server, name = request.getfixturevalue("postgres_server"), f"filled_{uuid.uuid4().hex}"
        admin = create_engine(server, isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        admin.dispose()
        url = server.set(database=name).render_as_string(hide_password=False)
    command = [sys.executable, str(FILL), "--url", url, *SIZE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    database = open_database(url)
    yield database, json.loads(done.stdout)
    database.close()


@pytest.fixture
def db(filled: tuple[Database, Any]) -> Database:
    return filled[0]


@pytest.fixture
def states(db: Database) -> dict[str, CheckState]:
    return {state.check: state for state in check_states(db)}


def statements(db: Database, read: Callable[[], object]) -> list[tuple[str, Any]]:
    """Return what a read asks the database, BEGIN apart."""
    asked: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, words: str, values: Any, *_: Any) -> None:
        if words.startswith("SELECT"):
            asked.append((words, values))

    event.listen(db.engine, "before_cursor_execute", note)
    try:
        read()
    finally:
        event.remove(db.engine, "before_cursor_execute", note)
    return asked


def test_fill_writes_what_it_says(filled: tuple[Database, Any]) -> None:
    """Catches a benchmark database that is smaller than its figures are said to be for."""
    database, printed = filled
    newest = list_runs(database, limit=10_000)
    assert printed["runs"] == len(newest)
    assert len({run.check for run in newest}) == CHECKS
    with database.reader() as session:
        assert session.scalar(text("SELECT count(*) FROM measurement")) == printed["measurements"]
        assert session.scalar(text("SELECT count(*) FROM block")) > 0
        assert session.scalar(text("SELECT count(*) FROM delivery WHERE state = 'dead'")) > 0
    a_copy = newest[5 * CHECKS].run_id
    assert runs.get_result(database, a_copy).candidates[0].measurements


def test_states_agree_with_history(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a pointer, a streak or a copied headline that is not what the runs say."""
    assert len(states) == CHECKS
    for name, state in states.items():
        ended = [run for run in list_runs(db, name, limit=500) if run.status.is_ended]
        succeeded = [run for run in ended if run.status is RunStatus.SUCCEEDED]
        assert state.newest == ended[0]
        assert state.decided == succeeded[0]
        assert state.since == streak(succeeded)
        oldest = [run for run in ended if run.candidates][:30][-1]
        kept = ended[: ended.index(oldest) + 1]
        assert [run.run_id for run in state.recent] == [run.run_id for run in kept[::-1]]
        points = {(p.run_id, p.candidate): p for p in get_series(db, name, "logit_kl")}
        for run in state.recent:
            for line in run.headlines:
                point = points[run.run_id, line.candidate]
                assert (line.value, line.kind, line.se) == (point.value, point.kind, point.se)
                assert (line.verdict, run.floor) == (point.verdict, point.floor)
        assert state.baseline_run_id == succeeded[-1].run_id
        assert state.differs == ()
        for candidate, line in state.baseline.items():
            assert line.value == points[state.baseline_run_id, candidate].value


def test_all_checks_are_read_without_their_history(
    db: Database, states: dict[str, CheckState]
) -> None:
    """Catches tens of thousands of values read every few seconds for rows that nobody sees."""
    brief = {state.check: state for state in check_states(db, history=False)}
    assert list(brief) == list(states)
    for name, state in states.items():
        decided = [
            run for run in state.recent if state.decided and run.run_id == state.decided.run_id
        ]
        assert brief[name] == replace(state, recent=tuple(decided))
        assert len(decided) == 1
    some = list(states)[3:5]
    assert check_states(db, some) == tuple(states[name] for name in some)
    assert check_states(db, []) == ()


def test_a_cancelled_run_is_not_the_latest(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a check that counts as not measured since somebody cancelled a run of it."""
    for state in states.values():
        assert state.latest is not None
        ended = [run for run in list_runs(db, state.check, limit=500) if run.status.is_ended]
        says = [run for run in ended if run.status is not RunStatus.CANCELLED]
        assert state.latest == says[0]


def streak(newest_first: list[RunSummary]) -> datetime:
    verdict = newest_first[0].verdict
    count = next((i for i, run in enumerate(newest_first) if run.verdict != verdict), None)
    return newest_first[:count][-1].started_at


def test_states_tell_who_waits_and_what_fires(states: dict[str, CheckState]) -> None:
    """Catches an overview that hides a pause, a run under way, an alert, or a failed night."""
    paused = [state for state in states.values() if state.pause is not None]
    assert [state.pause.by for state in paused if state.pause] == ["lee"]
    under_way = [state.unended[0] for state in states.values() if state.unended]
    assert [(run.status, run.stage) for run in under_way] == [(RunStatus.MEASURING, "measuring")]
    assert (under_way[0].tokens_done, under_way[0].tokens_total) == (5_632, 12_288)
    firing = {name: state.alerts for name, state in states.items() if state.alerts.firing}
    assert len(firing) == 3, "a fault, a drift, and one that is not finite"
    for name in firing:
        decided = states[name].decided
        assert decided is not None
        assert decided.verdict in (Verdict.REGRESSION, Verdict.WARN)
    failed = [s for s in states.values() if s.newest and s.newest.status is RunStatus.FAILED]
    assert len(failed) == 1
    assert failed[0].recent[-1].headlines == ()
    assert all(state.timetable and state.timetable.next_slot_at for state in states.values())
    assert {tag for state in states.values() for tag in state.config["tags"]} >= {"production"}


def test_queries_do_not_grow_with_checks(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a query per check: 200 checks would take seconds."""
    one = statements(db, lambda: check_states(db, next(iter(states))))
    assert len(statements(db, lambda: check_states(db))) == len(one) <= 8


def test_marks_say_what_runs_were_made_with(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a driver that changed unseen, and a candidate without its size."""
    for name in states:
        marks = run_marks(db, name)
        assert [mark.run_id for mark in marks] == sorted(mark.run_id for mark in marks)
        measured = [mark for mark in marks if mark.verdict is not None]
        drivers = {mark.environment["gpus"][0]["driver"] for mark in measured}
        assert len(drivers) == 3
        assert all(c.bits_per_weight and c.digests for mark in measured for c in mark.candidates)
        assert measured[-1].reference == measured[0].reference


def test_skipped_slots_are_no_runs(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a check that lost its trend, and all there was to pin, by three weeks of pause."""
    name = next(iter(states))
    before = [mark.run_id for mark in run_marks(db, name)]
    with db.writer() as session:
        for number in range(3):
            slot = NewRun(name, f"s:2026-02-0{number + 1}T00:00:00Z", {}, "/")
            assert skip(session, slot, "paused") is not None
    assert [mark.run_id for mark in run_marks(db, name)] == before
    assert [mark.run_id for mark in run_marks(db, name, limit=1)] == before[-1:]


def briefly(db: Database, run: str) -> dict[str, RunResult]:
    with db.reader() as session:
        return read_results(session, [run, "no such run"], metric="logit_kl")


def test_a_run_is_read_briefly(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a short reading that is another run's, or that lacks what is told of it."""
    decided = next(s.decided for s in states.values() if s.decided and s.decided.num_alerts)
    found, whole = briefly(db, decided.run_id), runs.get_result(db, decided.run_id)
    (one,) = found.values()

    assert (one.alerts, one.config, one.check) == (whole.alerts, whole.config, whole.check)
    assert set(one.noise_floor) == {("logit_kl", "model")}
    for short, full in zip(one.candidates, whole.candidates, strict=True):
        assert short == replace(full, measurements=short.measurements)
        assert [row.metric for row in short.measurements] == ["logit_kl"]
        assert short.measurements[0] in full.measurements


READS: dict[str, Callable[[Database, str, str], object]] = {
    "overview": lambda db, _check, _run: check_states(db),
    "brief": lambda db, _check, _run: check_states(db, history=False),
    "check": lambda db, check, _run: check_states(db, check),
    "running": lambda db, _check, _run: unended_runs(db),
    "one run": lambda db, _check, run: points_of(db, run, "lens_kl", "layers.1", "p99"),
    "series": lambda db, check, _run: get_series(db, check, "lens_kl", "layers.1", "p99"),
    "marks": lambda db, check, _run: run_marks(db, check),
    "places": lambda db, _check, run: measured_places(db, run),
    "briefly": lambda db, _check, run: briefly(db, run),
    "result": lambda db, _check, run: runs.get_result(db, run),
}


@pytest.mark.parametrize("name", READS)
def test_no_read_scans_the_measurements(
    db: Database, states: dict[str, CheckState], name: str
) -> None:
    """Catches a query that is fast on a small database and reads ten million rows on a large."""
    check, state = next(iter(states.items()))
    assert state.decided is not None
    run = state.decided.run_id
    asked = statements(db, lambda: READS[name](db, check, run))
    assert asked
    for words, values in asked:
        for line in plan(db, words, values):
            assert not re.search(r"(SCAN|Seq Scan on) (measurement|noise_floor|block)\b", line), (
                f"{line}\n{words}"
            )


def plan(db: Database, words: str, values: Any) -> list[str]:
    with db.reader() as session:
        connection = session.connection()
        if connection.dialect.name == "postgresql":
            # A few pages are read faster than an index; ten million rows are not.
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            rows = connection.exec_driver_sql(f"EXPLAIN {words}", values)
            return [str(row[0]) for row in rows]
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {words}", values)
        return [str(row[3]) for row in rows]


def migration() -> ModuleType:
    path = migrations_folder() / "versions" / "20261130_recent_points.py"
    spec = importlib.util.spec_from_file_location("recent_points", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_migration_writes_what_runs_write(db: Database) -> None:
    """Catches an upgraded database whose overview differs from one that ran all the time."""
    kept = (
        "SELECT run_id, idx, check_id, candidate, verdict, value, kind, se, floor "
        "FROM recent_point ORDER BY run_id, idx",
        "SELECT check_id, verdict_since FROM latest_run ORDER BY check_id",
    )
    made = migration()
    with db.writer() as session:
        before = [session.execute(text(words)).all() for words in kept]
        session.execute(text("DELETE FROM recent_point"))
        session.execute(text("UPDATE latest_run SET verdict_since = NULL"))
        with Operations.context(MigrationContext.configure(session.connection())):
            made.op.execute(made._POINTS.format(which=made._ALL))
            made._note(made._since(made._ALL))
        after = [session.execute(text(words)).all() for words in kept]
        session.rollback()
    assert before[0]
    assert after == before


def test_the_migration_reads_each_run_a_few_times() -> None:
    """Catches a streak that is looked for anew at each run: minutes under locks for a year's runs."""
    made, steps = migration(), [0, 0]
    for at, count in enumerate((2_000, 16_000)):
        with create_engine("sqlite://").begin() as connection:
            for words in (
                "CREATE TABLE latest_run (check_id INT, succeeded_run_id TEXT, verdict_since TEXT)",
                "CREATE TABLE run (id TEXT PRIMARY KEY, check_id INT, status TEXT, verdict TEXT, "
                "started_at INT)",
                "CREATE INDEX places ON run (check_id, started_at, id)",
                f"INSERT INTO latest_run VALUES (1, '{count:09}', NULL)",
            ):
                connection.exec_driver_sql(words)
            verdicts = ["warn" if i == count // 2 else "pass" for i in range(count + 1)]
            rows = [(f"{i:09}", 1, "succeeded", verdict, i) for i, verdict in enumerate(verdicts)]
            connection.exec_driver_sql("INSERT INTO run VALUES (?, ?, ?, ?, ?)", rows)
            counted = _StepCounter(connection)
            found = connection.exec_driver_sql(made._SINCE.format(which=made._ALL)).all()
            steps[at] = counted.num_hundreds
            assert found == [(1, f"{count:09}", count // 2 + 1)]
    assert 0 < steps[1] < 12 * steps[0], f"{steps}: eight times the runs, 64 times if quadratic"


class _StepCounter:
    """Counts what SQLite executes, in hundreds of instructions: a time would be the machine's."""

    def __init__(self, connection: Connection) -> None:
        self.num_hundreds = 0
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(self._count, 100)

    def _count(self) -> int:
        self.num_hundreds += 1
        return 0


def test_skipped_slots_do_not_fill_a_list(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a list of newest runs that shows nothing but a pause, and doesn't say what it was."""
    name = next(reversed(states))
    with db.writer() as session:
        skipped = skip(session, NewRun(name, "s:2026-03-01T00:00:00Z", {}, "/"), "paused")
    every, ran = list_runs(db, name, 1), list_runs(db, name, 1, skipped=False)

    assert [run.run_id for run in every] == [skipped]
    assert every[0].reason == "the check was paused"
    assert skipped is not None
    assert runs.get_result(db, skipped).reason == "the check was paused"
    assert ran[0].status is not RunStatus.SKIPPED


def test_one_run_of_a_series(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a baseline that is not found because it is older than the series."""
    name, state = next(iter(states.items()))
    assert state.baseline_run_id is not None
    whole = get_series(db, name, "lens_kl", "layers.1", "p99")
    assert points_of(db, state.baseline_run_id, "lens_kl", "layers.1", "p99") == [
        point for point in whole if point.run_id == state.baseline_run_id
    ]
    assert points_of(db, "no such run", "logit_kl") == []


def test_places_are_those_of_the_measurements(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a place that is lost or there twice, and another order than the candidates'."""
    state = next(iter(states.values()))
    assert state.decided is not None
    run = runs.get_result(db, state.decided.run_id)
    expected = dict.fromkeys(
        (row.metric, row.scope) for candidate in run.candidates for row in candidate.measurements
    )
    asked = statements(db, lambda: measured_places(db, run.run_id))

    assert measured_places(db, run.run_id) == list(expected)
    assert len(asked) == 1
    assert "GROUP BY" in asked[0][0]


def test_alerts_are_read_alone(db: Database, states: dict[str, CheckState]) -> None:
    """Catches a list of alerts for which all that ten runs measured is read."""
    ids = [state.decided.run_id for state in states.values() if state.decided is not None]
    with db.reader() as session:
        found = read_alerts(session, ids)
        whole = read_results(session, ids)
    expected = {run_id: list(run.alerts) for run_id, run in whole.items() if run.alerts}
    assert found == expected
    assert found

    def read() -> None:
        with db.reader() as session:
            read_alerts(session, ids)

    assert len(statements(db, read)) == 1


def test_marks_of_more_variants_than_a_query_takes(
    db: Database, states: dict[str, CheckState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches "too many SQL variables" on a check whose weights are new in each run."""
    name = next(iter(states))
    before = run_marks(db, name)
    known = marks._known
    many = list(range(10_000_000, 10_070_000))
    monkeypatch.setattr(marks, "_known", lambda ids: [*known(ids), *many])

    assert run_marks(db, name) == before
    with db.reader() as session:
        text_ids = [f"{number}" for number in many]
        assert marks._candidates(session, text_ids) == {}
