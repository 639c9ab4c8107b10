"""One scheduler on a real database: what it queues, what it skips, what it survives."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from quantwatch.errors import StoreError
from quantwatch.scheduler import Scheduler, step
from quantwatch.scheduler.jumps import JumpDetector
from quantwatch.store import clock, components, failed_tasks, leader, schedules
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunRow, ScheduleRow

Counted = Callable[[], dict[str, float]]


def tick_at(place: Any, scheduler: Scheduler, **later: float) -> int:
    place.set_clock(place.start + timedelta(**later))
    return scheduler.tick()


def test_a_run_as_it_is_queued(place: Any, db: Database) -> None:
    """Catches a run without what its worker needs, or with the jittered instant as its slot."""
    place.apply(nightly={"cron": "0 13 * * *", "jitter": "10m", "attempts": 2, "deadline": "1h"})
    scheduler = Scheduler(db)
    scheduler.tick()
    look = place.schedule().look_at - place.start
    assert timedelta(hours=1) < look <= timedelta(hours=1, minutes=10)
    assert tick_at(place, scheduler, hours=1, seconds=look.seconds - 3600) == 1
    with db.reader() as session:
        run = session.scalars(select(RunRow)).one()
    assert run.slot_key == "s:2026-03-27T13:00:00Z"
    assert run.scheduled_for == place.start + timedelta(hours=1)
    assert (run.trigger, run.status, run.device, run.base_dir) == (
        "schedule",
        "queued",
        "cpu",
        "/checks",
    )
    assert (run.attempt, run.max_attempts, run.deadline_s, run.actor) == (0, 2, 3600.0, None)
    assert run.config["schedule"]["cron"] == "0 13 * * *"
    assert run.not_before == run.queued_at


@pytest.mark.parametrize(
    ("hours", "catch_up", "expected"),
    [
        pytest.param(73, "latest", ["missed", "missed", "missed", "queued"], id="newest in grace"),
        pytest.param(80, "latest", ["missed", "missed", "missed", "missed"], id="beyond grace"),
        pytest.param(73.5, "none", ["missed", "missed", "missed", "missed"], id="no catch-up"),
    ],
)
def test_after_a_downtime(
    hours: float, catch_up: str, expected: list[str], place: Any, db: Database, counted: Counted
) -> None:
    """X3, B05: a missed slot that leaves no trace, or three nights that are run one after another."""
    place.apply(nightly={"cron": "0 13 * * *", "catch_up": catch_up})
    Scheduler(db).tick()
    tick_at(place, Scheduler(db), hours=hours)
    assert [word for _, word in place.slots()] == expected
    assert counted()["missed"] == expected.count("missed")


def test_overlap_is_recorded(place: Any, db: Database) -> None:
    """X4: a slot that vanishes because the run before it takes long."""
    place.apply(nightly={"cron": "0 * * * *"})
    scheduler = Scheduler(db)
    for hours in (1, 2, 3):
        tick_at(place, scheduler, hours=hours)
    assert [word for _, word in place.slots()] == ["queued", "overlap", "overlap"]
    place.end_runs()
    tick_at(place, scheduler, hours=4)
    assert place.slots()[-1] == ("2026-03-27T16:00:00Z", "queued")


def test_quarantined_checks_are_skipped(place: Any, db: Database) -> None:
    """Catches a queue that fills with runs nobody may claim."""
    place.apply(nightly={"cron": "0 * * * *"})
    with db.writer() as session:
        session.execute(update(CheckRow).values(quarantined_at=clock.now(session)))
    tick_at(place, Scheduler(db), hours=1)
    assert [word for _, word in place.slots()] == ["quarantined"]


def test_a_week_over_the_change_of_the_clocks(place: Any, db: Database) -> None:
    """B02, B03: from the database's clock to the slot, each night of Berlin once."""
    place.apply(nightly={"cron": "30 2 * * *", "zone": "Europe/Berlin"}, daily={"every": "1d"})
    scheduler, end = Scheduler(db), place.start + timedelta(days=5)
    scheduler.tick()
    while (look_at := min(place.schedule(name).look_at for name in ("nightly", "daily"))) < end:
        place.set_clock(look_at)
        scheduler.tick()
        place.end_runs()
    nights = [slot for slot, word in place.slots() if word == "failed"]
    assert nights == [
        "2026-03-28T01:30:00Z",
        "2026-03-29T01:00:00Z",
        "2026-03-30T00:30:00Z",
        "2026-03-31T00:30:00Z",
        "2026-04-01T00:30:00Z",
    ]
    days = [slot for slot, _ in place.slots("daily")]
    assert days == [f"2026-03-{day}T12:00:00Z" for day in (28, 29, 30, 31)]


