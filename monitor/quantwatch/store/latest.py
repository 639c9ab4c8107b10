"""The pointer from each check to its newest run, kept in the transaction that ends a run."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus
from quantwatch.store.recent import note_point, verdict_since
from quantwatch.store.tables import LatestRunRow, RunRow


def note_ended(session: Session, check_id: int, run_id: str, status: RunStatus) -> None:
    """Point the check to this run unless a newer one has ended before it.

    A cancelled run says nothing about the check, so the run before it stays the newest.
    """
    if status is RunStatus.CANCELLED:
        return
    latest = session.get(LatestRunRow, check_id)
    if latest is None:
        latest = LatestRunRow(check_id=check_id, run_id=run_id, succeeded_run_id=None)
        session.add(latest)
    latest.run_id = _newer(session, latest.run_id, run_id)
    if status is RunStatus.SUCCEEDED:
        _note_success(session, latest, run_id)
    session.flush()
    note_point(session, check_id, run_id)


def _note_success(session: Session, latest: LatestRunRow, run_id: str) -> None:
    before = latest.succeeded_run_id
    latest.succeeded_run_id = _newer(session, before, run_id)
    if before is not None and latest.succeeded_run_id == run_id:
        verdicts = select(RunRow.verdict).where(RunRow.id.in_({before, run_id})).distinct()
        if len(session.scalars(verdicts).all()) == 1:
            return
    latest.verdict_since = verdict_since(session, latest.check_id, latest.succeeded_run_id)


def _newer(session: Session, known: str | None, run_id: str) -> str:
    ids = {run_id} if known is None else {known, run_id}
    newest = select(RunRow.id).where(RunRow.id.in_(ids))
    return (
        session.scalars(newest.order_by(RunRow.started_at.desc(), RunRow.id.desc())).first()
        or run_id
    )
