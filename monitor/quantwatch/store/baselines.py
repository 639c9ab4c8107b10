"""Which run a check's runs are compared with."""

from datetime import UTC, datetime

from sqlalchemy import select

from quantwatch.domain import RunStatus
from quantwatch.errors import UserError
from quantwatch.store.session import Database
from quantwatch.store.tables import BaselinePinRow, CheckRow, RunRow


def pin(db: Database, check: str, run_id: str) -> None:
    """Make a succeeded run of the check its baseline, in place of the one before.

    Raises UserError when there is no such run, it did not succeed, or it is another check's.
    """
    with db.writer() as session:
        found = session.execute(
            select(RunRow.check_id, RunRow.status, CheckRow.name)
            .join(CheckRow, CheckRow.id == RunRow.check_id)
            .where(RunRow.id == run_id)
        ).first()
        if found is None:
            raise UserError(f"There is no run {run_id} in database {db.name}.")
        check_id, status, name = found
        if name != check:
            raise UserError(
                f"Run {run_id} is of check {name}; it can't be the baseline of {check}."
            )
        if status != RunStatus.SUCCEEDED.value:
            raise UserError(f"Run {run_id} is {status}; only a succeeded run can be a baseline.")
        row = BaselinePinRow(check_id=check_id, run_id=run_id, pinned_at=datetime.now(UTC))
        session.merge(row)


def unpin(db: Database, check: str) -> None:
    """Leave a check without a pinned baseline. Raises UserError when it has none."""
    with db.writer() as session:
        row = session.scalar(
            select(BaselinePinRow)
            .join(CheckRow, CheckRow.id == BaselinePinRow.check_id)
            .where(CheckRow.name == check)
        )
        if row is None:
            raise UserError(f"Check {check} has no pinned baseline.")
        session.delete(row)


def get_pinned(db: Database, check: str) -> str | None:
    """Return the id of the run that is pinned, None when there is none."""
    query = (
        select(BaselinePinRow.run_id)
        .join(CheckRow, CheckRow.id == BaselinePinRow.check_id)
        .where(CheckRow.name == check)
    )
    with db.reader() as session:
        return session.scalar(query)
