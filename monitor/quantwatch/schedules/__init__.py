"""When something is due: cron text in a zone or an interval, as UTC instants. Pure, no clock."""

from quantwatch.schedules.cron import parse_cron
from quantwatch.schedules.instants import (
    Cron,
    Interval,
    Schedule,
    instants,
    next_instant,
    next_three,
)
from quantwatch.schedules.jitter import jitter_of
from quantwatch.schedules.windows import Window
from quantwatch.schedules.zones import parse_zone

__all__ = [
    "Cron",
    "Interval",
    "Schedule",
    "Window",
    "instants",
    "jitter_of",
    "next_instant",
    "next_three",
    "parse_cron",
    "parse_zone",
]