def test_a_clock_that_jumps_forward_and_back(place: Any, db: Database, caplog: Any) -> None:
    """K16: a slot that fires again when the clock is set back, or never after it was set ahead."""
    place.apply(nightly={"cron": "0 13 * * *"}, hourly={"cron": "30 * * * *"})
    scheduler = Scheduler(db)
    scheduler.tick()
    assert "the clock was set" not in caplog.text
    tick_at(place, scheduler, hours=2)
    assert "the clock was set" in caplog.text
    assert place.slots() == [("2026-03-27T13:00:00Z", "queued")]
    for hours in (0, 0.5, 1, 1.5, 2, 2.5):
        tick_at(place, scheduler, hours=hours)
    assert place.slots() == [("2026-03-27T13:00:00Z", "queued")]
    slots = [slot for slot, _ in place.slots("hourly")]
    assert slots == ["2026-03-27T12:30:00Z", "2026-03-27T13:30:00Z", "2026-03-27T14:30:00Z"]


BROKEN: dict[str, dict[str, Any]] = {
    "a cron that a newer program understands": {"settings": {"cron": "0 0 2 * * *"}},
    "a zone that tzdata has dropped": {"settings": {"cron": "0 2 * * *", "zone": "Europe/Gone"}},
    "a key of a newer program (B07)": {"settings": {"cron": "0 2 * * *", "lunar": True}},
    "no document at all": {"settings": []},
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_broken_check_stops_nobody(case: str, sqlite_place: Any, caplog: Any) -> None:
    """Healthchecks' rule: it is looked at an hour later, visibly; the others go on; it comes back."""
    place, db = sqlite_place, sqlite_place.db
    place.apply(broken={"cron": "0 13 * * *"}, nightly={"cron": "0 13 * * *"})
    with db.writer() as session:
        check = select(CheckRow.id).where(CheckRow.name == "broken").scalar_subquery()
        session.execute(
            update(ScheduleRow).where(ScheduleRow.check_id == check).values(**BROKEN[case])
        )
    scheduler = Scheduler(db)
    tick_at(place, scheduler, hours=1)
    assert [word for _, word in place.slots()] == ["queued"]
    assert place.slots("broken") == []
    state = place.schedule("broken")
    assert state.trouble is not None
    assert state.next_slot_at is None
    assert (
        timedelta(minutes=59)
        < state.look_at - place.start - timedelta(hours=1)
        < timedelta(minutes=61)
    )
    assert "can't be scheduled" in caplog.text
    failed = failed_tasks.list_failed(db)
    assert [(task.operation, task.subject, task.attempts) for task in failed] == [
        ("schedule", "broken", 1)
    ]
    tick_at(place, scheduler, hours=1, seconds=45)
    assert failed_tasks.list_failed(db)[0].attempts == 1
    place.change_schedule(settings=place.schedule("nightly").settings)
    tick_at(place, scheduler, hours=2.1)
    assert place.slots("broken") == [("2026-03-27T13:00:00Z", "queued")]
    assert place.schedule("broken").trouble is None
    assert failed_tasks.list_failed(db) == []


def test_a_config_that_can_not_be_read_consumes_no_slot(sqlite_place: Any) -> None:
    """B07: an unknown kind of check is visible, and its slot waits for a program that knows it."""
    place, db = sqlite_place, sqlite_place.db
    place.apply(nightly={"cron": "0 13 * * *"})
    with db.writer() as session:
        good = session.scalars(select(CheckRow.config)).one()
        session.execute(update(CheckRow).values(config={**good, "kind": "lunar"}))
    scheduler = Scheduler(db)
    tick_at(place, scheduler, hours=1)
    assert place.slots() == []
    assert "kind: unknown key" in (place.schedule().trouble or "")
    with db.writer() as session:
        session.execute(update(CheckRow).values(config=good))
    tick_at(place, scheduler, hours=2.1)
    assert place.slots() == [("2026-03-27T13:00:00Z", "queued")]


def test_a_downtime_of_a_minutely_check(sqlite_place: Any, counted: Counted, caplog: Any) -> None:
    """Catches 43,200 rows after a month of downtime, and missed slots that nobody counts."""
    place, db = sqlite_place, sqlite_place.db
    place.apply(minutely={"cron": "* * * * *"})
    Scheduler(db).tick()
    tick_at(place, Scheduler(db), days=30)
    words = [word for _, word in place.slots("minutely")]
    assert words == ["missed"] * 100 + ["queued"]
    assert counted()["missed"] == 30 * 1440 - 1
    assert "only counted" in caplog.text


def test_slots_that_are_there_already_are_nobodys_fault(
    place: Any, db: Database, counted: Counted
) -> None:
    """X5: a schedule row restored from a backup doesn't run its slots again; they are counted."""
    place.apply(nightly={"cron": "0 * * * *"})
    scheduler = Scheduler(db)
    for hours in (1, 2, 3):
        tick_at(place, scheduler, hours=hours)
    before = place.slots()
    place.change_schedule(last_slot_at=None, look_at=place.start)
    scheduler.tick()
    assert place.slots() == before
    assert counted()["duplicate_prevented"] == 3


MEANWHILE: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "another time": (lambda place: place.apply(nightly={"cron": "0 20 * * *"}), []),
    "another grace": (
        lambda place: place.apply(nightly={"cron": "0 13 * * *", "grace": "1h"}),
        [],
    ),
    "no schedule any more": (lambda place: place.apply(), []),
    "another scheduler": (lambda place: Scheduler(place.db).tick(), ["queued"]),
}


