"""Runs: begun, ended, finished with results in one transaction, and found again."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import Block, Json, RunResult, RunStatus, Suite
from quantwatch.domain.lifecycle import RunEvent, sources
from quantwatch.errors import LeaseLostError, NotFoundError, RunStoppedError, StoreError
from quantwatch.store import clock, failed_tasks, lookups, writing
from quantwatch.store.attempts import COMMAND_LINE, WorkerId, close_attempt, open_attempt
from quantwatch.store.blocks import EncodedBlocks, insert_blocks
from quantwatch.store.endings import OPERATION, free_device
from quantwatch.store.latest import note_ended
from quantwatch.store.leases import Claim, Lease, new_token
from quantwatch.store.lock_order import again
from quantwatch.store.queue import EMPTY
from quantwatch.store.reading import read_result
from quantwatch.store.records import RunSummary, SeriesPoint
from quantwatch.store.resolve import resolve_run_id
from quantwatch.store.session import Database
from quantwatch.store.suites import save_suite
from quantwatch.store.summaries import get_series, latest_by_check, list_runs
from quantwatch.store.tables import CheckRow, RunRow
from quantwatch.store.vocabularies import save_vocabulary

__all__ = [
    "RunSummary",
    "SeriesPoint",
    "advance_run",
    "begin_run",
    "end_run",
    "finish_run",
    "get_result",
    "get_series",
    "latest_by_check",
    "list_runs",
    "resolve_run_id",
]

Settle = Callable[[Session, RunResult], None]
"""What else belongs to the end of a run, inside its transaction."""
ENDED = frozenset(status for status in RunStatus if status.is_ended)
"""States that never change."""
_NO_LEASE: dict[str, Any] = {"lease_token": None, "lease_until": None, "stage": None}


def begin_run(
    db: Database, *, run_id: str, check: str, config: Json, started_at: datetime
) -> Claim:
    """Add a run in state `preparing`, held by this process: who dies leaves it to the reaper.

    It takes no device: whoever runs a check by hand decides beside what. Raises StoreError when
    the id is taken.
    """
    with db.writer() as session:
        if session.get(RunRow, run_id) is not None:
            raise StoreError(f"Run {run_id} exists already in database {db.name}.")
        lease = Lease(new_token(), clock.now(session))
        run = RunRow(
            id=run_id,
            check_id=lookups.check_id(session, check),
            slot_key=f"m:{run_id}",
            status=RunStatus.PREPARING.value,
            started_at=started_at,
            config=config,
            **{**EMPTY, "attempt": 1, "max_attempts": 1, **lease.values},
        )
        session.add(run)
        session.flush()
        open_attempt(session, run_id, WorkerId.here(COMMAND_LINE), lease.moment)
    return Claim(
        run_id, check, lease.token, 1, 1, 1, lease.moment, None, config, ".", "", lease.lease_s
    )


def advance_run(db: Database, run_id: str, status: RunStatus) -> None:
    """Show how far a run is: `preparing`, `measuring` or `finalizing`."""
    if status in ENDED:
        raise ValueError(f"a run is ended by end_run or finish_run, not advanced to {status}")
    with db.writer() as session:
        _change(session, db, run_id, {"status": status.value})


def end_run(
    db: Database, run_id: str, status: RunStatus, reason: str, reason_code: str | None = None
) -> None:
    """End a run without results: `failed` or `cancelled`. Raises StoreError when it has ended."""
    if status not in (RunStatus.FAILED, RunStatus.CANCELLED):
        raise ValueError(f"a run without results is failed or cancelled, not {status}")
    with db.writer() as session:
        values = {
            **_NO_LEASE,
            "status": status.value,
            "reason_text": reason,
            "reason_code": reason_code,
            "finished_at": clock.now(session),
        }
        check_id = _check_of(session, db, run_id)
        _change(session, db, run_id, values)
        _let_go(session, run_id, status)
        note_ended(session, check_id, run_id, status)


def finish_run(
    db: Database,
    result: RunResult,
    suite: Suite | None,
    blocks: Iterable[Block],
    *,
    lease: str | None = None,
    then: Settle | None = None,
) -> None:
    """Write results, blocks, alerts and the end of the run in one transaction: all or nothing.

    The run must have begun and not ended. `suite` is None for a result that came from a file.
    With `lease`, the run must be `finalizing` and still held under that token; `then` takes part
    in the transaction once everything else is written (alert states, outbox).
    Raises StoreError when it can't be written, LeaseLostError when somebody else holds the run,
    RunStoppedError when it was cancelled, ValueError when the result contradicts itself.
    """
    _require_consistent(result, suite)
    with EncodedBlocks(blocks) as encoded:
        again(lambda: _finish(db, result, suite, encoded, lease, then))


def _finish(
    db: Database,
    result: RunResult,
    suite: Suite | None,
    encoded: EncodedBlocks,
    lease: str | None,
    then: Settle | None,
) -> None:
    with db.writer() as session:
        check_id = _check_of(session, db, result.run_id)
        if suite is None:
            suite = Suite(result.suite_name, result.suite_hash, ())
        suite_id = save_suite(session, suite)
        values = {**writing.run_values(session, result, suite_id), **_NO_LEASE}
        _change(session, db, result.run_id, values, lease)
        candidates = writing.insert_candidates(session, result)
        writing.insert_noise_floor(session, result)
        writing.insert_alerts(session, result, check_id)
        insert_blocks(session, encoded, candidates)
        if result.reference is not None:
            # Late: on PostgreSQL, other first runs with this tokenizer wait for the commit.
            save_vocabulary(session, result.reference.fingerprint.tokenizer_sha, suite.vocabulary)
        _let_go(session, result.run_id, result.status)
        _note_health(session, check_id, result)
        note_ended(session, check_id, result.run_id, result.status)
        if then is not None:
            then(session, result)


def get_result(db: Database, run_id: str) -> RunResult:
    """Return a run as `finish_run` was given it. Raises UserError when there is no such run."""
    with db.reader() as session:
        result = read_result(session, run_id)
    if result is None:
        raise NotFoundError(f"There is no run {run_id} in database {db.name}.")
    return result


def _require_consistent(result: RunResult, suite: Suite | None) -> None:
    """Raise ValueError on what is our own mistake: a result that contradicts itself."""
    if result.status not in ENDED:
        raise ValueError(f"run {result.run_id} is {result.status}; only an ended run is finished")
    if (result.status is RunStatus.SUCCEEDED) != (result.verdict is not None):
        raise ValueError(
            f"run {result.run_id} is {result.status} with verdict {result.verdict}; a verdict "
            "belongs to succeeded runs and only to them"
        )
    if suite is not None and suite.hash != result.suite_hash:
        raise ValueError(f"run {result.run_id} measured another suite than {suite.name}")


def _check_of(session: Session, db: Database, run_id: str) -> int:
    """Return a run's check id and keep other writers of that check waiting."""
    check_id = session.scalar(select(RunRow.check_id).where(RunRow.id == run_id))
    if check_id is None:
        raise StoreError(f"There is no run {run_id} in database {db.name}; it has not begun.")
    session.execute(select(CheckRow.id).where(CheckRow.id == check_id).with_for_update())
    return check_id


