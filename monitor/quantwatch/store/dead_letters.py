"""Deliveries as people see them: what waits, what is dead, and how it is told again."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import audit, clock
from quantwatch.store.deliveries import DIGEST, Attempt, Message
from quantwatch.store.session import Database
from quantwatch.store.suppression import WAITING
from quantwatch.store.tables import DeliveryAttemptRow, DeliveryRow, EndpointRow, EventRow

STATES = (
    *("pending", "sending", "retry_wait", "grouped"),
    *("delivered", "dead", "suppressed", "cancelled"),
)


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


def list_deliveries(db: Database, *, state: str | None = None, limit: int = 50) -> list[Delivery]:
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
    with db.reader() as session:
        return [_delivery(*row) for row in session.execute(query)]


def replay(db: Database, event_id: str, actor: str, *, again: bool = False) -> int:
    """Tell an event again where it is dead, with `again` also where it was delivered.

    Return the number of deliveries; each keeps its id and body.
    Raises UserError when there is nothing to tell, or a receiver is disabled.
    """
    states = ("dead", "delivered") if again else ("dead",)
    with db.writer() as session:
        event = session.get(EventRow, event_id)
        if event is None or event.type == DIGEST:
            what = "a digest, replay what it carried" if event else "no event"
            raise UserError(f"{event_id} is {what}; `quantwatch deliveries list` shows all.")
        mine = DeliveryRow.event_id == event_id
        count = _revive(session, and_(mine, DeliveryRow.state.in_(states)))
        if count == 0:
            wanted = " or ".join(states)
            raise UserError(f"No delivery of {event_id} is {wanted}: {_now(session, mine)}.")
        audit.note(session, actor, "delivery.replay", event_id, None, {"deliveries": count})
    return count


def replay_dead(db: Database, since: datetime | timedelta, actor: str) -> int:
    """Tell everything again that became a dead letter since then, or for so long; return how many.

    A digest is not told again but what it carried. Raises UserError when a receiver is disabled.
    """
    digests = select(EventRow.id).where(EventRow.type == DIGEST)
    with db.writer() as session:
        start = clock.now(session) - since if isinstance(since, timedelta) else since
        dead = and_(
            DeliveryRow.state == "dead",
            DeliveryRow.ended_at >= start,
            DeliveryRow.event_id.not_in(digests),
        )
        count = _revive(session, dead)
        told = {"since": start.isoformat(), "deliveries": count}
        audit.note(session, actor, "delivery.replay", "dead letters", None, told)
    return count


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
    """Make dead letters of what waits under a condition; return how many."""
    values = {"state": "dead", "ended_at": clock.now(session), "last_error": why}
    waiting = and_(condition, DeliveryRow.state.in_(WAITING))
    change = update(DeliveryRow).where(waiting).values(values).returning(DeliveryRow.id)
    return len(session.scalars(change).all())


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


def _revive(session: Session, condition: ColumnElement[bool]) -> int:
    """Let deliveries wait again, as if they had never been tried."""
    _require_enabled(session, condition)
    moment = clock.now(session)
    values = {
        "state": "pending",
        "attempt": 0,
        "next_at": moment,
        "ended_at": None,
        "digest_id": None,
    }
    change = update(DeliveryRow).where(condition).values(values).returning(DeliveryRow.id)
    return len(session.scalars(change).all())


def _require_enabled(session: Session, condition: ColumnElement[bool]) -> None:
    query = (
        select(EndpointRow.name, EndpointRow.state)
        .join(DeliveryRow, DeliveryRow.endpoint == EndpointRow.name)
        .where(condition, EndpointRow.state != "enabled")
    )
    found = session.execute(query.limit(1)).first()
    if found is not None:
        name, state = found
        raise UserError(
            f"Endpoint {name} is {state}; mend it and run `quantwatch endpoints enable {name}`."
        )


def _now(session: Session, mine: ColumnElement[bool]) -> str:
    query = select(DeliveryRow.endpoint, DeliveryRow.state).where(mine).order_by("endpoint")
    rows = [f"{endpoint} {state}" for endpoint, state in session.execute(query)]
    return ", ".join(rows) or "it was for nobody"


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
