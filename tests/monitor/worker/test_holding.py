"""A run is held by heartbeats, and stops when it is told to."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.domain import RunStatus
from quantwatch.errors import LeaseLostError, MonitorError, RunStoppedError, StoreError
from quantwatch.pipeline.holding import Heart, Silent, Watched
from quantwatch.store import leases
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.leases import Claim, Report
from quantwatch.store.reaper import reap
from quantwatch.store.session import Database

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
LOOK_S = 0.01


def trouble_of(heart: Heart) -> MonitorError:
    """Wait until the heart says that the run must stop."""
    for _ in range(1000):
        try:
            heart.check()
        except MonitorError as error:
            return error
        threading.Event().wait(0.01)
    raise AssertionError("nobody told it to stop")


@pytest.mark.slow
def test_heartbeats_outlive_the_lease(db: Database, queue: Queue, take: Take, peek: Peek) -> None:
    """Catches a slow run that is reclaimed while it is alive, and carried out twice (B39)."""
    run_id = queue()
    claim = take(to="preparing", lease_s=1.0)
    with Heart(db, claim, LOOK_S) as heart:
        heart.report(Report("measure", 7, 20))
        for _ in range(6):
            threading.Event().wait(0.25)
            assert reap(db) == []
            heart.check()
    assert peek(run_id, "stage", "tokens_done", "tokens_total") == ("measure", 7, 20)
    assert peek(run_id, "lease_token") == claim.token


def test_a_lost_run_stops(db: Database, queue: Queue, take: Take) -> None:
    """Catches an hour of work for a run that somebody else has."""
    queue()
    with Heart(db, take(to="preparing"), LOOK_S) as heart:
        db.clock_shift = timedelta(seconds=121)
        reap(db)
        assert isinstance(trouble_of(heart), LeaseLostError)


def test_a_cancelled_run_stops(db: Database, queue: Queue, take: Take) -> None:
    """Catches a cancellation that nobody sees before the next heartbeat (X13)."""
    run_id = queue()
    with Heart(db, take(to="preparing"), LOOK_S) as heart:
        request_cancel(db, run_id, actor="ann", reason="no")
        error = trouble_of(heart)
    assert isinstance(error, RunStoppedError)
    assert error.reason_code == "user"


def test_an_overdue_run_stops(db: Database, queue: Queue, take: Take) -> None:
    """Catches a run without a limit."""
    queue(deadline_s=600.0)
    with Heart(db, take(to="preparing", lease_s=3600.0), LOOK_S) as heart:
        db.clock_shift = timedelta(seconds=601)
        error = trouble_of(heart)
    assert isinstance(error, RunStoppedError)
    assert error.reason_code == "deadline"


class Unreachable:
    """A database that is down for so many calls."""

    def __init__(self, calls: float) -> None:
        self.left = calls
        self.over = threading.Event()

    def __call__(self, *_: object) -> leases.Standing:
        if self.left > 0:
            self.left -= 1
            raise StoreError("the database is locked")
        self.over.set()
        return leases.Standing(None, -1.0)


def test_a_short_silence_of_the_database_ends_nothing(
    db: Database, queue: Queue, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that is lost because the database was restarted (K14)."""
    queue()
    claim = take(to="preparing")
    silence = Unreachable(3)
    monkeypatch.setattr(leases, "standing", silence)
    with Heart(db, claim, LOOK_S) as heart:
        assert silence.over.wait(20)
        heart.check()


def test_a_long_silence_ends_the_run(
    db: Database, queue: Queue, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a worker that goes on although its lease must have ended by now."""
    queue()
    claim = take(to="preparing", lease_s=0.2)
    monkeypatch.setattr(leases, "standing", Unreachable(float("inf")))
    monkeypatch.setattr(leases, "heartbeat", Unreachable(float("inf")))
    with Heart(db, claim, LOOK_S) as heart:
        assert isinstance(trouble_of(heart), LeaseLostError)


def test_stages_are_states(db: Database, queue: Queue, take: Take, peek: Peek) -> None:
    """Catches a run that is shown as preparing while it measures."""
    run_id = queue()
    claim = take(to="preparing")
    with Heart(db, claim) as heart:
        watched = Watched(Silent(), heart, db, claim)
        seen = []
        watched.start("load", 0)
        seen.append(peek(run_id, "status"))
        watched.start("measure", 100)
        watched.advance(40)
        watched.advance(60)
        seen.append(peek(run_id, "status"))
        watched.start("again", 10)
        watched.finalize()
        seen.append(peek(run_id, "status"))
    assert seen == [RunStatus.PREPARING, RunStatus.MEASURING, RunStatus.FINALIZING]


def test_progress_raises_what_the_heart_knows(db: Database, queue: Queue, take: Take) -> None:
    """Catches a stop that is known and not heeded."""
    run_id = queue()
    claim = take(to="preparing")
    with Heart(db, claim, LOOK_S) as heart:
        watched = Watched(Silent(), heart, db, claim)
        watched.start("measure", 100)
        request_cancel(db, run_id, actor="ann", reason="no")
        trouble_of(heart)
        reports: tuple[Callable[[], None], ...] = (
            lambda: watched.advance(1),
            lambda: watched.start("x", 1),
            watched.finalize,
        )
        for report in reports:
            with pytest.raises(RunStoppedError):
                report()
