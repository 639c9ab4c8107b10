"""Deliveries that wait, are on their way, or have ended: claimed, finished, taken back.

All functions belong to the caller's transaction, which holds the outbox (`lock_order`): two
deliverers never claim for one endpoint at once.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    and_,
    bindparam,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, aliased

from quantwatch.store import clock
from quantwatch.store.digests import DIGEST, carried_by, end_members, suppress_all
from quantwatch.store.suppression import WAITING
from quantwatch.store.tables import DeliveryAttemptRow, DeliveryRow, EventRow
from quantwatch.store.types import UtcDateTime

LOST = "lease_lost"
"""Error code of an attempt whose process went away."""


@dataclass(frozen=True, slots=True)
class Due:
    """An event that may be told now."""

    delivery_id: int
    event_id: str
    type: str
    subject: str
    body: bytes
    attempts: int
    """So far, since it was published or replayed."""


@dataclass(frozen=True, slots=True)
class Message:
    """A delivery that this process holds until `lease_until`."""

    delivery_id: int
    event_id: str
    type: str
    subject: str
    body: bytes
    endpoint: str
    attempt: int
    """1 is the first, also after a replay."""
    lease_token: str
    at: datetime
    """When it was claimed, by the database's clock: the attempt's time."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is written down of one try, and what becomes of the delivery."""

    state: str
    """delivered, retry_wait or dead."""
    next_at: datetime
    left_machine: bool
    duration_s: float
    status: int | None = None
    error_code: str | None = None
    error: str | None = None


_EVENTS = select(
    DeliveryRow.id,
    EventRow.id,
    EventRow.type,
    EventRow.subject,
    EventRow.body,
    DeliveryRow.attempt,
).join(EventRow, EventRow.id == DeliveryRow.event_id)


def _may_be_told() -> ColumnElement[bool]:
    """Return the condition, with the parameters `endpoint` and `now`."""
    earlier, now = aliased(DeliveryRow), bindparam("now", type_=UtcDateTime())
    blocked = exists().where(
        earlier.endpoint == DeliveryRow.endpoint,
        earlier.subject == DeliveryRow.subject,
        earlier.seq < DeliveryRow.seq,
        earlier.ended_at.is_(None),
        or_(earlier.state.not_in(WAITING), earlier.next_at > now),
    )
    return and_(
        DeliveryRow.endpoint == bindparam("endpoint"),
        DeliveryRow.ended_at.is_(None),
        DeliveryRow.state.in_(WAITING),
        DeliveryRow.next_at <= now,
        ~blocked,
    )


# Built once: they are asked for every message.
_ANY_DUE = select(DeliveryRow.id).where(_may_be_told()).limit(1).offset(bindparam("beyond"))
_DUE = _EVENTS.where(_may_be_told()).order_by(DeliveryRow.id).limit(bindparam("most"))


def is_due(session: Session, endpoint: str, beyond: int = 0) -> bool:
    """Say whether more than `beyond` messages may be told to an endpoint now; holds nothing."""
    values = {"endpoint": endpoint, "now": clock.now(session), "beyond": beyond}
    return session.execute(_ANY_DUE, values).first() is not None


def due(session: Session, endpoint: str, now: datetime, most: int) -> list[Due]:
    """Return what may be told now, oldest first.

    A message waits for all earlier ones of its subject, except for those that stand before it in
    this list: taking the list from its start keeps the order.
    """
    values = {"endpoint": endpoint, "now": now, "most": most}
    return [Due(*row) for row in session.execute(_DUE, values)]


def due_event(session: Session, event_id: str, endpoint: str) -> Due:
    """Return an event for an endpoint to which it was published."""
    query = _EVENTS.where(EventRow.id == event_id, DeliveryRow.endpoint == endpoint)
    return Due(*session.execute(query).one())


