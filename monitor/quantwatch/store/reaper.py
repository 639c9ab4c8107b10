"""Runs that nobody cares for any more: found by the database's clock, ended or queued again.

Any process may do it, several at once: each run is taken in a transaction of its own, under a
guard, so one of them wins. Nothing stays active longer than its lease and two rounds of this.
"""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session

from quantwatch.domain import RunEvent, RunStatus
from quantwatch.errors import LeaseLostError, QuantwatchError
from quantwatch.observability import logs
from quantwatch.store import clock
from quantwatch.store.attempts import Failure
from quantwatch.store.endings import Held, Tell, Trouble, end, end_lost, hold_still
from quantwatch.store.leases import LEASE_S
from quantwatch.store.session import Database
from quantwatch.store.set_back import bring_back
from quantwatch.store.tables import RunRow

log = logs.get(__name__)
REAP_EVERY_S = 15.0
GRACE = timedelta(seconds=60)
"""How long a worker may take to end what was cancelled or is overdue."""
Why = Literal["cancelled", "overdue", "lost"]
_ACTIVE = [status.value for status in RunStatus if status.is_active]
_LOST = Failure("lease_lost", "its worker stopped renewing the lease: killed, hung or cut off")
_OVERDUE = Failure("deadline", "ran past its deadline, and its worker did not end it")
_CANCELLED = Failure("user", "cancelled; its worker did not end it")


def reap(db: Database, tell: Tell | None = None) -> list[Trouble]:
    """End or queue again every run whose lease, deadline or cancellation nobody heeds.

    Raises StoreError when the database can't be used; a run that can't be ended is only logged.
    """
    if moved := bring_back(db):
        log.warning("the clock was set back; leases are counted from now", runs=moved)
    with db.reader() as session:
        moment = clock.now(session)
        overdue = [row.id for row in session.execute(_neglected(moment))]
    return one_by_one(overdue, lambda run_id: _reap_one(db, run_id, tell))


def one_by_one(run_ids: Iterable[str], end_one: Callable[[str], Trouble | None]) -> list[Trouble]:
    """End runs; one that is locked, or can't be told of, keeps no other from its end."""
    found: list[Trouble] = []
    for run_id in run_ids:
        try:
            trouble = end_one(run_id)
        except QuantwatchError as error:
            # It is found again in the next round.
            log.error("a run can't be ended", error, run=run_id)  # noqa: PLE1205 - no logging.Logger
        else:
            found += [] if trouble is None else [trouble]
    return found


def _reap_one(db: Database, run_id: str, tell: Tell | None) -> Trouble | None:
    """Return None when the run was taken care of by somebody else meanwhile."""
    try:
        with db.writer() as session:
            run = hold_still(session, run_id)
            why = None if run is None else _why(session, run_id)
            if run is None or why is None:
                return None
            return _end(session, run, why, tell)
    except LeaseLostError:
        return None


def _end(session: Session, run: Held, why: Why, tell: Tell | None) -> Trouble:
    if why == "cancelled":
        return end(session, run, RunEvent.CANCEL, _CANCELLED, tell)
    if why == "overdue":
        return end(session, run, RunEvent.TIME_OUT, _OVERDUE, tell)
    return end_lost(session, run, _LOST, tell)


def _why(session: Session, run_id: str) -> Why | None:
    """Look again, now that nobody else can change it."""
    moment = clock.now(session)
    row = session.execute(_neglected(moment).where(RunRow.id == run_id)).first()
    if row is None:
        return None
    if row.cancel_requested_at is not None and row.cancel_requested_at <= moment - GRACE:
        return "cancelled"
    if row.deadline_at is not None and row.deadline_at <= moment - GRACE:
        return "overdue"
    return "lost"


def _neglected(moment: datetime) -> Select[str, datetime | None, datetime | None]:
    # A run from before there were leases has none: it counts from its beginning.
    first_lease_ended = RunRow.started_at <= moment - timedelta(seconds=LEASE_S)
    return (
        select(RunRow.id, RunRow.cancel_requested_at, RunRow.deadline_at)
        .where(RunRow.status.in_(_ACTIVE))
        .where(
            or_(
                RunRow.lease_until <= moment,
                and_(RunRow.lease_until.is_(None), first_lease_ended),
                RunRow.deadline_at <= moment - GRACE,
                RunRow.cancel_requested_at <= moment - GRACE,
            )
        )
        .order_by(RunRow.id)
    )
