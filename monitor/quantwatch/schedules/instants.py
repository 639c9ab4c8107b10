"""The instants of a schedule, by the rules of Debian's cron when the clocks change.

cronsim finds the wall times; it is only ever given naive ones. Its own handling of zones loses
elapsed-time schedules where clocks move by half an hour, and starts a repeated hour again.

- A wall time that the clock leaps over runs right after the leap, unless the leap takes three hours
  or more (a whole day, at a date line): Debian calls that a correction of the clock.
- A wall time that comes twice runs at its first occurrence only.
- A schedule with a wildcard hour or minute runs whenever the wall clock shows a time that matches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

from cronsim import CronSim

from quantwatch.schedules.cron import is_wildcard, parse_cron
from quantwatch.schedules.zones import next_change, offset, parse_zone

_CORRECTION = timedelta(hours=3)
_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Cron:
    """Cron text in a zone. Raises ValueError when either is wrong."""

    text: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", parse_cron(self.text))
        object.__setattr__(self, "zone", parse_zone(self.zone))

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Yield its instants after one, forever."""
        zone = ZoneInfo(self.zone)
        walk = _elapsed if is_wildcard(self.text) else _by_local_day
        return walk(self.text, zone, instant)


@dataclass(frozen=True, slots=True)
class Interval:
    """Elapsed time from an anchor, which is no instant itself. Raises ValueError on nothing."""

    every: timedelta
    anchor: datetime
    zone: str = "UTC"
    """Where its instants are shown."""

    def __post_init__(self) -> None:
        if self.every < _SECOND:
            raise ValueError(f"an interval of {self.every} is not allowed; allowed: 1s or more")
        _require_aware(self.anchor)

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Yield its instants after one, forever."""
        anchor = self.anchor.astimezone(UTC).replace(microsecond=0)
        number = max((instant - anchor) // self.every, 0) + 1
        while True:
            yield anchor + number * self.every
            number += 1


Schedule = Cron | Interval


def next_instant(schedule: Schedule, after: datetime) -> datetime:
    """Return the first instant of a schedule after one, in UTC. Raises ValueError on naive time."""
    return next(_instants(schedule, after))


def instants(schedule: Schedule, after: datetime, until: datetime) -> Iterator[datetime]:
    """Yield the instants after one, up to and including another, in UTC."""
    _require_aware(until)
    return takewhile(lambda instant: instant <= until, _instants(schedule, after))


def next_three(schedule: Schedule, after: datetime) -> tuple[datetime, ...]:
    """Return the next three instants, in UTC: what people look at before they save a schedule."""
    return tuple(islice(_instants(schedule, after), 3))


def _instants(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    _require_aware(after)
    return schedule.after(after.astimezone(UTC))


def _require_aware(instant: datetime) -> None:
    if instant.tzinfo is None:
        raise ValueError(f"{instant.isoformat()} has no time zone; use UTC")


def _elapsed(text: str, zone: ZoneInfo, after: datetime) -> Iterator[datetime]:
    """Walk from one change of the clocks to the next; between two the wall clock is even."""
    begin, last = after, after
    while True:
        shift, even_until, change = offset(zone, begin), begin, None
        for wall in CronSim(text, _naive(last, shift)):
            instant = wall.replace(tzinfo=UTC) - shift
            if instant > even_until:
                change = next_change(zone, even_until, instant)
                if change is not None:
                    break
                # A day ahead at once: a minutely schedule asks a thousand times a day.
                ahead = instant + _DAY
                even_until = instant if next_change(zone, instant, ahead) else ahead
            yield instant
        if change is None:
            return
        begin, last = change, change - _SECOND


def _by_local_day(text: str, zone: ZoneInfo, after: datetime) -> Iterator[datetime]:
    """Walk through wall times; leapt-over ones move, repeated ones are met once."""
    last = after
    for wall in CronSim(text, _naive(after, offset(zone, after))):
        instant = _first_occurrence(wall, zone)
        # In a repeated hour, wall times that have run already lie ahead once more.
        if instant is not None and instant > last:
            yield instant
            last = instant


def _first_occurrence(wall: datetime, zone: ZoneInfo) -> datetime | None:
    """Return when a wall time is first shown, the end of the leap over it, or None."""
    early, late = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (1, 0))
    if early >= late:
        return late
    # Only of a time that is leapt over does the second occurrence come first.
    if late - early >= _CORRECTION:
        return None
    return next_change(zone, early, late)


def _naive(instant: datetime, shift: timedelta) -> datetime:
    return (instant + shift).replace(tzinfo=None)
