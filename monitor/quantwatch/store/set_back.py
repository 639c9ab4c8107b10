"""Runs from the future: the database's clock ran ahead when they were written, and was set back.

Their times are moved back with it. A run whose worker lives is beaten on in any case; a dead one's
lease ends after its length, and a waiting one waits no longer than it should.
"""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, or_, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus
from quantwatch.store import clock
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow

MARGIN = timedelta(seconds=30)
"""Less than this is left alone: clocks are nudged all the time."""
_UNENDED = [status.value for status in RunStatus if not status.is_ended]
_MOVED = ("heartbeat_at", "lease_until", "deadline_at", "not_before")


def bring_back(db: Database) -> int:
    """Move runs that were touched in the future to now; return how many there were."""
    with db.reader() as session:
        if session.execute(_from_the_future(clock.now(session)).limit(1)).first() is None:
            return 0
    with db.writer() as session:
        return _bring_back(session)


def _bring_back(session: Session) -> int:
    moment = clock.now(session)
    rows = session.execute(_from_the_future(moment).with_for_update()).all()
    for row in rows:
        values = _corrected(row._mapping, moment)
        session.execute(update(RunRow).where(RunRow.id == row.id).values(values))
    return len(rows)


def _from_the_future(moment: datetime) -> Select[*tuple[Any, ...]]:
    written = (RunRow.heartbeat_at, RunRow.queued_at, RunRow.cancel_requested_at)
    columns = [getattr(RunRow, name) for name in _MOVED]
    return (
        select(RunRow.id, RunRow.queued_at, RunRow.cancel_requested_at, *columns)
        .where(RunRow.status.in_(_UNENDED))
        .where(or_(*(column > moment + MARGIN for column in written)))
        .order_by(RunRow.id)
    )


def _corrected(row: Any, moment: datetime) -> dict[str, datetime]:
    """Return the columns that change: what was written in the future was written now."""
    values: dict[str, datetime] = {}
    beaten, queued, asked = row["heartbeat_at"], row["queued_at"], row["cancel_requested_at"]
    if beaten is not None and beaten > moment:
        values = {k: row[k] - (beaten - moment) for k in _MOVED if row[k] is not None}
    if queued is not None and queued > moment:
        values["queued_at"] = moment
        values.setdefault("not_before", (row["not_before"] or queued) - (queued - moment))
    if asked is not None and asked > moment:
        values["cancel_requested_at"] = moment
    return values
