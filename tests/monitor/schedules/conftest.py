"""A slow, literal twin of Debian's cron to compare with."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from zoneinfo import ZoneInfo

import numpy as np
import pytest

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
_NAMES = {
    **{name: i for i, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))},
    **{name: i + 1 for i, name in enumerate(("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"))},
}  # fmt: skip
_LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


@dataclass(frozen=True)
class Walk:
    """Minutes (since 1970) at which cron looks, and for which wall minutes, by kind of job."""

    wild_at: np.ndarray
    wild_wall: np.ndarray
    fixed_at: np.ndarray
    fixed_wall: np.ndarray

    @cached_property
    def wild_parts(self) -> tuple[np.ndarray, ...]:
        return _parts(self.wild_wall)

    @cached_property
    def fixed_parts(self) -> tuple[np.ndarray, ...]:
        return _parts(self.fixed_wall)

    def instants(self, text: str) -> list[datetime]:
        """Return when a text runs. Two wall times at one instant are one run."""
        minute, hour = text.split()[:2]
        if minute.startswith("*") or hour.startswith("*"):
            at, parts = self.wild_at, self.wild_parts
        else:
            at, parts = self.fixed_at, self.fixed_parts
        return [EPOCH + int(m) * MINUTE for m in np.unique(at[_matches(text, parts)])]


@lru_cache(maxsize=64)
def walk(zone_name: str, start: datetime, end: datetime) -> Walk:
    """Walk minute by minute from start to end, as cron's main loop does with its virtual time."""
    zone = ZoneInfo(zone_name)
    wild: list[tuple[int, int]] = []
    fixed: list[tuple[int, int]] = []
    virtual = None
    for now, shown in _clock(zone, start, end):
        leap = 1 if virtual is None else shown - virtual
        wild.append((now, shown))
        if leap <= 0 and leap > -180:
            continue  # set back: fixed jobs have run, virtual time stands still
        if virtual is None or leap > 180 or leap <= -180:
            virtual = shown - 1  # a correction of the clock, or the beginning
        fixed += [(now, minute) for minute in range(virtual + 1, shown + 1)]
        virtual = shown
    return Walk(*np.array(wild).T, *np.array(fixed).T)


def _clock(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[tuple[int, int]]:
    """Yield each minute of UTC and the minute that the wall clock shows, both since 1970."""
    now = start
    while now < end:
        minute = (now - EPOCH) // MINUTE
        wall = now.astimezone(zone).replace(tzinfo=UTC)
        yield minute, (wall - EPOCH) // MINUTE
        now += MINUTE


def _matches(text: str, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Say which wall minutes a text matches, given their `_parts`."""
    fields = text.upper().split()
    minute, hour, day, month, weekday = (
        _members(_allowed(field, *limits))[values]
        for field, limits, values in zip(fields, _LIMITS, parts, strict=True)
    )
    both = fields[2].startswith("*") or fields[4].startswith("*")
    on_day = (day & weekday) if both else (day | weekday)
    return np.asarray(minute & hour & month & on_day)


def _members(allowed: set[int]) -> np.ndarray:
    """Say of each number that a field can have whether it is allowed."""
    found = np.zeros(60, bool)
    found[sorted(allowed)] = True
    return found


def _parts(wall: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return minute, hour, day of month, month and day of week of wall minutes."""
    times = wall.astype("datetime64[m]")
    days, months = times.astype("datetime64[D]"), times.astype("datetime64[M]")
    number = days.astype(int)
    return (
        wall % 60,
        wall // 60 % 24,
        (days - months).astype(int) + 1,
        months.astype(int) % 12 + 1,
        (number + 4) % 7,  # 1970 began on a Thursday
    )


def _allowed(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        first, _, last = span.partition("-")
        start = low if first == "*" else _number(first)
        end = high if first == "*" else _number(last) if last else start
        found |= set(range(start, end + 1, int(step or 1)))
    return {value % 7 for value in found} if high == 7 else found


def _number(text: str) -> int:
    return _NAMES[text] if text in _NAMES else int(text)


@pytest.fixture(name="walk")
def walk_fixture() -> object:
    return walk
