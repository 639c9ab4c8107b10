"""The outbox: what is told is written in the transaction in which it happened."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from quantwatch.store import clock
from quantwatch.store.lock_order import hold_outbox
from quantwatch.store.suppression import RESOLVING, WAITING, Told, suppressed, told
from quantwatch.store.tables import DeliveryRow, EventRow
from quantwatch.telemetry import new_run_id

_MOST_LOOKED_AT = 200
"""Deliveries of a subject that suppression looks back at."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that is told. All messages on one group of alerts share a subject.

    `alert.resolved` (for some of them `alert.updated`) is not told where none of the episodes that
    it ends (`data.alerts[].episode`) can have been heard of; what it makes untrue is not told any
    more (`suppression.py`).
    """

    type: str
    """alert.firing, alert.escalated, alert.reminder, alert.resolved, endpoint.…, test."""
    subject: str
    """What the order is kept for: an episode's group, or the endpoint itself."""
    body: Mapping[str, Any]
    """The versioned document {type, timestamp, data}; strict JSON, no NaN."""


def publish(session: Session, event: Event, endpoints: Sequence[str]) -> str:
    """Write an event and one pending delivery per endpoint in the caller's transaction.

    Return the event's id (ULID): the `webhook-id` of every attempt and replay.
    Raises ValueError on NaN or an infinity in the body, TypeError on what JSON can't hold.
    """
    body = canonical(event.body)
    hold_outbox(session)
    event_id, seq = new_run_id(), _next_seq(session, event.subject)
    moment = clock.now(session)
    row = {"id": event_id, "type": event.type, "subject": event.subject, "seq": seq}
    session.execute(insert(EventRow).values(**row, occurred_at=moment, body=body))
    new = {
        "event_id": event_id,
        "subject": event.subject,
        "seq": seq,
        "state": "pending",
        "attempt": 0,
        "created_at": moment,
        "next_at": moment,
        "left_machine": False,
    }
    names = list(dict.fromkeys(endpoints))
    if names:
        session.execute(insert(DeliveryRow), [{"endpoint": name, **new} for name in names])
    if event.type in RESOLVING:
        for name in sorted(names):
            suppress_untold(session, name, event.subject)
    return event_id


def canonical(body: Mapping[str, Any]) -> bytes:
    """Return a body as the bytes that are stored, signed and sent: UTF-8 JSON, keys sorted.

    Raises ValueError on NaN or an infinity, TypeError on what JSON can't hold.
    """
    words = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    # Half a surrogate pair, as token pieces have, becomes JSON's own escape.
    return words.encode("utf-8", "backslashreplace")


def suppress_untold(session: Session, endpoint: str, subject: str) -> int:
    """Suppress what was resolved before it was told; return how many deliveries.

    Called when a resolved event is published and after each failed attempt, by whoever holds the
    outbox.
    """
    ids = sorted(suppressed(_told(session, endpoint, subject)))
    if ids:
        values = {
            "state": "suppressed",
            "ended_at": clock.now(session),
            "last_error": "resolved before it was told",
        }
        session.execute(update(DeliveryRow).where(DeliveryRow.id.in_(ids)).values(values))
    return len(ids)


def _told(session: Session, endpoint: str, subject: str) -> list[Told]:
    """Return the subject's newest deliveries in order; none when no resolved one waits."""
    mine = DeliveryRow.endpoint == endpoint, DeliveryRow.subject == subject
    event = EventRow.id == DeliveryRow.event_id
    ending = EventRow.type.in_(RESOLVING), DeliveryRow.state.in_(WAITING)
    waiting = select(DeliveryRow.id).join(EventRow, event).where(*mine, *ending).limit(1)
    if session.scalar(waiting) is None:
        return []
    return history(session, endpoint, subject)


def history(session: Session, endpoint: str, subject: str) -> list[Told]:
    """Return the newest deliveries of a subject in their order; the caller holds the outbox."""
    columns = DeliveryRow.id, DeliveryRow.state, DeliveryRow.left_machine, EventRow.type
    query = (
        select(*columns, EventRow.body)
        .join(EventRow, EventRow.id == DeliveryRow.event_id)
        .where(DeliveryRow.endpoint == endpoint, DeliveryRow.subject == subject)
        .order_by(DeliveryRow.seq.desc())
        .limit(_MOST_LOOKED_AT)
    )
    rows = [
        told(id_, state, left_machine=left, event=(kind, body))
        for id_, state, left, kind, body in session.execute(query)
    ]
    return rows[::-1]


def _next_seq(session: Session, subject: str) -> int:
    """Return the next number of a subject, of which nobody else gives out any until the commit."""
    last = session.scalar(select(func.max(EventRow.seq)).where(EventRow.subject == subject))
    return 0 if last is None else last + 1
