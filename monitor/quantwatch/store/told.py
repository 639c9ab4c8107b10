"""What was told: the events that name a run, and the messages on an episode."""

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store.session import Database
from quantwatch.store.suppression import told
from quantwatch.store.tables import DeliveryRow, EventRow, RunRow

_MOST_LOOKED_AT = 5000
_SKEW = timedelta(hours=1)
"""A message is written soon after what it tells; clocks may differ."""


_MOST_FIRST, _MOST_LAST = 100, 200
"""Messages on a subject that are looked through, at the beginning and at the end."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One message for one endpoint, and how that went."""

    endpoint: str
    state: str
    attempt: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Sent:
    """One message on a subject, for whomever it was meant."""

    event_id: str
    type: str
    at: datetime
    is_certain: bool
    """Whether it names the episode that was asked for; else it may be among those counted only."""
    handed: tuple[Handed, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages on an episode, oldest first.

    Of very many on its subject those in the middle are not looked at: so many, since then.
    """

    sent: tuple[Sent, ...]
    num_left_out: int = 0
    left_out_at: datetime | None = None


NO_MESSAGES = Messages(())


@dataclass(frozen=True, slots=True)
class Written:
    """An event as it was written."""

    event_id: str
    type: str
    subject: str
    body: bytes


def told_on(db: Database, run_id: str) -> list[Written]:
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
        rows = [Written(*row) for row in session.execute(query)]
    found = [row for row in rows if (json.loads(row.body).get("data") or {}).get("run") == run_id]
    if not found:
        raise UserError(f"Run {run_id} has no message: no alert began or ended with it.")
    return found


def messages_on(
    session: Session, subject: str, episode_id: str, since: datetime, until: datetime | None = None
) -> Messages:
    """Return the messages on an episode; `until` is its end, None while it is open."""
    within = [EventRow.subject == subject, EventRow.occurred_at >= since - _SKEW]
    if until is not None:
        within.append(EventRow.occurred_at <= until + _SKEW)
    events = select(EventRow).where(*within)
    last = session.scalars(events.order_by(EventRow.seq.desc()).limit(_MOST_LAST)).all()[::-1]
    first: Sequence[EventRow] = ()
    left_out = 0
    if len(last) == _MOST_LAST:
        before = EventRow.seq < last[0].seq
        first = session.scalars(
            events.where(before).order_by(EventRow.seq).limit(_MOST_FIRST)
        ).all()
        number = session.scalar(select(func.count()).where(*within, before)) or 0
        left_out = number - len(first)
    kept = [
        (event, certain)
        for event in (*first, *last)
        if (certain := _about(event, episode_id)) is not None
    ]
    handed = _handed(session, [event.id for event, _ in kept])
    sent = tuple(
        Sent(event.id, event.type, event.occurred_at, certain, tuple(handed.get(event.id, ())))
        for event, certain in kept
    )
    return Messages(sent, left_out, first[-1].occurred_at if left_out else None)


def _about(event: EventRow, episode_id: str) -> bool | None:
    """Say whether a message names an episode; None when it is about others only."""
    found = told(0, "", left_machine=False, event=(event.type, event.body))
    if episode_id in found.episodes:
        return True
    return None if found.complete else False


def _handed(session: Session, event_ids: Collection[str]) -> dict[str, list[Handed]]:
    names = Handed.__slots__
    query = select(DeliveryRow).where(DeliveryRow.event_id.in_(list(event_ids)))
    found: dict[str, list[Handed]] = defaultdict(list)
    for row in session.scalars(query.order_by(DeliveryRow.endpoint)):
        found[row.event_id].append(Handed(**{name: getattr(row, name) for name in names}))
    return found
