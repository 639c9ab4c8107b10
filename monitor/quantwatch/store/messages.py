"""What was told: the messages on one subject, and how each endpoint stands."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from quantwatch.store.suppression import told
from quantwatch.store.tables import DeliveryRow, EventRow

DEAD, DELIVERED = "dead", "delivered"
_MOST_EVENTS = 200
_AT_ONCE = 500
"""SQLite takes a limited number of values in one query."""
_SKEW = timedelta(hours=1)
"""A message is written soon after what it tells; clocks may differ."""


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
class Addressed:
    """A delivery that waits, is on its way, or is a dead letter; or the newest delivered one."""

    endpoint: str
    subject: str
    state: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Load:
    """What an endpoint has not got: waiting deliveries and dead letters."""

    endpoint: str
    num_waiting: int = 0
    oldest_at: datetime | None = None
    """Since when the oldest that waits does so."""
    num_dead: int = 0
    died_at: datetime | None = None
    """When the last one became a dead letter."""
    last_error: str | None = None
    """Of the last dead letter."""


def messages_on(
    session: Session, subject: str, episode_id: str, since: datetime, until: datetime | None = None
) -> tuple[Sent, ...]:
    """Return the messages on an episode, oldest first; `until` is its end, None while open."""
    query = select(EventRow).where(
        EventRow.subject == subject, EventRow.occurred_at >= since - _SKEW
    )
    if until is not None:
        query = query.where(EventRow.occurred_at <= until + _SKEW)
    events = session.scalars(query.order_by(EventRow.seq.desc()).limit(_MOST_EVENTS)).all()
    kept = [
        (event, certain)
        for event in reversed(events)
        if (certain := _about(event, episode_id)) is not None
    ]
    handed = _handed(session, [event.id for event, _ in kept])
    return tuple(
        Sent(event.id, event.type, event.occurred_at, certain, tuple(handed.get(event.id, ())))
        for event, certain in kept
    )


def addressed(
    session: Session, subjects: Collection[str], endpoints: Collection[str]
) -> tuple[Addressed, ...]:
    """Return what of these subjects endpoints have not got, and the newest of what they have."""
    if not subjects:
        return ()
    row = DeliveryRow
    columns = select(row.endpoint, row.subject, row.state, row.created_at)
    # Two queries: each has an index of its own.
    conditions = (row.ended_at.is_(None), row.state == DEAD)
    found = [each for one in conditions for each in session.execute(columns.where(one))]
    lacking = tuple(Addressed(*each) for each in found if each.subject in subjects)
    return lacking + _delivered(session, sorted(subjects), sorted(endpoints))


def _delivered(
    session: Session, subjects: Sequence[str], endpoints: Sequence[str]
) -> tuple[Addressed, ...]:
    row = DeliveryRow
    query = (
        select(row.endpoint, row.subject, func.max(row.created_at))
        .where(row.state == DELIVERED, row.endpoint.in_(endpoints))
        .group_by(row.endpoint, row.subject)
    )
    return tuple(
        Addressed(endpoint, subject, DELIVERED, newest)
        for first in range(0, len(subjects), _AT_ONCE)
        for endpoint, subject, newest in session.execute(
            query.where(row.subject.in_(subjects[first : first + _AT_ONCE]))
        )
    )


def loads(session: Session) -> dict[str, Load]:
    """Return what every endpoint has not got, of those that lack anything."""
    row = DeliveryRow
    waiting = session.execute(
        select(row.endpoint, func.count(), func.min(row.created_at))
        .where(row.ended_at.is_(None))
        .group_by(row.endpoint)
    ).all()
    dead = session.execute(
        select(row.endpoint, func.count(), func.max(row.ended_at), func.max(row.id))
        .where(row.state == DEAD)
        .group_by(row.endpoint)
    ).all()
    errors = _errors(session, [each[3] for each in dead])
    found = {name: Load(name, count, oldest) for name, count, oldest in waiting}
    for name, count, died, last in dead:
        known = found.get(name, Load(name))
        found[name] = replace(known, num_dead=count, died_at=died, last_error=errors.get(last))
    return found


def _errors(session: Session, ids: Collection[int]) -> dict[int, str | None]:
    query = select(DeliveryRow.id, DeliveryRow.last_error).where(DeliveryRow.id.in_(list(ids)))
    return {row.id: row.last_error for row in session.execute(query)}


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
