"""Grace, catch-up, overlap, pause, jitter, long downtimes: tables of a pure function."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch.config.plans import Plan
from quantwatch.scheduler.decision import (
    MOST_AT_ONCE,
    MOST_RECORDED,
    Decision,
    Standing,
    decide,
)
from quantwatch.schedules import Cron, Interval, Schedule

NIGHTLY = Cron("0 2 * * *")
HOURLY = Cron("0 * * * *")


def plan(schedule: Schedule = NIGHTLY, **fields: Any) -> Plan:
    values: dict[str, Any] = {
        "jitter": timedelta(0),
        "grace": timedelta(hours=6),
        "catch_up": True,
        "deadline_s": 7200.0,
        "attempts": 3,
    }
    return Plan(schedule, **(values | fields))


def at(text: str) -> datetime:
    """Return day and time of June 2026: "05 02:00"."""
    return datetime.fromisoformat(f"2026-06-{text.replace(' ', 'T')}+00:00")


def outcome(decision: Decision) -> list[str]:
    """Return slots with what becomes of them, in short: "05 02:00 run"."""
    slots = [*decision.skipped, *([(decision.run, "run")] if decision.run else [])]
    return [f"{slot:%d %H:%M} {word}" for slot, word in slots]


LATEST = plan()
NONE = plan(catch_up=False)
JITTER = plan(jitter=timedelta(minutes=7))
CASES: dict[str, tuple[Any, ...]] = {
    # name: plan, dealt with, now, other facts, expected slots, expected next
    "not yet": (LATEST, "04 02:00", "05 01:59:59", {}, [], "05 02:00"),
    "to the second": (LATEST, "04 02:00", "05 02:00:00", {}, ["05 02:00 run"], "06 02:00"),
    "once only": (LATEST, "05 02:00", "05 02:00:01", {}, [], "06 02:00"),
    "1.3 s late (B05)": (LATEST, "04 02:00", "05 02:00:01.3", {}, ["05 02:00 run"], "06 02:00"),
    "at the end of grace": (LATEST, "04 02:00", "05 08:00:00", {}, ["05 02:00 run"], "06 02:00"),
    "after grace (B05)": (LATEST, "04 02:00", "05 08:00:01", {}, ["05 02:00 missed"], "06 02:00"),
    "three nights down, back in grace (X3)": (LATEST, "02 02:00", "05 03:00", {},
        ["03 02:00 missed", "04 02:00 missed", "05 02:00 run"], "06 02:00"),
    "three nights down, back too late": (LATEST, "02 02:00", "05 12:00", {},
        ["03 02:00 missed", "04 02:00 missed", "05 02:00 missed"], "06 02:00"),
    "hourly, older slots are not made up for": (plan(HOURLY), "05 00:00", "05 03:30", {},
        ["05 01:00 missed", "05 02:00 missed", "05 03:00 run"], "05 04:00"),
    "no catch-up: punctual": (NONE, "04 02:00", "05 02:00:30", {}, ["05 02:00 run"], "06 02:00"),
    "no catch-up: five minutes": (NONE, "04 02:00", "05 02:05", {}, ["05 02:00 run"], "06 02:00"),
    "no catch-up: late": (NONE, "04 02:00", "05 02:05:01", {}, ["05 02:00 missed"], "06 02:00"),
    "no catch-up: grace is shorter": (plan(catch_up=False, grace=timedelta(minutes=1)),
        "04 02:00", "05 02:02", {}, ["05 02:00 missed"], "06 02:00"),
    "overlap (X4)": (LATEST, "04 02:00", "05 02:00", {"busy": True}, ["05 02:00 overlap"], "06 02:00"),
    "overlap after a downtime": (plan(HOURLY), "05 00:00", "05 02:00", {"busy": True},
        ["05 01:00 missed", "05 02:00 overlap"], "05 03:00"),
    "too late and busy": (LATEST, "04 02:00", "05 09:00", {"busy": True}, ["05 02:00 missed"], "06 02:00"),
    "paused": (LATEST, "04 02:00", "05 02:00", {"paused_at": "04 12:00"}, ["05 02:00 paused"], "06 02:00"),
    "paused and busy": (LATEST, "04 02:00", "05 02:00", {"paused_at": "04 12:00", "busy": True},
        ["05 02:00 paused"], "06 02:00"),
    "paused in the middle of a downtime": (LATEST, "01 02:00", "05 03:00", {"paused_at": "03 12:00"},
        ["02 02:00 missed", "03 02:00 missed", "04 02:00 paused", "05 02:00 paused"], "06 02:00"),
    "paused after a slot that is still in grace": (LATEST, "04 02:00", "05 03:00",
        {"paused_at": "05 02:30"}, ["05 02:00 missed"], "06 02:00"),
    "quarantined": (LATEST, "04 02:00", "05 02:00", {"quarantined_at": "04 12:00"},
        ["05 02:00 quarantined"], "06 02:00"),
    "paused and quarantined": (LATEST, "04 02:00", "05 02:00",
        {"quarantined_at": "04 12:00", "paused_at": "04 13:00"}, ["05 02:00 paused"], "06 02:00"),
    "jitter: not before": (JITTER, "04 02:00", "05 02:06:59", {}, [], "05 02:00"),
    "jitter: the slot is nominal": (JITTER, "04 02:00", "05 02:07", {}, ["05 02:00 run"], "06 02:00"),
    "jitter: grace counts from the jittered time": (JITTER, "04 02:00", "05 08:07", {},
        ["05 02:00 run"], "06 02:00"),
    "jitter longer than grace still runs": (
        plan(jitter=timedelta(minutes=10), grace=timedelta(minutes=5)), "04 02:00", "05 02:10", {},
        ["05 02:00 run"], "06 02:00"),
    "jitter: paused between slot and start": (JITTER, "04 02:00", "05 02:07",
        {"paused_at": "05 02:03"}, ["05 02:00 paused"], "06 02:00"),
    "clock set back behind what is dealt with (K16)": (LATEST, "05 02:00", "05 00:30", {}, [], "06 02:00"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_table(case: str) -> None:
    """X3, X4, B05: a slot that is dropped, doubled or run when nobody wants it any more."""
    given_plan, dealt_with, now, facts, slots, coming = CASES[case]
    read: dict[str, Any] = {
        key: at(value) if isinstance(value, str) else value for key, value in facts.items()
    }
    decision = decide(given_plan, Standing(at(dealt_with), at(now), **read))
    assert outcome(decision) == slots
    assert decision.next == at(coming)
    assert decision.look_at == at(coming) + given_plan.jitter
    assert decision.num_missed == sum(slot.endswith("missed") for slot in slots)


@pytest.mark.parametrize("days", [10, pytest.param(365, marks=pytest.mark.slow)])
def test_months_of_minutes_are_counted_not_written(days: int) -> None:
    """Catches half a million inserts, and a count that is lost, after a long downtime."""
    minutely = plan(Cron("* * * * *"), grace=timedelta(minutes=10))
    start = datetime(2025, 6, 1, tzinfo=UTC)
    now = start + timedelta(days=days)
    dealt_with, missed, recorded, looks = start, 0, 0, 0
    while True:
        decision = decide(minutely, Standing(dealt_with, now))
        assert len(decision.skipped) <= MOST_RECORDED
        missed += decision.num_missed
        recorded += len(decision.skipped)
        looks += 1
        assert decision.last is not None
        dealt_with = decision.last
        if decision.look_at > now:
            break
        assert decision.run is None
    assert decision.run == now
    assert missed == days * 1440 - 1
    assert recorded == MOST_RECORDED
    assert looks <= days * 1440 / MOST_AT_ONCE + 2


def test_a_long_pause_counts_nothing_as_missed() -> None:
    """Catches an alarm about missed slots that somebody wanted to be left out."""
    minutely = plan(Cron("* * * * *"))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    decision = decide(minutely, Standing(start, start + timedelta(days=30), paused_at=start))
    assert decision.num_unrecorded == MOST_AT_ONCE
    assert decision.num_missed == 0


schedules_ = st.sampled_from([NIGHTLY, HOURLY, Cron("*/15 * * * *"), Cron("30 2 * * *", "Europe/Berlin"),
    Interval(timedelta(hours=7), datetime(2026, 3, 1, tzinfo=UTC))])  # fmt: skip
gaps = st.lists(st.integers(1, 3 * 86400), min_size=1, max_size=15)


@given(
    schedules_,
    gaps,
    st.integers(0, 600),
    st.booleans(),
    st.lists(st.booleans(), min_size=15, max_size=15),
)
@settings(max_examples=60)
def test_every_slot_exactly_once_whenever_somebody_looks(
    schedule: Schedule, gaps: list[int], jitter_s: int, catch_up: bool, busy: list[bool]
) -> None:
    """Law: looks at any times deal with each due slot once, run at most one each, in order."""
    start = datetime(2026, 3, 26, 5, 17, tzinfo=UTC)
    made = plan(schedule, jitter=timedelta(seconds=jitter_s), catch_up=catch_up)
    dealt_with, now, seen = start, start, []
    for gap, is_busy in zip(gaps, busy, strict=False):
        now += timedelta(seconds=gap)
        decision = decide(made, Standing(dealt_with, now, busy=is_busy))
        slots = [slot for slot, _ in decision.skipped] + ([decision.run] if decision.run else [])
        assert decision.num_unrecorded + len(slots) < MOST_AT_ONCE
        assert (decision.run is None) or not is_busy
        seen += slots[-1:] if decision.num_unrecorded else slots
        dealt_with = decision.last or dealt_with
        assert decision.look_at > now
    assert seen == sorted(set(seen))
    from quantwatch.schedules import instants

    expected = set(instants(schedule, start, now - made.jitter))
    assert set(seen) <= expected
    assert (dealt_with == max(expected)) if expected else (dealt_with == start)
