"""When a check runs: its schedule in words, and its next runs."""

from collections.abc import Mapping
from datetime import datetime, timedelta, tzinfo
from typing import Any

from quantwatch.config.parsing import parse
from quantwatch.config.plans import schedule_of
from quantwatch.config.watching import ScheduleConfig
from quantwatch.errors import ConfigError
from quantwatch.schedules import Interval, next_three
from quantwatch.store.states import CheckState
from quantwatch.store.timetables import Planned, Timetable
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, soft, tag
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.standings import is_late


def next_run(state: CheckState, now: datetime, zone: tzinfo) -> Html:
    """Return when a check runs next, with its schedule, or why it does not."""
    found = next_slot(state, now, zone, busy=bool(state.unended))
    rhythm = state.timetable
    if rhythm is None or state.paused_at or state.quarantined_at or rhythm.trouble:
        return found
    return join([found, tag("span", words(rhythm.settings), class_="qw-sub")])


def next_slot(state: CheckState | Planned, now: datetime, zone: tzinfo, *, busy: bool) -> Html:
    """Return when a check runs next, or why it does not; `busy` when a run has not ended."""
    timetable = state.timetable
    if state.paused_at is not None:
        return soft("paused")
    if state.quarantined_at is not None:
        return soft("in quarantine")
    if timetable is None:
        return soft("by hand only")
    if timetable.trouble:
        return tag("span", text.clip(timetable.trouble, 80), class_="qw-hot qw-small")
    return _planned(timetable, now, zone, busy=busy)


def _planned(timetable: Timetable, now: datetime, zone: tzinfo, *, busy: bool) -> Html:
    due = timetable.next_slot_at or next(iter(next_runs(timetable, now)), None)
    if due is None:
        return soft("not planned yet")
    when = moment(due, now, zone)
    if due < now:
        when = join(["due ", when])
    if is_late(timetable, now) and not busy:
        why = "Nothing schedules it: does the service run?"
        return tag("span", "over", when, class_="qw-hot", title=why)
    return when


def words(settings: Mapping[str, Any]) -> str:
    """Return a schedule as it was configured: ``17 2 * * * Europe/Berlin``, ``every 6h``."""
    if settings.get("every"):
        return f"every {settings['every']}"
    cron, zone = settings.get("cron"), settings.get("zone") or "UTC"
    return f"{cron} {zone}" if cron else "no schedule"


def next_runs(timetable: Timetable, now: datetime) -> tuple[datetime, ...]:
    """Return the next nominal instants; () when the schedule can't be read any more."""
    try:
        section = parse(ScheduleConfig, timetable.settings, "schedule")
    except ConfigError:
        return ()
    known = timetable.next_slot_at or timetable.last_slot_at
    schedule = schedule_of(section, known or now)
    if not isinstance(schedule, Interval):
        return next_three(schedule, now)
    if timetable.next_slot_at is None:
        return ()
    # An interval counts from its anchor, and every slot of it is as good an anchor.
    first = timetable.next_slot_at
    if first > now:
        return (first, *next_three(schedule, first)[:2])
    return next_three(schedule, max(now, first + timedelta(seconds=1)))
