"""Stopping a run from outside: at once while it waits, by its worker while it is measured."""

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from quantwatch.domain import RunEvent, RunStatus
from quantwatch.errors import NotFoundError, UserError
from quantwatch.store import audit, clock
from quantwatch.store.endings import end, hold_still
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow


def request_cancel(db: Database, run_id: str, *, actor: str, reason: str) -> RunStatus:
    """Cancel a run that waits, or ask the worker that holds it; return its state afterwards.

    The worker looks every few seconds; the reaper ends a run whose worker is gone. Asking twice
    changes nothing. Raises UserError when there is no such run or it has ended.
    """
    with db.writer() as session:
        run = hold_still(session, run_id)
        if run is None:
            raise NotFoundError(f"There is no run {run_id} in database {db.name}.")
        status = _status(session, run_id)
        if status.is_ended:
            raise UserError(f"Run {run_id} is {status} already; an ended run never changes.")
        if run.cancel_requested:
            return status
        _write_down(session, run_id, actor, reason)
        if status is not RunStatus.QUEUED:
            return status
        asked = hold_still(session, run_id)
        return end(session, asked or run, RunEvent.CANCEL, None).status


def _status(session: Session, run_id: str) -> RunStatus:
    return RunStatus(session.scalars(select(RunRow.status).where(RunRow.id == run_id)).one())


def _write_down(session: Session, run_id: str, actor: str, reason: str) -> None:
    moment = clock.now(session)
    words = f"cancelled by {actor}: {reason}"
    values = {"cancel_requested_at": moment, "reason_code": "user", "reason_text": words}
    session.execute(update(RunRow).where(RunRow.id == run_id).values(values))
    audit.note(session, actor, "cancelled", f"run {run_id}", after={"reason": reason})
