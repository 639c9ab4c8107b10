"""What the store refuses, and what it keeps of a suite."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from quantwatch.domain import MODEL, RunResult, RunStatus, Suite, Verdict
from quantwatch.errors import StoreError
from quantwatch.store.kinds import from_kind
from quantwatch.store.runs import (
    advance_run,
    begin_run,
    end_run,
    finish_run,
    get_result,
    list_runs,
)
from quantwatch.store.session import Database, open_database
from quantwatch.store.suites import get_prompts
from quantwatch.store.types import dump_json, load_json

Save = Callable[..., RunResult]
Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]


def test_prompts_come_back(db: Database, save: Save, suite: Suite) -> None:
    """Catches NUL, half characters and pieces that PostgreSQL refuses or the text loses."""
    save()
    prompts = get_prompts(db, suite.hash)
    assert [(p.token_ids, p.pieces, p.text) for p in prompts] == [
        (p.token_ids, p.pieces, p.text) for p in suite.prompts
    ]
    assert [(p.index, p.category, p.source, p.num_tokens, p.score_start) for p in prompts] == [
        (0, "prose", "file.txt", 4, 0), (1, "prose", "file.txt", 4, 0),
    ]  # fmt: skip
    assert get_prompts(db, "unknown") == []


def test_text_is_left_out_on_demand(
    db: Database, make_result: Make, begin: Begin, suite: Suite, save: Save
) -> None:
    """Catches a prompt that must not be kept, and a suite that stays without text for ever."""
    bare = tuple(replace(prompt, pieces=(), text=None) for prompt in suite.prompts)
    result = make_result()
    begin(db, result)
    finish_run(db, result, replace(suite, prompts=bare), ())
    ids = [prompt.token_ids for prompt in suite.prompts]
    kept = get_prompts(db, suite.hash)
    assert [(p.token_ids, p.pieces, p.text) for p in kept] == [(i, None, None) for i in ids]
    save(days=1)
    kept = get_prompts(db, suite.hash)
    assert [(p.pieces, p.text) for p in kept] == [(p.pieces, p.text) for p in suite.prompts]
    result = make_result(days=2)
    begin(db, result)
    finish_run(db, result, replace(suite, prompts=bare), ())
    assert get_prompts(db, suite.hash) == kept


def test_ended_runs_never_change(db: Database, save: Save, suite: Suite) -> None:
    """Catches results that are written twice or taken back."""
    result = save()
    with pytest.raises(StoreError, match="succeeded already"):
        finish_run(db, replace(result, verdict=Verdict.PASS), suite, ())
    with pytest.raises(StoreError, match="succeeded already"):
        end_run(db, result.run_id, RunStatus.FAILED, "late")
    with pytest.raises(StoreError, match="succeeded already"):
        advance_run(db, result.run_id, RunStatus.MEASURING)
    with pytest.raises(StoreError, match="exists already"):
        begin_run(db, run_id=result.run_id, check="x", config={}, started_at=result.started_at)
    assert get_result(db, result.run_id) == result


def test_only_a_begun_run_is_finished(db: Database, make_result: Make, suite: Suite) -> None:
    """Catches results without a run."""
    with pytest.raises(StoreError, match="has not begun"):
        finish_run(db, make_result(), suite, ())
    with pytest.raises(StoreError, match="has not begun"):
        end_run(db, "none", RunStatus.FAILED, "x")
    with pytest.raises(StoreError, match="has not begun"):
        advance_run(db, "none", RunStatus.MEASURING)
    with pytest.raises(ValueError, match="not advanced to succeeded"):
        advance_run(db, "none", RunStatus.SUCCEEDED)


@pytest.mark.parametrize("status", [RunStatus.SUCCEEDED, RunStatus.MEASURING])
def test_end_run_is_for_runs_without_results(db: Database, status: RunStatus) -> None:
    """Catches a success without results."""
    with pytest.raises(ValueError, match="failed or cancelled"):
        end_run(db, "any", status, "x")


def test_naive_times_are_refused(db: Database, make_result: Make) -> None:
    """Catches times that shift by the zone of the machine (B30)."""
    naive = make_result().started_at.replace(tzinfo=None)
    with pytest.raises(StoreError, match="no time zone"):
        begin_run(db, run_id="x", check="nightly", config={}, started_at=naive)
    assert list_runs(db) == []


def test_times_keep_their_instant(db: Database, save: Save, make_result: Make) -> None:
    """Catches SQLite's wall-clock fields: 02:00−08:00 read back as 02:00 UTC (B30)."""
    west = make_result().started_at.astimezone(timezone(timedelta(hours=-8)))
    result = save(started_at=west)
    back = get_result(db, result.run_id)
    assert back.started_at == west
    assert back.started_at.utcoffset() == timedelta(0)


