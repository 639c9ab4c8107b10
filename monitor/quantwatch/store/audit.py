"""Who changed what, and how it was before."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.store import clock
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change: by whom, of what, and how it was before and after."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    before: Json | None
    after: Json | None


def note(
    session: Session,
    actor: str,
    action: str,
    subject: str,
    before: Json | None = None,
    after: Json | None = None,
) -> None:
    """Write one change in the caller's transaction: it is recorded if and only if it happens."""
    row = AuditRow(
        at=clock.now(session),
        actor=actor,
        action=action,
        subject=subject,
        before=before,
        after=after,
    )
    session.add(row)
    session.flush()


def list_entries(db: Database, limit: int = 50, subject: str | None = None) -> list[AuditEntry]:
    """Return changes, the newest first: all, or those of one subject (`check NAME`, `alert 3`)."""
    query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
    if subject is not None:
        query = query.where(AuditRow.subject == subject)
    with db.reader() as session:
        return [_entry(row) for row in session.scalars(query)]


def _entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(**{name: getattr(row, name) for name in AuditEntry.__slots__})
