"""The running parts of the service, each with the time it was last seen: by the database's clock.

A row is no lease: nothing follows from it but what people and health pages are shown.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.store import clock
from quantwatch.store.tables import ComponentRow

FORGOTTEN_AFTER = timedelta(days=1)
"""A part that nobody has seen for so long is dropped from the list."""


@dataclass(frozen=True, slots=True)
class Component:
    """A part: scheduler, worker, delivery or metrics of one process."""

    id: str
    kind: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A part as it was last seen."""

    component: Component
    age: timedelta
    details: Json


def note_seen(session: Session, component: Component, details: Json) -> None:
    """Say that a part is alive; `details` replace those before."""
    moment = clock.now(session)
    row = {
        "id": component.id,
        "kind": component.kind,
        "host": component.host,
        "pid": component.pid,
        "started_at": moment,
        "seen_at": moment,
        "details": dict(details),
    }
    changed = {"seen_at": moment, "details": dict(details)}
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    new = dialect.insert(ComponentRow).values(**row)
    session.execute(new.on_conflict_do_update(index_elements=["id"], set_=changed))


def note_gone(session: Session, ids: list[str]) -> None:
    """Take parts that ended cleanly off the list, and those that nobody has seen for a day."""
    long_ago = clock.now(session) - FORGOTTEN_AFTER
    session.execute(
        delete(ComponentRow).where(ComponentRow.id.in_(ids) | (ComponentRow.seen_at < long_ago))
    )


def list_components(session: Session) -> list[Seen]:
    """Return all parts, newest seen first."""
    moment: datetime = clock.now(session)
    rows = session.scalars(select(ComponentRow).order_by(ComponentRow.seen_at.desc()))
    return [
        Seen(
            Component(row.id, row.kind, row.host, row.pid), moment - row.seen_at, row.details or {}
        )
        for row in rows
    ]
