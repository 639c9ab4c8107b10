"""Runs on request: one key, one run."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import delete, update

from quantwatch.config.schema import CheckConfig
from quantwatch.errors import UserError
from quantwatch.store import audit, clock
from quantwatch.store.queue import NewRun, device_of
from quantwatch.store.runs import list_runs
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, TriggerRow
from quantwatch.store.triggers import Triggered, check_key, trigger

Peek = Callable[..., Any]
KEY = "press-0001"
WANTED = NewRun(check="nightly", slot_key="", config={"threads": 1}, base_dir="/etc/quantwatch")


def requested(db: Database) -> list[tuple[str, str, Any]]:
    """Return who asked for which run, from the audit log, the newest first."""
    entries = audit.list_entries(db)
    assert {entry.action for entry in entries} <= {"requested"}
    return [(entry.actor, entry.subject, entry.after) for entry in entries]


def test_without_a_key_every_press_counts(db: Database, peek: Peek) -> None:
    """Catches a second run that is swallowed."""
    first = trigger(db, WANTED, actor="ann")
    second = trigger(db, WANTED, actor="ann")

    assert first.is_new
    assert second.is_new
    assert len(list_runs(db)) == 2
    assert [run for _, run, _ in requested(db)] == [f"run {second.run_id}", f"run {first.run_id}"]
    names = "status", "trigger", "actor", "config", "base_dir"
    assert peek(first.run_id, *names) == (
        "queued",
        "manual",
        "ann",
        {"threads": 1},
        "/etc/quantwatch",
    )


def test_pressing_twice_starts_one_run(db: Database) -> None:
    """Catches two runs of one press, one that nobody asked for, and a press without id (X7, F16)."""
    first = trigger(db, WANTED, actor="ann", key=KEY)
    again = trigger(db, WANTED, actor="ann", key=KEY)

    assert again == Triggered(first.run_id, is_new=False)
    assert len(list_runs(db)) == 1
    assert requested(db) == [("ann", f"run {first.run_id}", {"check": "nightly"})]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(WANTED, check="another"), id="check"),
        pytest.param(replace(WANTED, config={"threads": 2}), id="config"),
        pytest.param(replace(WANTED, base_dir="/tmp"), id="folder"),
        pytest.param(replace(WANTED, deadline_s=60.0), id="deadline"),
    ],
)
def test_a_key_is_for_one_request(db: Database, other: NewRun) -> None:
    """Catches a request that is answered with the run of another one (422)."""
    first = trigger(db, WANTED, actor="ann", key=KEY)
    with pytest.raises(UserError, match=f"another request .run {first.run_id}"):
        trigger(db, other, actor="ann", key=KEY)
    assert len(list_runs(db)) == 1


def test_a_key_belongs_to_who_used_it(db: Database) -> None:
    """Catches somebody who learns of others' runs by guessing keys."""
    mine = trigger(db, WANTED, actor="ann", key=KEY)
    theirs = trigger(db, replace(WANTED, config={}), actor="bob", key=KEY)
    assert theirs.is_new
    assert mine.run_id != theirs.run_id


@pytest.mark.parametrize("pruned", [False, True], ids=["expired", "pruned"])
def test_a_key_is_forgotten_after_a_day(db: Database, pruned: bool) -> None:
    """Catches a key that blocks its check for ever, with and without retention in between."""
    first = trigger(db, WANTED, actor="ann", key=KEY)
    db.clock_shift = timedelta(hours=23, minutes=59)
    assert not trigger(db, WANTED, actor="ann", key=KEY).is_new
    db.clock_shift = timedelta(hours=24, seconds=1)
    if pruned:
        with db.writer() as session:
            session.execute(delete(TriggerRow))

    second = trigger(db, WANTED, actor="ann", key=KEY)
    assert second.is_new
    assert first.run_id != second.run_id
    assert trigger(db, WANTED, actor="ann", key=KEY) == Triggered(second.run_id, is_new=False)


