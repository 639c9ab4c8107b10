"""Schedules as people are shown them: when each check runs next, or why it doesn't."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.store.tables import CheckRow, ScheduleRow


@dataclass(frozen=True, slots=True)
class Timetable:
    """A check's schedule: the next nominal instant, or why there is none."""

    settings: Json
    next_slot_at: datetime | None
    last_slot_at: datetime | None
    trouble: str | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A check's schedule and when it runs next; None where nothing was computed."""

    check: str
    timetable: Timetable
    paused_at: datetime | None
    quarantined_at: datetime | None


def planned(session: Session) -> tuple[Planned, ...]:
    """Return the schedules of all checks in use, by name.

    Unlike the scheduler's own query it does not look for runs: that reads a year of them.
    """
    query = (
        select(ScheduleRow, CheckRow)
        .join(CheckRow, CheckRow.id == ScheduleRow.check_id)
        .where(CheckRow.removed_at.is_(None))
        .order_by(CheckRow.name)
    )
    return tuple(
        Planned(
            check.name,
            Timetable(row.settings, row.next_slot_at, row.last_slot_at, row.trouble),
            check.paused_at,
            check.quarantined_at,
        )
        for row, check in session.execute(query)
    )