def take(
    session: Session, one: Due, endpoint: str, *, token: str, lease_s: float
) -> Message | None:
    """Hold a delivery that waits; None when it doesn't any more."""
    moment = clock.now(session)
    values = {
        "state": "sending",
        "attempt": DeliveryRow.attempt + 1,
        "lease_token": token,
        "lease_until": moment + timedelta(seconds=lease_s),
    }
    held = (
        update(DeliveryRow)
        .where(DeliveryRow.id == one.delivery_id, DeliveryRow.state.in_(WAITING))
        .values(values)
        .returning(DeliveryRow.attempt)
    )
    attempt = session.scalar(held)
    if attempt is None:
        return None
    return Message(
        one.delivery_id, one.event_id, one.type, one.subject, one.body, endpoint, attempt, token,
        moment,
    )  # fmt: skip


def finish(session: Session, message: Message, attempt: Attempt) -> bool:
    """Write down an attempt; False when the lease was lost and somebody else decides."""
    mine = and_(
        DeliveryRow.id == message.delivery_id,
        DeliveryRow.state == "sending",
        DeliveryRow.lease_token == message.lease_token,
    )
    ended = attempt.state != "retry_wait"
    values: dict[str, Any] = {
        "state": attempt.state,
        "next_at": attempt.next_at,
        "left_machine": or_(DeliveryRow.left_machine, literal(attempt.left_machine)),
        "last_status": attempt.status,
        "last_error": attempt.error,
        "ended_at": clock.now(session) if ended else None,
        **_RELEASED,
    }
    change = update(DeliveryRow).where(mine).values(values).returning(DeliveryRow.id)
    if session.scalar(change) is None:
        return False
    _note_attempt(session, message.delivery_id, message.at, attempt)
    if ended and message.type == DIGEST:
        end_members(session, carried_by(message.event_id, message.endpoint))
    return True


def take_back(session: Session, longest_s: float = 600.0) -> int:
    """Give back the deliveries whose lease is over, as sent perhaps; return how many.

    A lease of more than `longest_s` from now on was given when the clock was wrong.
    """
    moment = clock.now(session)
    until = DeliveryRow.lease_until
    over = or_(until < moment, until > moment + timedelta(seconds=longest_s))
    why = "the process that sent it went away"
    values = {"state": "retry_wait", "next_at": moment, "left_machine": True, "last_error": why}
    change = update(DeliveryRow).where(DeliveryRow.state == "sending", over)
    change = change.values(values | _RELEASED)
    rows = change.returning(DeliveryRow.id, DeliveryRow.endpoint, DeliveryRow.subject)
    found = session.execute(rows).all()
    attempt = Attempt("retry_wait", moment, True, 0.0, error_code=LOST, error=why)
    for row in found:
        _note_attempt(session, row.id, moment, attempt)
    suppress_all(session, {(row.endpoint, row.subject) for row in found})
    return len(found)


def mend_waits(session: Session, longest_s: float) -> int:
    """Let what was told to wait when the clock was wrong be due now; return how much that is.

    What was never tried waits for no moment at all, and nothing waits longer than `longest_s`.
    """
    moment = clock.now(session)
    longest = and_(
        DeliveryRow.state.in_(WAITING),
        DeliveryRow.next_at > moment + timedelta(seconds=longest_s),
    )
    untried = and_(DeliveryRow.state == "pending", DeliveryRow.next_at > moment)
    change = update(DeliveryRow).where(or_(longest, untried)).values(next_at=moment)
    return len(session.scalars(change.returning(DeliveryRow.id)).all())


_RELEASED: dict[str, Any] = {"lease_token": None, "lease_until": None}


def _note_attempt(session: Session, delivery_id: int, at: datetime, attempt: Attempt) -> None:
    number = select(func.coalesce(func.max(DeliveryAttemptRow.number), 0) + 1).where(
        DeliveryAttemptRow.delivery_id == delivery_id
    )
    values = {
        "delivery_id": delivery_id,
        "number": session.scalar(number),
        "at": at,
        "duration_s": attempt.duration_s,
        "status": attempt.status,
        "error_code": attempt.error_code,
        "error": attempt.error,
    }
    session.execute(insert(DeliveryAttemptRow).values(values))