def _change(
    session: Session, db: Database, run_id: str, values: dict[str, Any], lease: str | None = None
) -> None:
    """Change a run that has not ended: a guarded update that must meet exactly one row."""
    held = [RunRow.id == run_id, RunRow.status.not_in([status.value for status in ENDED])]
    if lease is not None:
        ready = [status.value for status in sources(RunEvent.SUCCEED)]
        held = [RunRow.id == run_id, RunRow.status.in_(ready), RunRow.lease_token == lease]
        held.append(RunRow.cancel_requested_at.is_(None))
    change = update(RunRow).where(*held).values(values).returning(RunRow.id)
    if session.execute(change).first() is None:
        raise _refusal(session, db, run_id, lease)


def _refusal(session: Session, db: Database, run_id: str, lease: str | None) -> Exception:
    """Return the error that says why a run could not be changed."""
    columns = select(RunRow.status, RunRow.lease_token, RunRow.reason_text)
    found = session.execute(columns.where(RunRow.id == run_id)).first()
    if found is None:
        return StoreError(f"There is no run {run_id} in database {db.name}; it has not begun.")
    if lease is not None and found.lease_token != lease:
        return LeaseLostError(
            f"Run {run_id} is {found.status} and no longer held by this worker; what it found is "
            "dropped."
        )
    if RunStatus(found.status).is_ended:
        return StoreError(f"Run {run_id} is {found.status} already; an ended run never changes.")
    if found.status == RunStatus.FINALIZING.value:
        return RunStoppedError(f"Run {run_id}: {found.reason_text}", "user")
    return StoreError(f"Run {run_id} is {found.status}; a held run is finished from finalizing.")


def _let_go(session: Session, run_id: str, status: RunStatus) -> None:
    close_attempt(session, run_id, status.value, clock.now(session))
    free_device(session, run_id)


def _note_health(session: Session, check_id: int, result: RunResult) -> None:
    """A success makes a check well again, unless a newer one is known (an import is an old one).

    No success lies in the future: a clock that was wrong once would blind the dead-man alert.
    """
    if result.status is not RunStatus.SUCCEEDED or result.finished_at is None:
        return
    moment = clock.now(session)
    ended = min(result.finished_at, moment)
    last = CheckRow.last_success_at
    session.execute(
        update(CheckRow)
        .where(CheckRow.id == check_id, or_(last.is_(None), last < ended, last > moment))
        .values(last_success_at=ended, unhealthy_runs=0)
    )
    failed_tasks.resolve(session, OPERATION, result.check)
