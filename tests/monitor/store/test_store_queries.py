"""Queries that pages and commands ask."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import event

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch.errors import UserError
from quantwatch.store.baselines import get_pinned, pin, unpin
from quantwatch.store.runs import (
    advance_run,
    end_run,
    get_result,
    get_series,
    latest_by_check,
    list_runs,
    resolve_run_id,
)
from quantwatch.store.session import Database

Save = Callable[..., RunResult]
Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]


def test_runs_are_listed_newest_first(db: Database, save: Save, make_result: Make) -> None:
    """Catches an order by insertion, a limit that keeps the oldest, a lost candidate verdict."""
    new, old = save(days=2), save(days=0)
    other = save(days=1, check="other")
    failure = replace(make_result().candidates[0], failure="no such file", verdict=None)
    half = save(days=-1, candidates=(failure,), alerts=())
    assert [run.run_id for run in list_runs(db)] == [
        new.run_id, other.run_id, old.run_id, half.run_id,
    ]  # fmt: skip
    assert [run.run_id for run in list_runs(db, "nightly", limit=1)] == [new.run_id]
    summary = list_runs(db, limit=1)[0]
    assert summary.candidates == (("int8", Verdict.PASS), ("int4", Verdict.REGRESSION))
    assert summary.num_alerts == 1
    assert (summary.verdict, summary.suite_name) == (new.verdict, new.suite_name)
    assert (summary.started_at, summary.finished_at) == (new.started_at, new.finished_at)
    assert list_runs(db)[-1].candidates == (("int8", None),)


def test_a_run_in_progress_is_listed_without_results(
    db: Database, make_result: Make, begin: Begin
) -> None:
    """Catches a running check that looks finished, or is not seen at all."""
    result = make_result()
    begin(db, result)
    advance_run(db, result.run_id, RunStatus.MEASURING)
    summary = list_runs(db)[0]
    assert (summary.status, summary.verdict) == (RunStatus.MEASURING, None)
    assert summary.candidates == ()
    assert latest_by_check(db) == []


def test_latest_is_the_newest_ended_run(
    db: Database, save: Save, make_result: Make, begin: Begin
) -> None:
    """Catches an older run that finished later, and a Ctrl-C that hides the verdict before it."""
    new = save(days=1)
    save(days=0)
    assert [run.run_id for run in latest_by_check(db)] == [new.run_id]
    cancelled = make_result(days=2)
    begin(db, cancelled)
    end_run(db, cancelled.run_id, RunStatus.CANCELLED, "Ctrl-C")
    assert [run.run_id for run in latest_by_check(db)] == [new.run_id]
    failed = make_result(days=3)
    begin(db, failed)
    end_run(db, failed.run_id, RunStatus.FAILED, "no memory", "oom")
    (latest,) = latest_by_check(db)
    assert (latest.run_id, latest.status, latest.reason) == (
        failed.run_id, RunStatus.FAILED, "no memory",
    )  # fmt: skip
    assert latest.verdict is None


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_overview_never_scans_history(db: Database, save: Save) -> None:
    """Catches a first page that grows slower every night. EXPLAIN QUERY PLAN is SQLite's."""
    save()
    statements: list[tuple[str, object]] = []

    @event.listens_for(db.engine, "before_cursor_execute")
    def remember(_c: object, _u: object, sql: str, parameters: object, *_: object) -> None:
        statements.append((sql, parameters))

    latest_by_check(db)
    get_series(db, "nightly", "logit_kl")
    event.remove(db.engine, "before_cursor_execute", remember)
    with db.engine.connect() as connection:
        plans = [
            row[3]
            for sql, parameters in statements
            if sql.startswith("SELECT")
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)  # type: ignore[arg-type]
        ]
    assert plans
    assert not [
        plan
        for plan in plans
        for table in ("run", "run_candidate", "measurement")
        if plan == f"SCAN {table}"
    ]


