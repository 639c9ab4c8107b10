"""How an attempt ends without results, and what that means for the run, its device, its check.

Everything of one ending is one transaction. Locks are taken in one order, check before run, like
`finish_run` does: two endings of one check would wait for each other otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import RunEvent, RunStatus
from quantwatch.domain.lifecycle import after_error, after_loss, backoff, target
from quantwatch.errors import LeaseLostError
from quantwatch.store import clock
from quantwatch.store.attempts import Failure, close_attempt
from quantwatch.store.failed_tasks import note_failure
from quantwatch.store.latest import note_ended
from quantwatch.store.leases import Claim, lost
from quantwatch.store.quarantine import quarantine_if_poisonous
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, DeviceSlotRow, RunRow
from quantwatch.store.transitions import change

OPERATION = "run"
"""What a failed run is called in the table of failed tasks; its subject is the check."""
_UNHEALTHY = (RunStatus.FAILED, RunStatus.TIMED_OUT, RunStatus.ABANDONED)
_OUTCOME = {
    RunEvent.FAIL: "failed",
    RunEvent.RETRY: "failed",
    RunEvent.RELEASE: "released",
    RunEvent.TIME_OUT: "timed_out",
    RunEvent.ABANDON: "abandoned",
    RunEvent.CANCEL: "cancelled",
    RunEvent.EXPIRE: "failed",
}
_NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_until": None}
_WAITING: dict[str, Any] = {
    **_NO_LEASE,
    "deadline_at": None,
    "stage": None,
    "tokens_done": 0,
    "tokens_total": 0,
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """An attempt that ended without results: what the health rule of a check is told.

    `status` is `queued` when another attempt follows. `quarantined` is true once: when this very
    attempt put the check into quarantine.
    """

    run_id: str
    check: str
    status: RunStatus
    reason_code: str | None
    reason_text: str | None
    unhealthy_runs: int
    quarantined: bool = False


Tell = Callable[[Session, Trouble], None]
"""What else belongs to such an end, inside its transaction: health alerts, the outbox."""


@dataclass(frozen=True, slots=True)
class Held:
    """A run of which nobody else can change anything until the transaction ends."""

    run_id: str
    check_id: int
    check: str
    token: str | None
    attempt: int
    max_attempts: int
    cancel_requested: bool


def fail(db: Database, held: Claim, failure: Failure, tell: Tell | None = None) -> Trouble:
    """End an attempt by an error; the run is queued again or failed (or cancelled, if asked to).

    Raises LeaseLostError when the run is no longer held.
    """
    with db.writer() as session:
        run = _mine(session, held)
        event = after_error(
            retryable=failure.retryable,
            attempt=run.attempt,
            max_attempts=run.max_attempts,
            cancel_requested=run.cancel_requested,
        )
        return end(session, run, event, failure, tell)


def abandon(db: Database, held: Claim, failure: Failure, tell: Tell | None = None) -> Trouble:
    """End an attempt whose process is gone without a word: at once, not when its lease ends.

    Raises LeaseLostError when the run is no longer held: the process had ended it itself.
    """
    with db.writer() as session:
        return end_lost(session, _mine(session, held), failure, tell)


def time_out(db: Database, held: Claim, failure: Failure, tell: Tell | None = None) -> Trouble:
    """End a run that ran past its deadline. Raises LeaseLostError when it is no longer held."""
    with db.writer() as session:
        return end(session, _mine(session, held), RunEvent.TIME_OUT, failure, tell)


def cancel(db: Database, held: Claim, failure: Failure) -> Trouble:
    """End a run that somebody cancelled, with his words where it was asked for by `runs cancel`.

    Raises LeaseLostError when it is no longer held.
    """
    with db.writer() as session:
        return end(session, _mine(session, held), RunEvent.CANCEL, failure)


def conclude(db: Database, held: Claim, failure: Failure, tell: Tell | None = None) -> Trouble:
    """End an attempt the way its reason asks for: cancelled, timed out, or failed.

    Raises LeaseLostError when the run is no longer held.
    """
    if failure.code == "user":
        return cancel(db, held, failure)
    ending = time_out if failure.code == "deadline" else fail
    return ending(db, held, failure, tell)


def release(db: Database, held: Claim) -> Trouble:
    """Give a run back, to be claimed by anybody at once; the attempt doesn't count.

    A run that somebody cancelled meanwhile is cancelled. Raises LeaseLostError when it is no
    longer held.
    """
    with db.writer() as session:
        run = _mine(session, held)
        event = RunEvent.CANCEL if run.cancel_requested else RunEvent.RELEASE
        return end(session, run, event, None)


def end_lost(session: Session, run: Held, failure: Failure, tell: Tell | None = None) -> Trouble:
    """End an attempt whose worker is gone: a retry after a while, or the run is abandoned."""
    event = after_loss(
        attempt=run.attempt, max_attempts=run.max_attempts, cancel_requested=run.cancel_requested
    )
    return end(session, run, event, failure, tell, outcome="abandoned")


def end(
    session: Session,
    run: Held,
    event: RunEvent,
    failure: Failure | None,
    tell: Tell | None = None,
    outcome: str | None = None,
) -> Trouble:
    """Apply an ending to run, attempt, device and check. `run` was read by `hold_still`."""
    moment = clock.now(session)
    values = _values(run, event, failure, moment)
    if not change(session, run.run_id, event, values, RunRow.lease_token == run.token):
        raise LeaseLostError(f"Run {run.run_id} was ended by somebody else meanwhile.")
    outcome = _OUTCOME[event] if event is RunEvent.CANCEL else outcome or _OUTCOME[event]
    close_attempt(session, run.run_id, outcome, moment, failure)
    free_device(session, run.run_id)
    trouble = _note(session, run, _status(event), failure)
    if outcome == "abandoned":
        poisonous = quarantine_if_poisonous(session, run.check_id, run.check, moment)
        trouble = replace(trouble, quarantined=poisonous)
    if tell is not None:
        tell(session, trouble)
    return trouble


def hold_still(session: Session, run_id: str) -> Held | None:
    """Lock a run's check, then the run; return how the run stands, None when there is none."""
    check_id = session.scalar(select(RunRow.check_id).where(RunRow.id == run_id))
    if check_id is None:
        return None
    name = session.scalar(select(CheckRow.name).where(CheckRow.id == check_id).with_for_update())
    row = session.execute(
        select(
            RunRow.lease_token,
            RunRow.attempt,
            RunRow.max_attempts,
            RunRow.cancel_requested_at,
        )
        .where(RunRow.id == run_id)
        .with_for_update()
    ).one()
    token, attempt, most, cancelled = row
    return Held(run_id, check_id, name or "", token, attempt, most, cancelled is not None)


