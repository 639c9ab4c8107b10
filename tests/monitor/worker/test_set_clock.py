"""K16: the database's clock ran two hours ahead, and was set back."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.domain import RunStatus
from quantwatch.store import leases
from quantwatch.store.attempts import Failure
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.endings import fail
from quantwatch.store.leases import Claim, Report
from quantwatch.store.reaper import reap
from quantwatch.store.session import Database

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
AHEAD = timedelta(hours=2)


def at(db: Database, seconds: float) -> None:
    db.clock_shift = timedelta(seconds=seconds)


@pytest.fixture
def ahead(db: Database, queue: Queue, take: Take) -> Claim:
    """A run that was queued and claimed two hours from now."""
    db.clock_shift = AHEAD
    queue(deadline_s=600.0)
    return take(to="measuring")


def test_a_dead_worker_is_found_in_its_time(db: Database, ahead: Claim) -> None:
    """Catches a device that nobody can use for two hours."""
    at(db, 0)
    assert reap(db) == []
    at(db, 110)
    assert reap(db) == []
    at(db, 125)
    assert [trouble.run_id for trouble in reap(db)] == [ahead.run_id]


def test_a_living_worker_keeps_its_run(db: Database, ahead: Claim) -> None:
    """Catches a clock that costs every run that is under way."""
    at(db, 0)
    assert reap(db) == []
    for seconds in (30, 100, 200):
        at(db, seconds)
        leases.heartbeat(db, ahead, Report())
        assert reap(db) == []


def test_a_deadline_comes_no_later(db: Database, ahead: Claim) -> None:
    """Catches a run that may hang for two hours more."""
    at(db, 0)
    reap(db)
    assert -602 < leases.standing(db, ahead).overdue_s < -590


def test_a_cancellation_is_heeded(db: Database, ahead: Claim) -> None:
    """Catches a run that can't be cancelled before the clock is where it was."""
    at(db, AHEAD.total_seconds())
    request_cancel(db, ahead.run_id, actor="ann", reason="no")
    at(db, 0)
    assert reap(db) == []
    at(db, 65)
    assert [trouble.status for trouble in reap(db)] == [RunStatus.CANCELLED]


def test_a_waiting_run_waits_no_longer(db: Database, queue: Queue, take: Take) -> None:
    """Catches a run that is queued two hours from now."""
    db.clock_shift = AHEAD
    run_id = queue()
    at(db, 0)
    assert reap(db) == []
    assert take().run_id == run_id


def test_a_retry_waits_as_long_as_it_should(db: Database, ahead: Claim, take: Take) -> None:
    """Catches a retry in two hours, and one at once."""
    fail(db, ahead, Failure("oom", "no memory", "MemoryError", retryable=True))
    at(db, 0)
    assert reap(db) == []
    at(db, 55)
    with pytest.raises(AssertionError):
        take()
    at(db, 65)
    assert take().run_id == ahead.run_id


def test_a_clock_that_is_nudged_changes_nothing(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches rows that are rewritten in every round because clocks are never quite equal."""
    at(db, 20)
    run_id = queue()
    take(to="preparing")
    before = peek(run_id, "lease_until", "heartbeat_at", "queued_at")
    at(db, 0)
    assert reap(db) == []
    assert peek(run_id, "lease_until", "heartbeat_at", "queued_at") == before