def test_a_series_runs_oldest_first(db: Database, save: Save, make_result: Make) -> None:
    """Catches a chart drawn backwards, a lost candidate, a NaN that disappears."""
    first, second = save(days=0), save(days=1)
    row = make_result().candidates[0].measurements[0]
    rows = {
        "nan": replace(row, mean=math.nan),
        "posinf": replace(row, mean=None, n=0, n_posinf=8),
        "missing": replace(row, mean=None, n=0),
    }
    broken = [
        replace(make_result().candidates[0], name=name, measurements=(row,))
        for name, row in rows.items()
    ]
    broken.append(replace(broken[0], name="failed", measurements=(), failure="?", verdict=None))
    third = save(days=2, candidates=tuple(broken), alerts=())
    points = get_series(db, "nightly", "logit_kl")
    assert [(p.run_id, p.candidate, p.value, p.kind) for p in points] == [
        (first.run_id, "int8", 0.01, "finite"),
        (first.run_id, "int4", 0.2, "finite"),
        (second.run_id, "int8", 0.01, "finite"),
        (second.run_id, "int4", 0.2, "finite"),
        (third.run_id, "nan", None, "nan"),
        (third.run_id, "posinf", None, "posinf"),
        (third.run_id, "missing", None, "missing"),
        (third.run_id, "failed", None, "missing"),
    ]
    assert points[0].verdict is Verdict.PASS
    assert points[-1].started_at == third.started_at


def test_a_series_is_of_one_check_scope_and_statistic(db: Database, save: Save) -> None:
    """Catches a layer's value on the model's chart, and a limit that keeps the oldest runs."""
    save(days=0)
    last = save(days=1)
    save(days=2, check="other")
    points = get_series(db, "nightly", "lens_kl", "layers.0", "max", limit=1)
    assert [(p.run_id, p.value) for p in points] == [(last.run_id, 0.02), (last.run_id, 0.4)]
    assert get_series(db, "nightly", "lens_kl", "layers.9") == []
    assert get_series(db, "unknown", "lens_kl", "layers.0") == []
    with pytest.raises(UserError, match=r"p42.*mean, std"):
        get_series(db, "nightly", "lens_kl", statistic="p42")


def test_a_run_has_short_names(db: Database, save: Save, make_result: Make) -> None:
    """Catches a prefix that silently takes the first of several runs."""
    candidates = make_result().candidates
    for run_id, days in (("01AAAA", 0), ("01AAAB", 1), ("02_%", 2)):
        save(days=days, run_id=run_id, candidates=candidates)
    save(days=0.5, run_id="03", check="other")
    assert resolve_run_id(db, "01AAAA") == "01AAAA"
    assert resolve_run_id(db, "03") == "03"
    assert resolve_run_id(db, "01aaaa") == "01AAAA"
    assert resolve_run_id(db, "02") == "02_%"
    assert resolve_run_id(db, "latest") == "02_%"
    assert resolve_run_id(db, "other") == "03"
    with pytest.raises(UserError, match="01AAAB, 01AAAA"):
        resolve_run_id(db, "01AA")
    with pytest.raises(UserError, match=r"no run or check '__'.*02_%.*nightly, other"):
        resolve_run_id(db, "__")
    with pytest.raises(UserError, match="no run or check ''"):
        resolve_run_id(db, "")


def test_an_empty_database_says_how_to_fill_it(db: Database) -> None:
    """Catches an error that names nothing to do."""
    with pytest.raises(UserError, match="check run NAME"):
        resolve_run_id(db, "latest")
    with pytest.raises(UserError, match="no run 01"):
        get_result(db, "01")
    assert list_runs(db) == latest_by_check(db) == []


def test_pins(db: Database, save: Save, make_result: Make, begin: Begin) -> None:
    """Catches a baseline of another check, or of a run without results."""
    first, second = save(days=0), save(days=1)
    assert get_pinned(db, "nightly") is None
    pin(db, "nightly", first.run_id)
    pin(db, "nightly", second.run_id)
    assert get_pinned(db, "nightly") == second.run_id
    running = make_result(days=2)
    begin(db, running)
    for check, run_id, words in (
        ("other", first.run_id, "is of check nightly"),
        ("nightly", running.run_id, "is preparing"),
        ("nightly", "none", "no run none"),
    ):
        with pytest.raises(UserError, match=words):
            pin(db, check, run_id)
    assert get_pinned(db, "nightly") == second.run_id
    unpin(db, "nightly")
    assert get_pinned(db, "nightly") is None
    with pytest.raises(UserError, match="no pinned baseline"):
        unpin(db, "nightly")
