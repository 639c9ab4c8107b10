"""Canaries: written in the transaction that ends their run, and never read by what judges runs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from quantwatch.domain import Canary, Scope
from quantwatch.store import clock, confirmations
from quantwatch.store.session import Database
from quantwatch.store.tables import CanaryRow, CheckRow, RunRow

_FIELDS = tuple(Canary.__slots__)
_SCOPES = ("place", "named", "scope")


@dataclass(frozen=True, slots=True)
class Due:
    """A canary that a run has to carry."""

    turn: int
    """How many came before it."""
    slot: str
    """What its random choices are seeded with: the slot of its run."""
    left_s: float | None
    """Time until the run's deadline; None without one."""
    attempt: int = 1
    """Which attempt of the run this is."""


@dataclass(frozen=True, slots=True)
class Flown:
    """A canary that was stored."""

    check: str
    run_id: str
    canary: Canary


def due(db: Database, run_id: str, every_s: float) -> Due | None:
    """Return the canary that a run has to carry, None when it has none to.

    Only runs that a service carries out have one: those of the command line move no alerts. A
    confirmation run has none, and none follows the check's last sooner than so.
    """
    with db.reader() as session:
        run = session.get(RunRow, run_id)
        if run is None:
            return None
        origin = confirmations.origin(session, run_id)
        if origin.confirms is not None or not origin.repeatable:
            return None
        moment, last = clock.now(session), _last(session, run.check_id)
        if last is not None and last.made_at + timedelta(seconds=every_s) > moment:
            return None
        left = None if run.deadline_at is None else (run.deadline_at - moment).total_seconds()
        return Due(0 if last is None else last.turn + 1, run.slot_key, left, run.attempt)


def save_canary(session: Session, run_id: str, canary: Canary) -> None:
    """Write a canary beside its run, which must be stored."""
    check_id = session.scalars(select(RunRow.check_id).where(RunRow.id == run_id)).one()
    session.add(CanaryRow(run_id=run_id, check_id=check_id, **asdict(canary)))
    session.flush()


def last_measured(session: Session, check_id: int) -> Flown | None:
    """Return a check's newest canary that could be measured."""
    query = _flown().where(CanaryRow.check_id == check_id, CanaryRow.state == "measured")
    rows = session.execute(query.order_by(CanaryRow.turn.desc()).limit(1)).all()
    return next(_records(rows), None)


def canaries_of(db: Database, check: str, limit: int) -> list[Flown]:
    """Return a check's newest canaries, newest first."""
    query = _flown().where(CheckRow.name == check).order_by(CanaryRow.turn.desc()).limit(limit)
    with db.reader() as session:
        return list(_records(session.execute(query).all()))


def newest_canaries(db: Database) -> list[Flown]:
    """Return the newest canary of every check that has one, by the check's name."""
    newest = (
        select(CanaryRow.check_id, func.max(CanaryRow.turn).label("turn"))
        .group_by(CanaryRow.check_id)
        .subquery()
    )
    query = (
        _flown()
        .join(
            newest,
            (newest.c.check_id == CanaryRow.check_id) & (newest.c.turn == CanaryRow.turn),
        )
        .where(CheckRow.removed_at.is_(None))
        .order_by(CheckRow.name)
    )
    with db.reader() as session:
        return list(_records(session.execute(query).all()))


def canary_of_run(db: Database, run_id: str) -> Canary | None:
    """Return the canary that a run carried, None when it had none."""
    with db.reader() as session:
        rows = session.execute(_flown().where(CanaryRow.run_id == run_id)).all()
    return next((flown.canary for flown in _records(rows)), None)


def _last(session: Session, check_id: int) -> CanaryRow | None:
    query = select(CanaryRow).where(CanaryRow.check_id == check_id)
    return session.scalars(query.order_by(CanaryRow.turn.desc()).limit(1)).first()


def _flown() -> Select[*tuple[Any, ...]]:
    return select(CanaryRow, CheckRow.name).join(CheckRow, CheckRow.id == CanaryRow.check_id)


def _records(rows: Any) -> Iterator[Flown]:
    for row, check in rows:
        plain = {name: getattr(row, name) for name in _FIELDS}
        for name in _SCOPES:
            plain[name] = None if plain[name] is None else Scope(plain[name])
        yield Flown(check, row.run_id, Canary(**plain))
