"""Checks that kill whoever runs them: set apart until somebody says that they are well again."""

from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import audit
from quantwatch.store.attempts import COMMAND_LINE
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow, CheckRow, RunAttemptRow, RunRow

DEATHS = 3
WITHIN = timedelta(hours=24)
_LIFTED = "quarantine lifted"
_TAKEN_BACK = "quarantine taken back"


def quarantine_if_poisonous(session: Session, check_id: int, check: str, moment: datetime) -> bool:
    """Set a check apart when its runs lost their worker too often; say whether that is new.

    Attempts with an exception don't count: they tell what is wrong, and harm nobody else.
    """
    if _deaths(session, check_id, _since(session, check, moment)) < DEATHS:
        return False
    apart = (
        update(CheckRow)
        .where(CheckRow.id == check_id, CheckRow.quarantined_at.is_(None))
        .values(quarantined_at=moment)
        .returning(CheckRow.id)
    )
    if session.execute(apart).first() is None:
        return False
    why = {"abandoned_attempts": DEATHS, "within_hours": WITHIN.total_seconds() / 3600}
    audit.note(session, "reaper", "quarantined", f"check {check}", after=why)
    return True


def quarantined(session: Session) -> tuple[tuple[str, datetime], ...]:
    """Return the checks that are set apart, and since when."""
    since = CheckRow.quarantined_at
    query = select(CheckRow.name, since).where(since.is_not(None)).order_by(since)
    return tuple((row[0], row[1]) for row in session.execute(query) if row[1] is not None)


def take_back(session: Session, check_id: int, check: str, moment: datetime) -> bool:
    """Let a check be claimed again when too few of the deaths that set it apart were any.

    Those that were go on counting, unlike after `lift_quarantine`. Say whether it was set apart.
    """
    apart = session.scalar(select(CheckRow.quarantined_at).where(CheckRow.id == check_id))
    if apart is None or _deaths(session, check_id, _since(session, check, apart)) >= DEATHS:
        return False
    session.execute(update(CheckRow).where(CheckRow.id == check_id).values(quarantined_at=None))
    why = {"reason": "a worker that was taken for dead is alive", "at": moment.isoformat()}
    audit.note(session, "worker", _TAKEN_BACK, f"check {check}", after=why)
    return True


def lift_quarantine(db: Database, check: str, actor: str) -> None:
    """Let a check be claimed again; what it did before no longer counts.

    Raises UserError when there is no such check or it is not in quarantine.
    """
    with db.writer() as session:
        lifted = (
            update(CheckRow)
            .where(CheckRow.name == check, CheckRow.quarantined_at.is_not(None))
            .values(quarantined_at=None)
            .returning(CheckRow.id)
        )
        if session.execute(lifted).first() is None:
            raise UserError(f"Check {check!r} is not in quarantine in database {db.name}.")
        audit.note(session, actor, _LIFTED, f"check {check}")


def quarantined_since(session: Session, check: str) -> datetime | None:
    """Return when a check was set apart, None when it isn't."""
    return session.scalar(select(CheckRow.quarantined_at).where(CheckRow.name == check))


def _since(session: Session, check: str, moment: datetime) -> datetime:
    """Return since when deaths count that could set a check apart at a moment."""
    return max(moment - WITHIN, _last_lifted(session, check) or moment - WITHIN)


def _deaths(session: Session, check_id: int, since: datetime) -> int:
    found = session.scalar(
        select(func.count())
        .select_from(RunAttemptRow)
        .join(RunRow, RunRow.id == RunAttemptRow.run_id)
        .where(RunRow.check_id == check_id, RunAttemptRow.outcome == "abandoned")
        .where(RunAttemptRow.error_class.is_(None), RunAttemptRow.worker != COMMAND_LINE)
        .where(RunAttemptRow.ended_at > since)
    )
    return found or 0


def _last_lifted(session: Session, check: str) -> datetime | None:
    return session.scalar(
        select(func.max(AuditRow.at)).where(
            AuditRow.subject == f"check {check}", AuditRow.action == _LIFTED
        )
    )
