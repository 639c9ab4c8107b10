"""Schedules in the database: applied, edited, paused, and never lost."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from quantwatch.errors import UserError
from quantwatch.scheduler import Scheduler
from quantwatch.store import checks, leader, schedules
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow


def tick_at(place: Any, scheduler: Scheduler, hours: float) -> None:
    place.set_clock(place.start + timedelta(hours=hours))
    scheduler.tick()


def test_a_new_schedule_begins_now(place: Any, db: Database) -> None:
    """Catches a check that is run for last night because it was written today."""
    place.apply(nightly={"cron": "0 11 * * *"})
    scheduler = Scheduler(db)
    scheduler.tick()
    assert place.slots() == []
    assert place.schedule().next_slot_at == place.start + timedelta(hours=23)
    tick_at(place, scheduler, 23)
    assert place.slots() == [("2026-03-28T11:00:00Z", "queued")]


def test_editing_keeps_what_was_done(place: Any, db: Database) -> None:
    """X6: a slot that ran is run again after an edit that keeps its instant."""
    place.apply(nightly={"cron": "0 13 * * *"})
    scheduler = Scheduler(db)
    tick_at(place, scheduler, 1)
    place.end_runs()
    place.apply(nightly={"cron": "0 13,14 * * *"})
    tick_at(place, scheduler, 1.1)
    tick_at(place, scheduler, 2)
    assert place.slots() == [("2026-03-27T13:00:00Z", "failed"), ("2026-03-27T14:00:00Z", "queued")]


def test_an_edit_between_slot_and_jitter_loses_no_night(place: Any, db: Database) -> None:
    """X6: the slot of 13:00 waits for its jitter when somebody edits the file."""
    jitter = {"jitter": "10m"}
    place.apply(nightly={"cron": "0 13 * * *", **jitter})
    scheduler = Scheduler(db)
    tick_at(place, scheduler, 1.01)
    assert place.slots() == []
    place.apply(nightly={"cron": "0 13,20 * * *", **jitter})
    tick_at(place, scheduler, 1.2)
    assert place.slots() == [("2026-03-27T13:00:00Z", "queued")]


def test_an_edit_does_not_make_up_for_the_past(place: Any, db: Database) -> None:
    """Catches a run at noon because the new schedule says 11:00."""
    place.apply(nightly={"cron": "0 2 * * *"})
    scheduler = Scheduler(db)
    scheduler.tick()
    place.apply(nightly={"cron": "0 11 * * *"})
    scheduler.tick()
    assert place.slots() == []


@pytest.mark.parametrize("change", [{"grace": "1h"}, {"deadline": "1h"}, {"catch_up": "none"}])
def test_an_edit_of_anything_else_moves_nothing(
    change: dict[str, str], place: Any, db: Database
) -> None:
    """Catches an interval that starts again whenever the file is touched, and so never runs."""
    place.apply(nightly={"every": "6h"})
    scheduler = Scheduler(db)
    tick_at(place, scheduler, 5)
    place.apply(nightly={"every": "6h", **change})
    tick_at(place, scheduler, 6)
    assert place.slots() == [("2026-03-27T18:00:00Z", "queued")]


def test_a_check_that_goes_and_comes_back(place: Any, db: Database) -> None:
    """X6: its slots stay, it isn't run while it is gone, and no slot is run twice."""
    place.apply(nightly={"cron": "0 13 * * *"}, other={"cron": "0 0 * * *"})
    scheduler = Scheduler(db)
    tick_at(place, scheduler, 1)
    place.apply(other={"cron": "0 0 * * *"})
    tick_at(place, scheduler, 30)
    with db.reader() as session:
        assert list(schedules.states_by_check(session)) == ["other"]
    place.end_runs()
    place.apply(nightly={"cron": "0 13 * * *"}, other={"cron": "0 0 * * *"})
    tick_at(place, scheduler, 49)
    assert place.slots() == [("2026-03-27T13:00:00Z", "failed"), ("2026-03-29T13:00:00Z", "queued")]


