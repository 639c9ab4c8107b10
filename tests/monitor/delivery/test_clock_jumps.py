"""A clock that was wrong for a while: nothing of what was written then lasts as long as the jump."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.monitor.delivery.loopback import (
    Receiver,
    client,
    endpoint_to,
    fire,
    health_of,
    know,
    later,
    rows,
    states,
    to_next,
)

from quantwatch.delivery import health
from quantwatch.delivery.backoff import LONGEST_S, MOST_ATTEMPTS, wait_s
from quantwatch.delivery.claiming import claim
from quantwatch.delivery.health import Health
from quantwatch.delivery.loop import Deliverer
from quantwatch.delivery.outcomes import Outcome
from quantwatch.delivery.rates import LONGEST_PAUSE_S, Bucket
from quantwatch.store.session import Database

START = datetime(2026, 11, 29, 2, 0, tzinfo=UTC)
YEARS = timedelta(days=3650)
FAILED = Outcome("retry", "failure", "http_500")


def test_endpoint_is_not_muted_for_the_length_of_a_jump(db: Database, receiver: Receiver) -> None:
    """Catches an endpoint that is mute for ten years after a clock that was ten years ahead."""
    one = Deliverer(db, {"hook": endpoint_to(receiver.port, rate_per_minute=4)}, client())
    db.clock_shift = YEARS
    for number in range(3):
        fire(db, f"e{number}", subject=f"s{number}")
    receiver.statuses(500)
    one.run_once()
    fire(db, "waits", subject="waits")
    db.clock_shift = timedelta()
    receiver.statuses(200)
    fire(db, "new", subject="new")
    for _ in range(5):
        later(db, minutes=2)
        one.run_once()
    assert set(states(db)) == {"delivered"}


def test_lease_of_a_process_that_died_during_a_jump(db: Database, receiver: Receiver) -> None:
    """Catches a message that is held for ten years by a process that is gone."""
    endpoint = endpoint_to(receiver.port)
    know(db, endpoint)
    fire(db, "e1")
    db.clock_shift = YEARS
    assert claim(db, endpoint) is not None
    db.clock_shift = timedelta()
    one = Deliverer(db, {"hook": endpoint}, client())
    one.run_once()
    assert states(db) == ["delivered"]


def test_ordinary_waits_are_left_alone(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a housekeeper that cuts short what waits for its next attempt."""
    receiver.statuses(500)
    one = Deliverer(sqlite_db, {"hook": endpoint_to(receiver.port)}, client())
    fire(sqlite_db, "e1")
    for _ in range(MOST_ATTEMPTS - 1):
        one.run_once()
        [before] = rows(sqlite_db)
        one.tidy()
        [after] = rows(sqlite_db)
        assert (after.state, after.next_at) == ("retry_wait", before.next_at)
        to_next(sqlite_db)


def test_the_longest_wait() -> None:
    """Catches a bound that is shorter than what a message may wait."""
    waits = [
        wait_s(attempt, failure_ratio=1.0, chance=0.999999, retry_after_s=asked)
        for attempt in range(1, 12)
        for asked in (None, 1e9)
    ]
    assert max(waits) <= LONGEST_S


@pytest.mark.parametrize(
    ("ahead_s", "at"),
    [
        pytest.param(LONGEST_PAUSE_S, START + timedelta(seconds=LONGEST_PAUSE_S), id="a pause"),
        pytest.param(LONGEST_PAUSE_S + 1, START, id="more than a pause"),
        pytest.param(YEARS.total_seconds(), START, id="years"),
    ],
)
def test_bucket_of_the_future(ahead_s: float, at: datetime) -> None:
    """Catches a rate that counts from a moment that is years away; it still adds nothing."""
    bucket = Bucket(0.5, START + timedelta(seconds=ahead_s))
    assert bucket.refilled(20, START) == Bucket(0.5, at)
    paused = bucket.paused(START, 30.0)
    assert paused.tokens == 0
    assert START + timedelta(seconds=30) <= paused.at <= START + timedelta(seconds=LONGEST_PAUSE_S)


def test_streak_that_began_in_the_future() -> None:
    """Catches an endpoint that is never disabled, as its failures began ten years from now."""
    began = Health(failing_since=START + YEARS, num_failures=1)
    known = health.after(began, FAILED, START)
    assert known.failing_since == START
    assert failing(known, *[timedelta(days=1)] * 5).state == "disabled_auto"


def failing(known: Health, *steps: timedelta) -> Health:
    """Fail once more after each of these steps of the clock."""
    at = known.last_attempt_at or START
    for step in steps:
        at += step
        known = health.after(known, FAILED, at)
    return known


HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        pytest.param([HOUR, 5 * DAY], "enabled", id="jump of five days"),
        pytest.param([HOUR, YEARS, HOUR], "enabled", id="jump of ten years"),
        pytest.param([HOUR, YEARS, -YEARS, YEARS, HOUR], "enabled", id="there and back"),
        pytest.param([*[DAY] * 3, YEARS], "enabled", id="three days and a jump"),
        pytest.param([*[DAY] * 4, YEARS], "disabled_auto", id="four days and a jump, a day of it"),
        pytest.param([*[DAY] * 4, 23 * HOUR], "enabled", id="nearly five days"),
        pytest.param([10 * HOUR] * 12, "disabled_auto", id="five days of the plan's longest wait"),
        pytest.param([timedelta(weeks=1)] * 4, "enabled", id="a message a week, four times"),
        pytest.param([timedelta(weeks=1)] * 5, "disabled_auto", id="a message a week, five times"),
    ],
)
def test_only_what_was_lived_through_disables(steps: list[timedelta], state: str) -> None:
    """Catches an endpoint that is disabled by one failure after the clock was corrected."""
    known = health.after(Health(), FAILED, START)
    assert failing(known, *steps).state == state


def test_endpoint_outlives_a_jump_during_an_outage(db: Database, receiver: Receiver) -> None:
    """Catches all that waits becoming dead letters because NTP came up in the middle of it."""
    receiver.statuses(500)
    one = Deliverer(db, {"hook": endpoint_to(receiver.port)}, client())
    fire(db, "e1")
    for jump in (timedelta(), timedelta(minutes=1), timedelta(days=30)):
        db.clock_shift += jump
        one.run_once()
    assert health_of(db).num_failures == 3
    assert health_of(db).state == "enabled"
    receiver.statuses(200)
    to_next(db)
    one.run_once()
    assert states(db) == ["delivered"]
