"""Telling again, by a person's wish: dead letters, and what was delivered."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import audit, clock
from quantwatch.store.digests import DIGEST
from quantwatch.store.lock_order import hold_outbox
from quantwatch.store.outbox import history
from quantwatch.store.session import Database
from quantwatch.store.suppression import OPEN, told_again
from quantwatch.store.tables import DeliveryRow, EndpointRow, EventRow

OVER = "it is over, and its end or something after it was told"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay, in deliveries."""

    waiting: int
    """They wait again, with the ends that belong to them."""
    over: int
    """Left out, because they would be taken for news: suppressed where they were dead."""


def replay(db: Database, event_id: str, actor: str, *, again: bool = False) -> int:
    """Tell an event again where it is dead, with `again` also where it was delivered.

    Return the number of deliveries; each keeps its id and body. A beginning brings its end with it.
    Raises UserError when there is nothing to tell, or a receiver is disabled.
    """
    states = ("dead", "delivered") if again else ("dead",)
    with db.writer() as session:
        hold_outbox(session)
        event = session.get(EventRow, event_id)
        if event is None or event.type == DIGEST:
            what = "a digest, replay what it carried" if event else "no event"
            raise UserError(f"{event_id} is {what}; `quantwatch deliveries list` shows all.")
        mine = DeliveryRow.event_id == event_id
        found = _revive(session, and_(mine, DeliveryRow.state.in_(states)), again=again)
        if not found.waiting:
            raise UserError(_nothing(session, event_id, states, found))
        told = {"deliveries": found.waiting}
        audit.note(session, actor, "delivery.replay", event_id, None, told)
    return found.waiting


def replay_dead(
    db: Database, since: datetime | timedelta, actor: str, *, endpoint: str | None = None
) -> Replayed:
    """Tell everything again that became a dead letter since then, or for so long.

    Of one endpoint, or of all. A digest is not told again but what it carried; nor is what is over,
    where its end was told.
    Raises UserError when a receiver is disabled.
    """
    digests = select(EventRow.id).where(EventRow.type == DIGEST)
    with db.writer() as session:
        hold_outbox(session)
        start = clock.now(session) - since if isinstance(since, timedelta) else since
        dead = and_(
            DeliveryRow.state == "dead",
            DeliveryRow.ended_at >= start,
            DeliveryRow.event_id.not_in(digests),
        )
        if endpoint is not None:
            dead = and_(dead, DeliveryRow.endpoint == endpoint)
        found = _revive(session, dead)
        told = {"since": start.isoformat(), "deliveries": found.waiting, "over": found.over}
        whose = {} if endpoint is None else {"endpoint": endpoint}
        audit.note(session, actor, "delivery.replay", "dead letters", None, told | whose)
    return found


def waits(db: Database, event_id: str, *, again: bool = False) -> bool:
    """Say whether an event is on its way already, and `replay` would find nothing to tell."""
    with db.reader() as session:
        query = select(DeliveryRow.state).where(DeliveryRow.event_id == event_id)
        states = set(session.scalars(query))
    told = {"dead", "delivered"} if again else {"dead"}
    return not states & told and bool(states & set(OPEN))


def _revive(session: Session, condition: ColumnElement[bool], *, again: bool = False) -> Replayed:
    """Let deliveries, and the ends of what they tell, wait again as if never tried."""
    _require_enabled(session, condition)
    columns = DeliveryRow.id, DeliveryRow.endpoint, DeliveryRow.subject
    streams = defaultdict(set)
    for id_, endpoint, subject in session.execute(select(*columns).where(condition)):
        streams[endpoint, subject].add(id_)
    num_waiting = num_over = 0
    for (endpoint, subject), ids in sorted(streams.items()):
        rows = history(session, endpoint, subject)
        # Of what lies further back than history goes, nothing is known.
        waiting = ids - {row.id for row in rows} | told_again(rows, ids, again=again)
        num_waiting += _begin(session, waiting)
        num_over += len(ids - waiting)
        _end(session, ids - waiting)
    return Replayed(num_waiting, num_over)


def _begin(session: Session, ids: Collection[int]) -> int:
    moment = clock.now(session)
    values = {
        "state": "pending",
        "attempt": 0,
        "next_at": moment,
        "ended_at": None,
        "digest_id": None,
    }
    # An end that waits already goes on as it is.
    ended = DeliveryRow.id.in_(ids), DeliveryRow.ended_at.is_not(None)
    change = update(DeliveryRow).where(*ended).values(values).returning(DeliveryRow.id)
    return len(session.scalars(change).all())


def _end(session: Session, ids: Collection[int]) -> None:
    dead = DeliveryRow.id.in_(ids), DeliveryRow.state == "dead"
    values = {"state": "suppressed", "last_error": OVER}
    session.execute(update(DeliveryRow).where(*dead).values(values))


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


def _nothing(session: Session, event_id: str, states: Collection[str], found: Replayed) -> str:
    if found.over:
        more = "" if "delivered" in states else "; `--again` tells it with its end"
        return f"{event_id} is not told again: {OVER}{more}."
    query = select(DeliveryRow.endpoint, DeliveryRow.state).order_by("endpoint")
    query = query.where(DeliveryRow.event_id == event_id)
    rows = [f"{endpoint} {state}" for endpoint, state in session.execute(query)]
    wanted, now = " or ".join(states), ", ".join(rows) or "it was for nobody"
    return f"No delivery of {event_id} is {wanted}: {now}."
