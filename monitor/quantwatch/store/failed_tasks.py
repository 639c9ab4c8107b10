"""Failed operations, one row per (operation, error, subject): counted by operation or by error."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import Insert, Select, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import clock
from quantwatch.store.session import Database
from quantwatch.store.tables import FailedTaskRow

By = Literal["operation", "error"]
MAX_MESSAGE = 1000
"""Longer messages are cut: a receiver's page or a traceback would fill the table."""

_COLUMN = {"operation": FailedTaskRow.operation, "error": FailedTaskRow.error_code}


@dataclass(frozen=True, slots=True)
class FailedTask:
    """What failed, how often, and since when. `resolved_at` is None while it is still open."""

    operation: str
    error_code: str
    subject: str
    attempts: int
    first_at: datetime
    last_at: datetime
    message: str
    resolved_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedCount:
    """One line of the table counted by operation or by error code; resolved tasks count, too."""

    name: str
    num_tasks: int
    num_open: int
    num_attempts: int
    first_at: datetime
    last_at: datetime


def note_failure(
    session: Session, operation: str, error_code: str, subject: str, message: str
) -> None:
    """Count a failed attempt of an operation on a subject; opens a resolved task again.

    `message` must be redacted already; of several attempts the last one's stays.
    """
    moment = clock.now(session)
    text = message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
    key = {"operation": operation, "error_code": error_code, "subject": subject}
    times = {"attempts": 1, "first_at": moment, "last_at": moment}
    session.execute(_insert_or_count(session, key | times | {"message": text}))


def resolve(session: Session, operation: str, subject: str) -> int:
    """Close the open tasks of an operation on a subject, whatever their error; return how many."""
    done = session.execute(
        update(FailedTaskRow)
        .where(FailedTaskRow.operation == operation, FailedTaskRow.subject == subject)
        .where(FailedTaskRow.resolved_at.is_(None))
        .values(resolved_at=clock.now(session))
        .returning(FailedTaskRow.id)
    )
    return len(done.all())


def list_failed(
    db: Database,
    *,
    operation: str | None = None,
    error_code: str | None = None,
    include_resolved: bool = False,
    limit: int = 50,
) -> list[FailedTask]:
    """Return failed tasks, the one that failed last first."""
    query = select(FailedTaskRow).order_by(FailedTaskRow.last_at.desc(), FailedTaskRow.id.desc())
    if operation is not None:
        query = query.where(FailedTaskRow.operation == operation)
    if error_code is not None:
        query = query.where(FailedTaskRow.error_code == error_code)
    if not include_resolved:
        query = query.where(FailedTaskRow.resolved_at.is_(None))
    with db.reader() as session:
        return [_task(row) for row in session.scalars(query.limit(limit))]


def num_open(session: Session) -> int:
    """Return how many failed tasks are still open."""
    query = select(func.count()).where(FailedTaskRow.resolved_at.is_(None))
    return session.scalars(query).one()


def count_by(db: Database, by: By) -> list[FailedCount]:
    """Count failed tasks by operation or by error code, most attempts first.

    Raises UserError on another word.
    """
    if by not in _COLUMN:
        raise UserError(f"Failed tasks can't be counted by {by!r}; allowed: {', '.join(_COLUMN)}.")
    with db.reader() as session:
        return [FailedCount(*row) for row in session.execute(_counted(by))]


def _insert_or_count(session: Session, row: dict[str, object]) -> Insert:
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    new = insert(FailedTaskRow).values(row)
    return new.on_conflict_do_update(
        index_elements=["operation", "error_code", "subject"],
        set_={
            "attempts": FailedTaskRow.attempts + 1,
            "last_at": new.excluded.last_at,
            "message": new.excluded.message,
            "resolved_at": None,
        },
    )


def _counted(by: By) -> Select[str, int, int, int, datetime, datetime]:
    name, attempts = _COLUMN[by], func.sum(FailedTaskRow.attempts)
    return (
        select(
            name,
            func.count(),
            func.count() - func.count(FailedTaskRow.resolved_at),
            attempts,
            func.min(FailedTaskRow.first_at),
            func.max(FailedTaskRow.last_at),
        )
        .group_by(name)
        .order_by(attempts.desc(), name)
    )


def _task(row: FailedTaskRow) -> FailedTask:
    return FailedTask(**{name: getattr(row, name) for name in FailedTask.__slots__})
