"""What people decide about a check while it is in use: paused, and going on again."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import audit, clock, lookups, schedules
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow


@dataclass(frozen=True, slots=True)
class Pause:
    """Since when a check is paused, by whom and why."""

    at: datetime
    by: str | None
    reason: str | None


def known_checks(session: Session) -> list[str]:
    """Return the names of all checks that are or were in use, or have runs."""
    return list(session.scalars(select(CheckRow.name).order_by(CheckRow.name)))


def pause(db: Database, check: str, actor: str, reason: str) -> bool:
    """Pause a check: its slots are recorded as skipped. False when it is paused already.

    A check that was never applied may be paused ahead. Neither a changed file nor a run undoes it.
    Raises UserError without a reason.
    """
    if not reason.strip():
        raise UserError(f"Check {check!r} is not paused without a reason; say why.")
    with db.writer() as session:
        check_id, moment = lookups.check_id(session, check), clock.now(session)
        change = (
            update(CheckRow)
            .where(CheckRow.id == check_id, CheckRow.paused_at.is_(None))
            .values(paused_at=moment, paused_by=actor, pause_reason=reason)
            .returning(CheckRow.id)
        )
        if session.execute(change).first() is None:
            return False
        audit.note(session, actor, "paused", f"check {check}", after={"reason": reason})
        schedules.look_again(session, check)
    return True


def resume(db: Database, check: str, actor: str) -> bool:
    """Let a check run again from its next slot on. False when it isn't paused."""
    with db.writer() as session:
        before = pauses(session).get(check)
        change = (
            update(CheckRow)
            .where(CheckRow.name == check, CheckRow.paused_at.is_not(None))
            .values(paused_at=None, paused_by=None, pause_reason=None)
            .returning(CheckRow.id)
        )
        if before is None or session.execute(change).first() is None:
            return False
        words = {"by": before.by, "reason": before.reason, "at": before.at.isoformat()}
        audit.note(session, actor, "resumed", f"check {check}", before=words)
        schedules.look_again(session, check)
    return True


def pauses(session: Session) -> dict[str, Pause]:
    """Return the checks that are paused."""
    columns = (CheckRow.name, CheckRow.paused_at, CheckRow.paused_by, CheckRow.pause_reason)
    rows = session.execute(select(*columns))
    return {name: Pause(at, by, reason) for name, at, by, reason in rows if at is not None}