@pytest.mark.parametrize("same", [True, False], ids=["same-request", "another-request"])
def test_pressed_by_eight_at_once(db: Database, same: bool) -> None:
    """Catches the race between looking a key up and writing it."""
    together = threading.Barrier(8)

    def press(number: int) -> Triggered | None:
        check = "nightly" if same else f"check-{number}"
        together.wait()
        try:
            return trigger(db, replace(WANTED, check=check), actor="ann", key=KEY)
        except UserError:
            return None

    with ThreadPoolExecutor(8) as pool:
        pressed = list(pool.map(press, range(8)))
    found = [each for each in pressed if each is not None]
    assert [each.is_new for each in found].count(True) == 1
    assert len({each.run_id for each in found}) == 1
    assert len(found) == (8 if same else 1)
    assert len(list_runs(db)) == 1
    assert len(requested(db)) == 1


def test_a_paused_check_runs_on_request(db: Database) -> None:
    """Catches `run now` that does nothing while the schedule is paused (X7)."""
    trigger(db, WANTED, actor="ann")
    with db.writer() as session:
        session.execute(update(CheckRow).values(paused_at=clock.now(session), paused_by="ann"))
    assert trigger(db, WANTED, actor="ann", key=KEY).is_new


def test_a_check_in_quarantine_says_so(db: Database) -> None:
    """Catches a run that waits for ever without anybody knowing why."""
    trigger(db, WANTED, actor="ann")
    with db.writer() as session:
        session.execute(update(CheckRow).values(quarantined_at=clock.now(session)))
    with pytest.raises(UserError, match=r"in quarantine since .* check release nightly"):
        trigger(db, WANTED, actor="ann")
    assert len(list_runs(db)) == 1


@pytest.mark.parametrize("key", ["x" * 8, "x" * 255, "a b ~ ! 1", "  spaces"])
def test_good_keys(key: str) -> None:
    check_key(key)


@pytest.mark.parametrize(
    "key", ["", "x" * 7, "x" * 256, "tab\tinside", "line\nend-", "ümlaut-key", "nul\0nul\0"]
)
def test_bad_keys(db: Database, key: str) -> None:
    """Catches a key that a header can't carry."""
    with pytest.raises(UserError, match="8 to 255 printable ASCII"):
        trigger(db, WANTED, actor="ann", key=key)


@given(st.text(min_size=0, max_size=300))
def test_a_key_is_good_or_an_error(key: str) -> None:
    """Catches a key that raises something else."""
    good = 8 <= len(key) <= 255 and key.isascii() and key.isprintable()
    if good:
        check_key(key)
    else:
        with pytest.raises(UserError):
            check_key(key)


CHECK = {
    "reference": {"model": "a"},
    "candidates": [{"name": "b", "model": "b"}],
    "suite": "core-v1",
}


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ("cpu", "cpu", "cpu"),
        ("cpu", "cuda:1", "cuda:1"),
        ("cuda", "cpu", "cuda:0"),
        ("mps", "cpu", "mps"),
        ("cuda:1", "cuda", "cuda:0,cuda:1"),
        ("cuda", "cuda:0", "cuda:0"),
    ],
)
def test_where_a_check_measures(reference: str, candidate: str, expected: str) -> None:
    """Catches a GPU check that is queued for a CPU."""
    check = CheckConfig.model_validate(
        {
            **CHECK,
            "reference": {"model": "a", "device": reference},
            "candidates": [{"name": "b", "model": "b", "device": candidate}],
        }
    )
    assert device_of(check) == expected


def test_limits_come_from_the_schedule() -> None:
    """Catches attempts and deadline of the configuration that nobody reads."""
    schedule = {"cron": "0 2 * * *", "attempts": 5, "deadline": "30m"}
    check = CheckConfig.model_validate({**CHECK, "schedule": schedule})

    asked = NewRun.of("nightly", check, "/etc", "m:x")
    assert (asked.max_attempts, asked.deadline_s, asked.device) == (5, 1800, "cpu")
    plain = NewRun.of("nightly", CheckConfig.model_validate(CHECK), "/etc", "m:x")
    assert (plain.max_attempts, plain.deadline_s) == (3, 7200.0)
