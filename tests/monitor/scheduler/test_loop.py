"""The scheduler as it runs in a service: threads, the alarm, start and stop."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from apscheduler.jobstores.memory import MemoryJobStore

from quantwatch.errors import StoreError
from quantwatch.scheduler import Scheduler, loop
from quantwatch.store import components, schedules
from quantwatch.store.session import Database


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.05)


def threads() -> set[str]:
    return {
        t.name for t in threading.enumerate() if t.name == "scheduler-lease" or "APSch" in t.name
    }


def test_it_wakes_by_itself(place: Any, db: Database) -> None:
    """Catches a scheduler that sleeps its thirty seconds whatever is due, and threads that stay."""
    db.clock_shift = timedelta()
    place.apply(busy={"every": "1s"})
    scheduler = Scheduler(db)
    scheduler.start()
    try:
        wait_until(lambda: len(place.slots("busy")) >= 3)
        assert scheduler.is_leader
        assert (scheduler.is_alive, scheduler.failure) == (True, None)
        with db.reader() as session:
            assert [seen.component.id for seen in components.list_components(session)] == [
                scheduler.id
            ]
    finally:
        scheduler.stop()
    assert (scheduler.is_alive, scheduler.failure) == (False, None)
    slots = [datetime.fromisoformat(slot) for slot, _ in place.slots("busy")]
    assert {after - before for before, after in pairwise(slots)} == {timedelta(seconds=1)}
    assert place.slots("busy")[0][1] == "queued"
    assert threads() == set()
    with db.reader() as session:
        assert components.list_components(session) == []
    other = Scheduler(db)
    other.tick()
    assert other.is_leader


def test_the_alarm_knows_one_job_and_nothing_is_pickled(sqlite_place: Any) -> None:
    """B07, B08: jobs in a database, a job per check, or a second alarm in one process."""
    scheduler = Scheduler(sqlite_place.db)
    scheduler.start()
    try:
        alarm = scheduler._alarm
        assert alarm is not None
        assert [job.id for job in alarm.get_jobs()] == ["wake"]
        assert type(alarm._jobstores["default"]) is MemoryJobStore
        assert str(alarm.timezone) == "UTC"
        with pytest.raises(RuntimeError, match="started already"):
            scheduler.start()
    finally:
        scheduler.stop()


def test_an_alarm_that_was_set_back_is_rung(sqlite_place: Any) -> None:
    """K16, B04: the host's clock goes back by two hours, and nothing would wake for two hours."""
    place, seconds = sqlite_place, [0.0]
    scheduler = Scheduler(place.db, monotonic=lambda: seconds[0])
    place.apply(nightly={"cron": "0 13 * * *"})
    scheduler.start()
    try:
        wait_until(lambda: place.schedule().next_slot_at is not None)
        wait_until(lambda: not scheduler._ticking.locked())
        place.set_clock(place.start + timedelta(hours=1))
        alarm = scheduler._alarm
        assert alarm is not None
        alarm.modify_job("wake", next_run_time=datetime.now(UTC) + timedelta(hours=2))
        scheduler.keep_alive()
        assert place.slots() == []
        seconds[0] = 45.0
        scheduler.keep_alive()
        wait_until(lambda: len(place.slots()) == 1)
    finally:
        scheduler.stop()


def test_a_database_that_is_away_for_a_while(
    sqlite_place: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Catches a scheduler that dies with its database instead of trying again."""
    place = sqlite_place
    place.apply(nightly={"cron": "0 13 * * *"})
    place.set_clock(place.start + timedelta(hours=1))
    due, calls = schedules.due, threading.Semaphore(0)

    def away(*_: object) -> list[int]:
        calls.release()
        raise StoreError("the database is away")

    monkeypatch.setattr(loop, "LONGEST_SLEEP_S", 0.05)
    monkeypatch.setattr(schedules, "due", away)
    scheduler = Scheduler(place.db)
    scheduler.start()
    try:
        for _ in range(3):
            assert calls.acquire(timeout=30)
        assert place.slots() == []
        monkeypatch.setattr(schedules, "due", due)
        wait_until(lambda: len(place.slots()) == 1)
    finally:
        scheduler.stop()
    assert "can't reach its database" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mistake", ["tick", "keep_alive"])
def test_a_mistake_of_ours_is_seen(
    mistake: str, sqlite_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a service that looks well while its scheduler is dead (uptime-kuma#1219)."""

    def fail(self: Scheduler) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Scheduler, mistake, fail)
    scheduler = Scheduler(sqlite_place.db)
    scheduler.start()
    try:
        wait_until(lambda: scheduler.failure is not None)
    finally:
        scheduler.stop()
    assert str(scheduler.failure) == "planted"
