"""A check's schedule section as values: instants, jitter, grace and limits."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from quantwatch.config.durations import seconds
from quantwatch.config.watching import MaintenanceConfig, ScheduleConfig
from quantwatch.schedules import Cron, Interval, Schedule, Window, jitter_of


@dataclass(frozen=True, slots=True)
class Plan:
    """When a check runs, and within which limits."""

    schedule: Schedule
    jitter: timedelta
    grace: timedelta
    catch_up: bool
    deadline_s: float
    attempts: int


def plan_of(check: str, section: ScheduleConfig, anchor: datetime) -> Plan:
    """Return the plan of a check; `anchor` is where an interval counts from."""
    return Plan(
        schedule=schedule_of(section, anchor),
        jitter=jitter_of(check, length(section.jitter)),
        grace=length(section.grace),
        catch_up=section.catch_up == "latest",
        deadline_s=float(seconds(section.deadline)),
        attempts=section.attempts,
    )


def schedule_of(section: ScheduleConfig, anchor: datetime) -> Schedule:
    """Return the instants of a schedule section."""
    if section.cron is not None:
        return Cron(section.cron, section.zone)
    assert section.every is not None
    return Interval(length(section.every), anchor, section.zone)


def window_of(section: MaintenanceConfig) -> Window:
    """Return the windows of a maintenance section."""
    return Window(Cron(section.cron, section.zone), length(section.length))


def length(text: str) -> timedelta:
    """Return a length of time that was validated, e.g. 6h."""
    return timedelta(seconds=seconds(text))
