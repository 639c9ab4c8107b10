"""What a digest carries: put together of what still waits, and ended as the digest ends."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, true, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from quantwatch.store import clock
from quantwatch.store.outbox import suppress_untold
from quantwatch.store.suppression import WAITING
from quantwatch.store.tables import DeliveryRow

DIGEST = "digest"
GROUPED = "grouped"


def group(session: Session, ids: Sequence[int], digest_id: str) -> None:
    """Let a digest carry deliveries that wait; they end as it ends. The caller holds the outbox."""
    values = {"state": GROUPED, "digest_id": digest_id}
    waiting = DeliveryRow.id.in_(ids), DeliveryRow.state.in_(WAITING)
    session.execute(update(DeliveryRow).where(*waiting).values(values))


def end_members(session: Session, condition: ColumnElement[bool] | None = None) -> int:
    """End what ended digests carried as they ended; return how many deliveries those were.

    What was resolved meanwhile, and was not heard of after all, is suppressed. `condition` narrows
    it down; a digest that is gone counts as one that died and may have been heard.
    """
    carrier = aliased(DeliveryRow)
    its = and_(carrier.event_id == DeliveryRow.digest_id, carrier.endpoint == DeliveryRow.endpoint)

    def of_carrier(column: InstrumentedAttribute[Any]) -> ColumnElement[Any]:
        return select(column).where(its).scalar_subquery()

    values = {
        "state": func.coalesce(of_carrier(carrier.state), "dead"),
        "left_machine": or_(
            DeliveryRow.left_machine, func.coalesce(of_carrier(carrier.left_machine), true())
        ),
        "last_status": of_carrier(carrier.last_status),
        "last_error": of_carrier(carrier.last_error),
        "ended_at": clock.now(session),
    }
    is_open = exists().where(its, carrier.ended_at.is_(None))
    orphans = and_(
        DeliveryRow.state == GROUPED, ~is_open, true() if condition is None else condition
    )
    ended = update(DeliveryRow).where(orphans).values(values)
    ended = ended.execution_options(synchronize_session=False)
    rows = session.execute(
        ended.returning(DeliveryRow.endpoint, DeliveryRow.subject, DeliveryRow.state)
    ).all()
    suppress_all(session, {(row.endpoint, row.subject) for row in rows if row.state == "dead"})
    return len(rows)


def carried_by(event_id: str, endpoint: str) -> ColumnElement[bool]:
    """Return the condition: carried by that digest to that endpoint."""
    return and_(DeliveryRow.digest_id == event_id, DeliveryRow.endpoint == endpoint)


def suppress_all(session: Session, streams: Collection[tuple[str, str]]) -> None:
    """Suppress what need not be told any more, for each (endpoint, subject)."""
    for endpoint, subject in sorted(streams):
        suppress_untold(session, endpoint, subject)