@pytest.mark.parametrize("case", MEANWHILE)
def test_a_lost_look_writes_nothing(
    case: str, place: Any, db: Database, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches slots of a schedule as it was before somebody else edited it or dealt with it."""
    change, slots = MEANWHILE[case]
    place.apply(nightly={"cron": "0 13 * * *"})
    place.set_clock(place.start + timedelta(hours=1))
    with db.reader() as session:
        stale = schedules.states_by_check(session)["nightly"]
    change(place)
    monkeypatch.setattr(schedules, "read_state", lambda *_: stale)
    done = step.look(db, stale.check_id)
    assert done is not None
    assert not done.won
    assert [word for _, word in place.slots()] == slots
    assert counted()["duplicate_prevented"] == 1


@pytest.mark.parametrize("event", ["take-over", "clock set ahead", "clock set back"])
def test_what_was_computed_before_is_computed_anew(event: str, sqlite_place: Any) -> None:
    """§6.5: a look planned with an older tzdata, or by a wrong clock, is not waited for."""
    place = sqlite_place
    place.apply(nightly={"cron": "0 13 * * *"})
    scheduler = Scheduler(place.db)
    tick_at(place, scheduler, hours=1)
    right = place.schedule().look_at
    place.change_schedule(look_at=right + timedelta(days=9))
    if event == "take-over":
        scheduler.stop()
        scheduler = Scheduler(place.db)
    shift = {"take-over": 1, "clock set ahead": 90, "clock set back": -90}[event]
    tick_at(place, scheduler, hours=1, seconds=shift)
    # Set back, the slot is looked at once more; its key keeps it from being run again.
    again = timedelta(days=1) if event == "clock set back" else timedelta()
    assert place.schedule().look_at == right - again


def test_a_standby_waits_for_the_lease(place: Any, db: Database) -> None:
    """§6.5: one leads, the other takes over when the lease has run out, or at once when it ends."""
    place.apply(nightly={"cron": "0 * * * *"})
    first, second, third = (Scheduler(db, holder=name, monotonic=lambda: 0.0) for name in "abc")
    first.tick()
    assert second.tick() == 0
    assert (first.is_leader, second.is_leader) == (True, False)
    tick_at(place, second, hours=1)
    assert second.is_leader
    second.stop()
    assert not second.is_leader
    third.tick()
    assert third.is_leader
    assert len(place.slots()) == 1


def test_a_renewal_that_fails_ends_the_leadership(
    sqlite_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """§6.5: a leader that can't reach the database must not go on by its own clock."""
    seconds = [0.0]
    scheduler = Scheduler(sqlite_place.db, monotonic=lambda: seconds[0])
    scheduler.tick()

    def fail(*_: object) -> bool:
        raise StoreError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(leader, "renew", fail)
        seconds[0] = 9.0
        scheduler.tick()
        assert scheduler.is_leader
        seconds[0] = 11.0
        with pytest.raises(StoreError, match="is away"):
            scheduler.tick()
        assert not scheduler.is_leader
    sqlite_place.set_clock(sqlite_place.start + timedelta(seconds=40))
    scheduler.tick()
    assert scheduler.is_leader


def test_too_little_of_the_lease_left_is_no_leadership(sqlite_place: Any) -> None:
    """§6.5: with less than 5 s left by the monotonic clock nothing is begun."""
    seconds = [0.0]
    scheduler = Scheduler(sqlite_place.db, monotonic=lambda: seconds[0])
    scheduler.tick()
    for at, leads in ((24.9, True), (25.1, False)):
        seconds[0] = at
        assert scheduler.is_leader is leads


def test_it_shows_that_it_lives(place: Any, db: Database) -> None:
    """Catches a dead scheduler that looks alive on the health page, and an ended one that stays."""
    scheduler = Scheduler(db)
    scheduler.tick()
    scheduler.keep_alive()
    with db.reader() as session:
        (seen,) = components.list_components(session)
    assert (seen.component.id, seen.component.kind) == (scheduler.id, "scheduler")
    assert seen.details["epoch"] == 1
    assert abs(seen.details["last_tick"] - place.start.timestamp()) < 60
    scheduler.stop()
    with db.reader() as session:
        assert components.list_components(session) == []


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s", "jump_s"),
    [
        pytest.param(30, 30, None, id="even"),
        pytest.param(90, 30, None, id="sixty seconds are tolerated"),
        pytest.param(91, 30, 61, id="ahead"),
        pytest.param(-31, 30, -61, id="back"),
        pytest.param(7230, 30, 7200, id="two hours ahead"),
        pytest.param(3600, 3600, None, id="a long sleep is no jump"),
    ],
)
def test_jumps(wall_s: float, monotonic_s: float, jump_s: float | None) -> None:
    """K16: a change of the clock that goes unnoticed, or a long pause that looks like one."""
    detector, start = JumpDetector(), datetime(2026, 3, 27, tzinfo=UTC)
    assert detector.jump(start, 100.0) is None
    found = detector.jump(start + timedelta(seconds=wall_s), 100.0 + monotonic_s)
    assert found == (None if jump_s is None else timedelta(seconds=jump_s))
    assert detector.jump(start + timedelta(seconds=wall_s + 5), 105.0 + monotonic_s) is None
