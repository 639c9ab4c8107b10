"""How the endpoints of the configuration have been doing. A changed setting starts anew."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import NotFoundError
from quantwatch.store import audit
from quantwatch.store.lock_order import hold_outbox
from quantwatch.store.lookups import insert_new
from quantwatch.store.session import Database
from quantwatch.store.tables import DeliveryRow, EndpointRow, EventRow

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
"""When a bucket was last counted that is full by now."""


@dataclass(frozen=True, slots=True)
class EndpointState:
    """A row of `endpoint`; the columns' docstrings say what each field means."""

    name: str
    state: str
    reason: str | None
    settings_sha: str
    failing_since: datetime | None
    num_failures: int
    failure_ratio: float
    last_success_at: datetime | None
    last_attempt_at: datetime | None
    tokens: float
    tokens_at: datetime


_FRESH = {
    "state": "enabled",
    "reason": None,
    "failing_since": None,
    "num_failures": 0,
    "failure_ratio": 0.0,
    "tokens": 0.0,
    "tokens_at": LONG_AGO,
}


def sync_endpoints(session: Session, settings: Mapping[str, str]) -> None:
    """Know each configured endpoint (name to digest of its settings); a changed one is enabled."""
    hold_outbox(session)
    rows = session.execute(select(EndpointRow.name, EndpointRow.settings_sha))
    known = {name: sha for name, sha in rows}  # noqa: C416 - a Row is no pair to mypy
    new = [
        {"name": name, "settings_sha": sha, **_FRESH}
        for name, sha in sorted(settings.items())
        if name not in known
    ]
    if new:
        session.execute(insert_new(session, EndpointRow), new)
    for name, sha in sorted(settings.items()):
        if known.get(name, sha) != sha:
            _change(session, name, {"settings_sha": sha, **_FRESH})


def lock_endpoint(session: Session, name: str) -> EndpointState:
    """Return an endpoint and hold the outbox: nobody else changes it, or what waits for it.

    Raises UserError when it is not known.
    """
    hold_outbox(session)
    query = select(EndpointRow).where(EndpointRow.name == name)
    row = session.scalar(query.execution_options(populate_existing=True))
    if row is None:
        raise NotFoundError(f"There is no endpoint {name!r} in the database; it was never used.")
    return _state(row)


def save_endpoint(session: Session, state: EndpointState) -> None:
    """Write what `lock_endpoint` returned, changed."""
    values = asdict(state)
    _change(session, values.pop("name"), values)


def enable_endpoint(db: Database, name: str, actor: str) -> EndpointState:
    """Enable a disabled endpoint and forget its streak; return how it was.

    Raises UserError when it is not known.
    """
    with db.writer() as session:
        before = lock_endpoint(session, name)
        _change(session, name, _FRESH)
        told = {"state": before.state, "reason": before.reason}
        audit.note(session, actor, "endpoint.enable", name, told, {"state": "enabled"})
    return before


def list_endpoints(db: Database) -> list[EndpointState]:
    """Return all endpoints that were ever configured, by name."""
    with db.reader() as session:
        return [_state(row) for row in session.scalars(select(EndpointRow).order_by("name"))]


def told_since(session: Session, subject: str, event_type: str, since: datetime | None) -> bool:
    """Say whether an event of a type was published about a subject since then."""
    query = select(EventRow.id).where(EventRow.subject == subject, EventRow.type == event_type)
    if since is not None:
        query = query.where(EventRow.occurred_at >= since)
    return session.scalar(query.limit(1)) is not None


def told_since_end(session: Session, subject: str, end: str) -> set[str]:
    """Return the endpoints that were told about a subject since its last event of type `end`."""
    last = select(func.max(EventRow.seq)).where(EventRow.subject == subject, EventRow.type == end)
    query = (
        select(DeliveryRow.endpoint)
        .join(EventRow, EventRow.id == DeliveryRow.event_id)
        .where(EventRow.subject == subject)
        .where(EventRow.seq > func.coalesce(last.scalar_subquery(), -1))
    )
    return set(session.scalars(query))


def enabled_names(session: Session) -> set[str]:
    """Return the names of the endpoints that are enabled."""
    return set(session.scalars(select(EndpointRow.name).where(EndpointRow.state == "enabled")))


def _change(session: Session, name: str, values: Mapping[str, object]) -> None:
    session.execute(update(EndpointRow).where(EndpointRow.name == name).values(values))


def _state(row: EndpointRow) -> EndpointState:
    return EndpointState(**{name: getattr(row, name) for name in EndpointState.__slots__})
