"""Who changed what, and how it was before."""

from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.store import clock
from quantwatch.store.tables import AuditRow


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
