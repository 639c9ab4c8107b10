"""What endpoints have not got: what waits, dead letters, and the newest that was delivered."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from quantwatch.store.dead_letters import DEAD, DELIVERED, ENDED
from quantwatch.store.tables import DeliveryRow

_AT_ONCE = 500
"""SQLite takes a limited number of values in one query."""


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
        select(row.endpoint, func.count(), func.max(row.ended_at))
        .where(row.state == DEAD)
        .group_by(row.endpoint)
    ).all()
    found = {name: Load(name, count, oldest) for name, count, oldest in waiting}
    for name, count, died in dead:
        known = found.get(name, Load(name))
        error = _last_error(session, name, died)
        found[name] = replace(known, num_dead=count, died_at=died, last_error=error)
    return found


def _last_error(session: Session, endpoint: str, died_at: datetime | None) -> str | None:
    """Return why the last one died: it may have been written long before others that are dead."""
    row = DeliveryRow
    query = select(row.last_error).where(row.state == DEAD, row.endpoint == endpoint)
    return session.scalar(query.where(row.ended_at == died_at).order_by(row.id.desc()).limit(1))


def lacking_by_state(session: Session) -> dict[str, int]:
    """Return how many deliveries are in each state of those that wait, are on their way or dead."""
    row = DeliveryRow
    # Two queries: each has an index of its own, and neither reads what was delivered.
    waiting = select(row.state, func.count()).where(row.ended_at.is_(None)).group_by(row.state)
    dead = select(func.count()).where(row.state == DEAD)
    found = {row[0]: row[1] for row in session.execute(waiting)}
    number = session.scalar(dead) or 0
    return found | ({DEAD: number} if number else {})


def ended_by_state(session: Session) -> dict[str, int]:
    """Return how many deliveries are in each state of those that ended well: a year of them."""
    row = DeliveryRow
    query = select(row.state, func.count()).where(row.state.in_(ENDED)).group_by(row.state)
    return {row[0]: row[1] for row in session.execute(query)}
