"""Figures for /metrics and the list of running parts: right in whichever process is asked."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, update

from quantwatch.store import clock
from quantwatch.store.components import Component, list_components, note_gone, note_seen
from quantwatch.store.figures import LAST_TICK, count_non_finite, read_figures
from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database
from quantwatch.store.tables import AlertRow, CheckRow, DeliveryRow, MeasurementRow

SCHEDULER = Component("scheduler-1", "scheduler", "host", 7)


def test_an_empty_database_has_figures(db: Database) -> None:
    """Catches a scrape that fails before the first run."""
    found = read_figures(db, worst_layers=3)
    assert found.last_success == {}
    assert found.oldest_pending_s == 0
    assert found.last_tick is None
    assert found.db_size_bytes > 0
    assert list(found.kl) == list(found.layers) == []


def test_free_space_is_known_for_a_file_only(db: Database) -> None:
    """Catches 0 % free on a server whose disk nobody can see."""
    disk = read_figures(db).disk
    if db.engine.dialect.name == "sqlite":
        assert disk is not None
        assert 0 < disk.free < disk.total
    else:
        assert disk is None


def test_kl_of_the_newest_succeeded_run(db: Database, save: Any) -> None:
    """Catches last week's value, and a layer among the values of the model."""
    save(days=0)
    save(days=1)
    found = read_figures(db, worst_layers=1)
    readings = {(r.check, r.candidate, r.name): r.value for r in found.kl}
    assert readings["nightly", "int8", "mean"] == pytest.approx(0.01)
    assert readings["nightly", "int4", "max"] == pytest.approx(0.4)
    assert len(readings) == 8
    assert [(r.candidate, r.name) for r in found.layers] == [
        ("int8", "layers.0"),
        ("int4", "layers.0"),
    ]


def test_a_removed_check_has_no_figures(db: Database, save: Any) -> None:
    """Catches an alert on the last success of a check that nobody runs any more."""
    save()
    assert "nightly" in read_figures(db).last_success
    with db.writer() as session:
        session.execute(update(CheckRow).values(removed_at=clock.now(session)))
    found = read_figures(db)
    assert found.last_success == {}
    assert list(found.kl) == []


def test_alerts_are_counted_by_severity_and_state(db: Database, save: Any) -> None:
    """Catches inactive alerts that are counted as open."""
    save()
    with db.writer() as session:
        session.execute(update(AlertRow).values(state="firing", severity="critical"))
        check = session.query(CheckRow).one().id
        for rule, state in (("a", "firing"), ("b", "pending"), ("c", "inactive")):
            row = {"check_id": check, "candidate": "x", "rule": rule, "state": state}
            session.execute(insert(AlertRow).values(**row, severity="warning"))
    found = read_figures(db).open_alerts
    assert found["critical", "firing"] == 1
    assert found["warning", "firing"] == found["warning", "pending"] == 1
    assert ("warning", "inactive") not in found


def test_the_oldest_message_that_waits(db: Database) -> None:
    """Catches the age of a message that was delivered long ago."""
    with db.writer() as session:
        publish(session, Event("test", "a", {"type": "test"}), ["ops"])
        session.execute(update(DeliveryRow).values(state="delivered"))
        publish(session, Event("test", "b", {"type": "test"}), ["ops"])
    db.clock_shift = timedelta(minutes=20)
    assert read_figures(db).oldest_pending_s == pytest.approx(1200, abs=30)
    with db.writer() as session:
        session.execute(update(DeliveryRow).values(state="dead"))
    assert read_figures(db).oldest_pending_s == 0


def test_the_newest_look_of_any_scheduler_counts(db: Database) -> None:
    """Catches a scheduler that stands by and is taken for a dead service."""
    with db.writer() as session:
        note_seen(session, SCHEDULER, {LAST_TICK: 100.0})
        note_seen(session, Component("scheduler-2", "scheduler", "other", 8), {LAST_TICK: None})
        note_seen(session, Component("worker-1", "worker", "other", 9), {LAST_TICK: 999.0})
    assert read_figures(db).last_tick == 100


def test_a_part_is_seen_again_and_says_goodbye(db: Database) -> None:
    """Catches a row per sign of life, and parts that stay on the list for ever."""
    with db.writer() as session:
        note_seen(session, SCHEDULER, {"a": 1})
    db.clock_shift = timedelta(minutes=5)
    with db.writer() as session:
        note_seen(session, SCHEDULER, {"a": 2})
    with db.reader() as session:
        (seen,) = list_components(session)
    assert (seen.component, seen.details) == (SCHEDULER, {"a": 2})
    assert seen.age < timedelta(minutes=1)
    with db.writer() as session:
        note_gone(session, [SCHEDULER.id])
    with db.reader() as session:
        assert list_components(session) == []


def test_who_died_without_a_word_is_forgotten_after_a_day(db: Database) -> None:
    """Catches a list that grows by a row per crash."""
    with db.writer() as session:
        note_seen(session, SCHEDULER, {})
    db.clock_shift = timedelta(days=2)
    with db.writer() as session:
        note_gone(session, [])
    with db.reader() as session:
        assert list_components(session) == []


def test_values_that_are_not_finite_are_counted_by_candidate(db: Database, save: Any) -> None:
    """Catches a broken model that /metrics knows nothing of, and an SQNR of +∞ taken for one."""
    result = save()
    assert count_non_finite(db, result.run_id) == {"int8": 0, "int4": 0}
    with db.writer() as session:
        session.execute(update(MeasurementRow).values(n_nan=2, n_posinf=1))
    assert count_non_finite(db, result.run_id) == {"int8": 6, "int4": 6}
