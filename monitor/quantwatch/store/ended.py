"""Runs that ended lately: what an external dead man is told."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus
from quantwatch.store import clock
from quantwatch.store.tables import CheckRow, RunRow

_TOLD = (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.TIMED_OUT, RunStatus.ABANDONED)
"""Nobody waits for a run that somebody cancelled, or that was skipped."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over."""

    run_id: str
    check: str
    status: RunStatus
    finished_at: datetime


def ended_within(session: Session, length: timedelta, known: Collection[str]) -> list[Ended]:
    """Return the runs that ended in the last `length`, oldest first, without the known ones."""
    since = clock.now(session) - length
    rows = session.execute(
        select(RunRow.id, CheckRow.name, RunRow.status, RunRow.finished_at)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunRow.finished_at >= since, RunRow.status.in_([each.value for each in _TOLD]))
        .order_by(RunRow.finished_at, RunRow.id)
    )
    return [
        Ended(row.id, row.name, RunStatus(row.status), row.finished_at)
        for row in rows
        if row.id not in known and row.finished_at is not None
    ]