def free_device(session: Session, run_id: str) -> None:
    """Let the next run have the device that this one had."""
    session.execute(delete(DeviceSlotRow).where(DeviceSlotRow.run_id == run_id))


def _mine(session: Session, held: Claim) -> Held:
    run = hold_still(session, held.run_id)
    if run is None or run.token != held.token:
        raise lost(held)
    return run


def _status(event: RunEvent) -> RunStatus:
    status = target(event)
    if status is None:
        raise ValueError(f"{event} ends nothing")
    return status


def _values(
    run: Held, event: RunEvent, failure: Failure | None, moment: datetime
) -> dict[str, Any]:
    """Return the columns of the run's row after an ending."""
    if event is RunEvent.RELEASE:
        return {**_WAITING, "attempt": run.attempt - 1, "not_before": moment}
    if event is RunEvent.RETRY:
        return {**_WAITING, "not_before": moment + backoff(run.attempt)}
    values: dict[str, Any] = {**_NO_LEASE, "finished_at": moment}
    if event is RunEvent.CANCEL and run.cancel_requested:
        # Who cancelled and why was written down when it was asked for.
        return values
    if failure is not None:
        values |= {"reason_code": failure.code, "reason_text": failure.message}
    return values


def _note(session: Session, run: Held, status: RunStatus, failure: Failure | None) -> Trouble:
    """Write what the check and the table of failed tasks remember of it."""
    if failure is not None and status is not RunStatus.CANCELLED:
        note_failure(session, OPERATION, failure.code, run.check, failure.message)
    if status.is_ended:
        note_ended(session, run.check_id, run.run_id, status)
    if status in _UNHEALTHY:
        more = {"unhealthy_runs": CheckRow.unhealthy_runs + 1}
        session.execute(update(CheckRow).where(CheckRow.id == run.check_id).values(more))
    unhealthy = session.scalar(select(CheckRow.unhealthy_runs).where(CheckRow.id == run.check_id))
    code, words = (None, None) if failure is None else (failure.code, failure.message)
    return Trouble(run.run_id, run.check, status, code, words, unhealthy or 0)
