"""A year of minutes, zone by zone, against a literal twin of Debian's cron."""

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from quantwatch.schedules import Cron, instants, next_instant

Walk = Callable[[str, datetime, datetime], Any]
YEARS = {
    "UTC": 2026,
    "Europe/Berlin": 2026,
    "America/New_York": 2026,
    "Australia/Lord_Howe": 2026,  # half an hour
    "America/Havana": 2026,  # forward at midnight
    "Asia/Beirut": 2026,  # forward at midnight, back to 23:00
    "America/Sao_Paulo": 2018,  # forward at midnight, southern
    "Pacific/Apia": 2011,  # 30 December does not exist
    "Africa/Casablanca": 2026,  # back for Ramadan, negative DST
    "Asia/Tehran": 2022,  # the last year of its DST, at midnight
    "Antarctica/Troll": 2026,  # two hours
    "Antarctica/Casey": 2009,  # three hours: a correction of the clock
    "Asia/Kolkata": 2026,  # half an hour off, never changes
    "Pacific/Chatham": 2026,  # 45 minutes off, changes at 2:45
    "Europe/Dublin": 2026,  # negative DST
    "America/Nuuk": 2026,  # changes on Saturday evening
    "Africa/Cairo": 2026,  # forward on Friday at midnight
    "America/Caracas": 2016,  # half an hour for good
    "Asia/Pyongyang": 2018,  # half an hour for good, at 23:30
}
NIGHTLY = [f"{minute} {hour} * * *" for hour in (0, 1, 2, 3, 23) for minute in (0, 15, 30, 45)]
SPARSE = [
    *("0 0,1,2,3 * * *", "0,30 2 * * *", "15-45/15 1-3 * * *", "30 2 * * 0", "30 2 * * 7"),
    *("0 0 * * SAT", "0 0 1 * *", "45 23 31 * *", "30 1 13 * FRI", "0 2 */2 * *", "0 2 * * */3"),
    *("0 2 1-7 * */7", "5 0-23/6 * mar-apr,OCT *", "59 23 29 2,3,10 *", "0 12 * 10 1-5"),
    *("30 */6 * * *", "*/20 2 * * *", "* 3 29 3 *", "17 * * * 0", "45 * 1-7 4,10,11 *"),
]  # fmt: skip
FREQUENT = ["* * * * *", "*/5 * * * *", "0 * * * *", "15 * * * *", "30 * * * *", "45 * * * *",
            "10,50 * * * *", "*/7 */3 * * *", "30 */2 * * *", "* 2 * * *", "*/15 0,2,23 * * *",
            "0 0-23 * * *", "7-59/13 1-4 * * *"]  # fmt: skip


def differences(walk: Any, zone: str, text: str, start: datetime, end: datetime) -> list[str]:
    expected = walk(zone, start, end).instants(text)
    found = list(
        instants(Cron(text, zone), start - timedelta(seconds=1), end - timedelta(seconds=1))
    )
    return [f"{text}: {instant}" for instant in sorted(set(expected) ^ set(found))] + (
        [] if found == sorted(set(found)) else [f"{text}: not in order"]
    )


def changes(zone: str, year: int) -> list[datetime]:
    """Days of a year on which the clocks change, found hour by hour."""
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=h) for h in range(24 * 366)]
    found = ZoneInfo(zone)
    offsets = [hour.astimezone(found).utcoffset() for hour in hours]
    return [hours[i] for i in range(1, len(hours)) if offsets[i] != offsets[i - 1]]


@pytest.mark.parametrize("zone", YEARS)
def test_a_day_around_every_change(zone: str, walk: Walk) -> None:
    """B02, B03, B04: a lost or doubled night, and what follows elapsed time, minute by minute."""
    wrong = []
    for change in changes(zone, YEARS[zone]) or [datetime(2026, 3, 29, tzinfo=UTC)]:
        start, end = change - timedelta(hours=27), change + timedelta(hours=27)
        for text in NIGHTLY + SPARSE + FREQUENT:
            wrong += differences(walk, zone, text, start, end)
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("zone", YEARS)
def test_a_whole_year(zone: str, walk: Walk) -> None:
    """X2: a night that is missing or doubled anywhere in a year, or a wrong day of the week."""
    start = datetime(YEARS[zone], 1, 1, tzinfo=UTC)
    end = start.replace(year=start.year + 1)
    hourly = ["0 * * * *", "30 * * * *", "45 */2 * * *"]
    wrong = [
        line
        for text in NIGHTLY + SPARSE + hourly
        for line in differences(walk, zone, text, start, end)
    ]
    assert wrong == []


@pytest.mark.parametrize("zone", YEARS)
def test_a_start_anywhere_finds_the_same(zone: str, walk: Walk) -> None:
    """Catches a search that depends on where it begins: in a gap, or in a repeated hour."""
    rng = random.Random(zone)
    change = rng.choice(changes(zone, YEARS[zone]) or [datetime(2026, 3, 29, tzinfo=UTC)])
    start, end = change - timedelta(days=2), change + timedelta(days=2)
    for text in [*rng.sample(NIGHTLY, 8), *rng.sample(FREQUENT, 6)]:
        known = walk(zone, start, end).instants(text)
        for _ in range(12):
            after = change + timedelta(
                seconds=rng.randrange(-14400, 14400), microseconds=rng.choice([0, 1, 999999])
            )
            expected = next(instant for instant in known if instant > after)
            assert next_instant(Cron(text, zone), after) == expected, (text, after)
        for instant in rng.sample(known, min(len(known), 5)):
            later = [other for other in known if other > instant]
            if later:
                assert next_instant(Cron(text, zone), instant) == later[0], (text, instant)


def test_the_twin_finds_planted_faults(walk: Walk) -> None:
    """Catches a comparison that can't fail: cronsim alone differs from the twin at Lord Howe."""
    from cronsim import CronSim

    zone = "Australia/Lord_Howe"
    start, end = datetime(2026, 4, 4, tzinfo=UTC), datetime(2026, 4, 6, tzinfo=UTC)
    alone = CronSim("45 * * * *", start.astimezone(ZoneInfo(zone)))
    found = []
    while (instant := next(alone).astimezone(UTC)) < end:
        found.append(instant)
    assert found != walk(zone, start, end).instants("45 * * * *")