def test_foreign_keys_hold(db: Database, save: Save) -> None:
    """Catches rows that refer to nothing: SQLite checks only when told to."""
    save()
    with (
        pytest.raises(StoreError, match=r"(?i)foreign key"),
        db.writer() as session,
    ):
        session.execute(text("DELETE FROM scope"))


def test_a_reader_cannot_write(sqlite_file: Path, db: Database) -> None:
    """Catches a page that changes the database."""
    read_only = open_database(f"sqlite:///{sqlite_file}", read_only=True)
    with pytest.raises(StoreError, match="read-only"), read_only.writer():
        pass
    with pytest.raises(StoreError, match=r"read-?only"), read_only.reader() as session:
        session.execute(text('INSERT INTO "check" (name) VALUES (1)'))
    read_only.close()
    if db.engine.dialect.name == "postgresql":
        with pytest.raises(StoreError, match="read-only"), db.reader() as session:
            session.execute(text("INSERT INTO \"check\" (name) VALUES ('x')"))


def test_the_same_measurement_twice_is_an_error(
    db: Database, make_result: Make, begin: Begin, suite: Suite
) -> None:
    """Catches a metric that is counted twice; nothing of the run stays."""
    result = make_result()
    row = result.candidates[0].measurements[0]
    assert row.scope == MODEL
    twice = replace(result.candidates[0], measurements=(row, row))
    begin(db, result)
    with pytest.raises(StoreError, match=r"(?i)unique"):
        finish_run(db, replace(result, candidates=(twice,)), suite, ())
    assert get_result(db, result.run_id).candidates == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"verdict": None}, "verdict", id="succeeded without verdict"),
        pytest.param({"status": RunStatus.FAILED}, "verdict", id="failed with verdict"),
        pytest.param({"status": RunStatus.MEASURING, "verdict": None}, "ended", id="not ended"),
        pytest.param({"suite_hash": "other"}, "another suite", id="another suite"),
    ],
)
def test_contradictory_results_are_refused(
    db: Database,
    suite: Suite,
    make_result: Callable[..., RunResult],
    begin: Callable[[Database, RunResult], None],
    fields: dict[str, Any],
    words: str,
) -> None:
    """Catches a failed run that looks like a regression, or a passed one without a verdict."""
    result = make_result(**fields)
    begin(db, result)
    with pytest.raises(ValueError, match=words):
        finish_run(db, result, suite, ())
    assert get_result(db, result.run_id).status is RunStatus.PREPARING


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param({"a": {1, 2}}, "set", id="set"),
        pytest.param([object()], "object", id="object"),
        pytest.param({3: "x"}, "keys are strings", id="number as key"),
    ],
)
def test_json_refuses_what_would_change(value: Any, words: str) -> None:
    """Catches keys that silently become strings, and objects that become their repr."""
    with pytest.raises(TypeError, match=words):
        dump_json(value)


@pytest.mark.parametrize("value", [{"$float": "nan"}, {"$$float": 1}, {"$float": 1, "b": 2}])
def test_json_that_looks_like_a_marked_number_survives(value: Any) -> None:
    """Catches a user's own mapping that is read back as NaN."""
    assert load_json(dump_json(value)) == value


def test_unknown_kinds_are_refused() -> None:
    """Catches a kind of a newer program that is read as a number."""
    with pytest.raises(ValueError, match="none of finite, missing, nan"):
        from_kind(None, "huge")


def test_json_columns_name_what_they_refuse(db: Database, make_result: Make) -> None:
    """Catches a traceback out of a column type."""
    with pytest.raises(StoreError, match="can't be kept as JSON"):
        begin_run(
            db, run_id="x", check="c", config={"a": b"x"}, started_at=make_result().started_at
        )


def test_an_alert_whose_kind_contradicts_its_value_is_refused(
    db: Database, suite: Suite, make_result: Make, begin: Begin
) -> None:
    """Catches NaN stored as if nothing had been measured."""
    result = make_result()
    begin(db, result)
    wrong = replace(result.alerts[0], value=None)
    with pytest.raises(ValueError, match="is not finite"):
        finish_run(db, replace(result, alerts=(wrong,)), suite, ())


def test_a_number_that_must_be_finite_is_checked(
    db: Database, suite: Suite, make_result: Make, begin: Begin
) -> None:
    """Catches NaN that SQLite would keep as NULL."""
    result = make_result()
    variant = result.candidates[0].variant
    assert variant is not None
    odd = replace(result.candidates[0], variant=replace(variant, bits_per_weight=math.nan))
    begin(db, result)
    with pytest.raises(StoreError, match="nan in a column for finite numbers"):
        finish_run(db, replace(result, candidates=(odd,)), suite, ())
