"""A database in trouble, a look that hangs, a clock that ran ahead."""

import threading
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.errors import StoreError
from quantwatch.scheduler import Scheduler, step
from quantwatch.store import schedules
from quantwatch.store.session import Database

NIGHTLY = {"cron": "0 13 * * *"}


def test_a_locked_row_costs_no_hour(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a nightly check an hour late because of a lock timeout or a deadlock."""
    place.apply(first=NIGHTLY, second=NIGHTLY)
    place.set_clock(place.start + timedelta(hours=1, minutes=1))
    scheduler, look = Scheduler(place.db), step.look
    locked = place.schedule("first").check_id

    def refuse(db: Database, check_id: int) -> Any:
        if check_id == locked:
            raise StoreError("the row is locked by another session")
        return look(db, check_id)

    monkeypatch.setattr(step, "look", refuse)
    with pytest.raises(StoreError, match="locked"):
        scheduler.tick()
    assert (place.slots("first"), place.schedule("first").trouble) == ([], None)
    assert place.slots("second") == [("2026-03-27T13:00:00Z", "queued")], "the others go on"
    monkeypatch.setattr(step, "look", look)
    scheduler.tick()
    assert place.slots("first") == [("2026-03-27T13:00:00Z", "queued")]


def test_many_locked_rows_do_not_fill_a_tick(
    sqlite_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a tick of minutes, each check waiting for the same lock."""
    place, looks = sqlite_place, []
    place.apply(**{f"c{number}": NIGHTLY for number in range(9)})
    place.set_clock(place.start + timedelta(hours=1, minutes=1))

    def refuse(_: Database, check_id: int) -> Any:
        looks.append(check_id)
        raise StoreError("locked")

    monkeypatch.setattr(step, "look", refuse)
    with pytest.raises(StoreError, match="locked"):
        Scheduler(place.db).tick()
    assert len(looks) == 3


def test_a_look_that_hangs_is_not_waited_for(
    sqlite_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stop that lasts as long as a server that is cut off."""
    hanging, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> list[int]:
        hanging.set()
        assert go_on.wait(30)
        return []

    monkeypatch.setattr(schedules, "due", hang)
    scheduler = Scheduler(sqlite_place.db)
    scheduler.start()
    assert hanging.wait(30)
    scheduler.stop(0.05)
    assert scheduler.is_alive, "what is left behind is said"
    go_on.set()
    scheduler.stop(30)
    assert (scheduler.is_alive, scheduler.failure) == (False, None)
    assert scheduler.tick() == 0


@pytest.mark.parametrize("column", ["anchor_at", "last_slot_at"])
def test_slots_of_a_clock_that_ran_ahead_are_not_waited_for(column: str, place: Any) -> None:
    """K16: catches two nights without a check after the clock was put right."""
    place.apply(nightly=NIGHTLY)
    place.change_schedule(**{column: place.start + timedelta(days=2)})
    scheduler = Scheduler(place.db)
    scheduler.tick()
    assert place.slots() == []
    for _ in range(2):
        place.set_clock(place.start + timedelta(hours=1, minutes=1))
        scheduler.tick()
    assert place.slots() == [("2026-03-27T13:00:00Z", "queued")]
