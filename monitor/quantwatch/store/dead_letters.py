"""Deliveries as people see them: what waits, what is dead, and how it is told again."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import clock
from quantwatch.store.deliveries import Attempt, Message
from quantwatch.store.digests import DIGEST, end_members, suppress_all
from quantwatch.store.session import Database
from quantwatch.store.suppression import WAITING
from quantwatch.store.tables import DeliveryAttemptRow, DeliveryRow, EventRow

DEAD, DELIVERED = "dead", "delivered"
ENDED = (DELIVERED, "suppressed", "cancelled")
"""States of a delivery that nobody has to look at."""
STATES = (*("pending", "sending", "retry_wait", "grouped"), DELIVERED, DEAD, *ENDED[1:])


@dataclass(frozen=True, slots=True)
class Delivery:
    """One line of the delivery log."""

    id: int
    event_id: str
    type: str
    endpoint: str
    subject: str
    state: str
    attempt: int
    created_at: datetime
    next_at: datetime
    ended_at: datetime | None
    last_status: int | None
    last_error: str | None
    duration_s: float | None
    """Of the last attempt."""


def list_deliveries(
    db: Database, *, state: str | None = None, endpoint: str | None = None, limit: int = 50
) -> list[Delivery]:
    """Return deliveries, newest first. Raises UserError on an unknown state."""
    if state is not None and state not in STATES:
        raise UserError(f"There is no state {state!r}; allowed: {', '.join(STATES)}.")
    query = (
        select(DeliveryRow, EventRow.type, _last_duration())
        .join(EventRow, EventRow.id == DeliveryRow.event_id)
        .order_by(DeliveryRow.id.desc())
        .limit(limit)
    )
    if state is not None:
        query = query.where(DeliveryRow.state == state)
    if endpoint is not None:
        query = query.where(to_endpoint(endpoint))
    with db.reader() as session:
        return [_delivery(*row) for row in session.execute(query)]


def last_attempt(session: Session, message: Message) -> Attempt:
    """Return the last attempt of a delivery, without what the receiver said."""
    row = session.scalars(
        select(DeliveryAttemptRow)
        .where(DeliveryAttemptRow.delivery_id == message.delivery_id)
        .order_by(DeliveryAttemptRow.number.desc())
        .limit(1)
    ).one()
    state = session.get_one(DeliveryRow, message.delivery_id).state
    return Attempt(state, row.at, True, row.duration_s, row.status, row.error_code)


def bury(session: Session, condition: ColumnElement[bool], why: str) -> int:
    """Make dead letters of what waits under a condition, and of what its digests carry.

    Return how many. What nobody can hear of any more is suppressed.
    """
    values = {"state": DEAD, "ended_at": clock.now(session), "last_error": why}
    waiting = and_(condition, DeliveryRow.state.in_(WAITING))
    change = update(DeliveryRow).where(waiting).values(values)
    change = change.returning(DeliveryRow.endpoint, DeliveryRow.subject)
    rows = session.execute(change).all()
    if not rows:
        return 0
    suppress_all(session, {(row.endpoint, row.subject) for row in rows})
    carriers = {row.endpoint for row in rows if row.subject.startswith(f"{DIGEST}:")}
    return len(rows) + end_members(session, DeliveryRow.endpoint.in_(carriers))


def to_endpoint(name: str) -> ColumnElement[bool]:
    """Return the condition: told to that endpoint."""
    return DeliveryRow.endpoint == name


def to_unknown(names: Sequence[str], before: datetime) -> ColumnElement[bool]:
    """Return the condition: told to none of these endpoints, and waiting since before then."""
    return and_(DeliveryRow.endpoint.not_in(names), DeliveryRow.created_at < before)


def oldest_open_at(session: Session) -> datetime | None:
    """Return since when the oldest delivery that has not ended waits."""
    is_open = DeliveryRow.ended_at.is_(None)
    return session.scalar(select(func.min(DeliveryRow.created_at)).where(is_open))


def _last_duration() -> ColumnElement[float | None]:
    return (
        select(DeliveryAttemptRow.duration_s)
        .where(DeliveryAttemptRow.delivery_id == DeliveryRow.id)
        .order_by(DeliveryAttemptRow.number.desc())
        .limit(1)
        .scalar_subquery()
    )


def _delivery(row: DeliveryRow, kind: str, duration_s: float | None) -> Delivery:
    own = {name: getattr(row, name) for name in Delivery.__slots__ if hasattr(row, name)}
    return Delivery(**own, type=kind, duration_s=duration_s)
