"""What was told on a run: the events that name it."""

import json
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select

from quantwatch.errors import UserError
from quantwatch.store.session import Database
from quantwatch.store.tables import EventRow, RunRow

_MOST_LOOKED_AT = 5000
_SKEW = timedelta(hours=1)
"""A worker's clock may be ahead of the database's."""


@dataclass(frozen=True, slots=True)
class Told:
    """An event as it was written."""

    event_id: str
    type: str
    subject: str
    body: bytes


def told_on(db: Database, run_id: str) -> list[Told]:
    """Return the messages on alerts that a run led to, oldest first.

    Raises UserError when there are none: it raised and ended no alert, or they were deleted.
    """
    with db.reader() as session:
        began = session.get_one(RunRow, run_id).started_at - _SKEW
        query = (
            select(EventRow.id, EventRow.type, EventRow.subject, EventRow.body)
            # A run is told of soon after it: later events are only looked at until then.
            .where(EventRow.occurred_at >= began, EventRow.type.startswith("alert."))
            .order_by(EventRow.occurred_at, EventRow.id)
            .limit(_MOST_LOOKED_AT)
        )
        rows = [Told(*row) for row in session.execute(query)]
    found = [row for row in rows if (json.loads(row.body).get("data") or {}).get("run") == run_id]
    if not found:
        raise UserError(f"Run {run_id} has no message: no alert began or ended with it.")
    return found