def test_a_check_without_a_schedule_has_none(place: Any, db: Database) -> None:
    """Catches a default schedule that nobody asked for."""
    place.apply(nightly=None)
    tick_at(place, Scheduler(db), 100)
    assert place.slots() == []


def test_applying_the_same_again_changes_nothing(place: Any, db: Database) -> None:
    """Catches a reload that looks like an edit."""
    place.apply(nightly={"cron": "0 13 * * *", "zone": "Europe/Berlin"})
    Scheduler(db).tick()
    before = place.schedule()
    place.set_clock(place.start + timedelta(minutes=30))
    place.apply(nightly={"cron": "0 13 * * *", "zone": "Europe/Berlin"})
    assert place.schedule() == before


def test_pause_and_resume(place: Any, db: Database) -> None:
    """F8: a paused check's slots are recorded; neither a reload nor a run undoes the pause."""
    place.apply(nightly={"cron": "0 * * * *"})
    scheduler = Scheduler(db)
    assert checks.pause(db, "nightly", "anna", "new weights tonight")
    assert not checks.pause(db, "nightly", "ben", "again")
    scheduler.tick()
    assert place.schedule().next_slot_at is None
    tick_at(place, scheduler, 1)
    place.apply(nightly={"cron": "0 * * * *", "grace": "1h"})
    tick_at(place, scheduler, 2)
    with db.reader() as session:
        paused = checks.pauses(session)["nightly"]
    assert (paused.at, paused.by, paused.reason) == (paused.at, "anna", "new weights tonight")
    assert checks.resume(db, "nightly", "ben")
    assert not checks.resume(db, "nightly", "ben")
    scheduler.tick()
    assert place.schedule().next_slot_at == place.start + timedelta(hours=3)
    tick_at(place, scheduler, 3)
    assert [word for _, word in place.slots()] == ["paused", "paused", "queued"]
    assert _audited(db) == [
        ("anna", "paused", "check nightly"),
        ("ben", "resumed", "check nightly"),
    ]


def test_pausing_needs_a_reason_and_may_come_first(place: Any, db: Database) -> None:
    """Catches a pause nobody can explain, and one that is lost because the check is new."""
    with pytest.raises(UserError, match="without a reason"):
        checks.pause(db, "nightly", "anna", "  ")
    assert checks.pause(db, "nightly", "anna", "not yet")
    place.apply(nightly={"cron": "0 13 * * *"})
    tick_at(place, Scheduler(db), 1)
    assert [word for _, word in place.slots()] == ["paused"]


def test_leader_lease(place: Any, db: Database) -> None:
    """§6.5: one holder; epoch + 1 at each take-over; a holder that was away renews nothing."""
    first = leader.acquire(db, "a")
    assert first == leader.Lease("a", 1)
    assert leader.acquire(db, "b") is None
    place.set_clock(place.start + timedelta(seconds=20))
    assert leader.renew(db, first)
    place.set_clock(place.start + timedelta(seconds=49))
    assert leader.acquire(db, "b") is None
    place.set_clock(place.start + timedelta(seconds=51))
    assert not leader.renew(db, first)
    second = leader.acquire(db, "b")
    assert second == leader.Lease("b", 2)
    assert not leader.renew(db, first)
    assert leader.acquire(db, "a") is None
    leader.release(db, first)
    assert leader.renew(db, second)
    leader.release(db, second)
    assert leader.acquire(db, "a") == leader.Lease("a", 3)


def test_a_lease_from_the_future_keeps_nobody_waiting(place: Any, db: Database) -> None:
    """K16: after the clock was set back by two hours, a dead leader would lead for two hours."""
    place.set_clock(place.start + timedelta(hours=2))
    assert leader.acquire(db, "dead") is not None
    place.set_clock(place.start)
    assert leader.acquire(db, "b") == leader.Lease("b", 2)


def _audited(db: Database) -> list[tuple[str, str, str]]:
    with db.reader() as session:
        query = select(AuditRow.actor, AuditRow.action, AuditRow.subject).order_by(AuditRow.id)
        return [tuple(row) for row in session.execute(query)]  # type: ignore[misc]
