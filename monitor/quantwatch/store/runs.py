"""Runs: begun, ended, finished with results in one transaction, and found again."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from quantwatch.domain import Block, Json, RunResult, RunStatus, Suite
from quantwatch.errors import StoreError, UserError
from quantwatch.store import lookups, writing
from quantwatch.store.blocks import EncodedBlocks, insert_blocks
from quantwatch.store.latest import note_ended
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


def begin_run(db: Database, *, run_id: str, check: str, config: Json, started_at: datetime) -> None:
    """Add a run in state `preparing`. Raises StoreError when the id is taken."""
    empty: dict[str, Any] = {"capture": {}, "timings_s": {}, "baseline_mismatch": []}
    with db.writer() as session:
        if session.get(RunRow, run_id) is not None:
            raise StoreError(f"Run {run_id} exists already in database {db.name}.")
        run = RunRow(
            id=run_id,
            check_id=lookups.check_id(session, check),
            slot_key=f"m:{run_id}",
            status=RunStatus.PREPARING.value,
            started_at=started_at,
            config=config,
            suite_name="",
            num_tokens=0,
            num_prompts=0,
            capture_sha="",
            metrics_version=0,
            num_alerts=0,
            **empty,
        )
        session.add(run)


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
    values = {
        "status": status.value,
        "reason_text": reason,
        "reason_code": reason_code,
        "finished_at": datetime.now(UTC),
    }
    with db.writer() as session:
        check_id = _check_of(session, db, run_id)
        _change(session, db, run_id, values)
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
    With `lease`, the run must still be held under that token; `then` takes part in the transaction
    once everything else is written (alert states, outbox).
    Raises StoreError when it can't be written, ValueError when the result contradicts itself.
    """
    _require_consistent(result, suite)
    with EncodedBlocks(blocks) as encoded, db.writer() as session:
        check_id = _check_of(session, db, result.run_id)
        if suite is None:
            suite = Suite(result.suite_name, result.suite_hash, ())
        suite_id = save_suite(session, suite)
        _change(session, db, result.run_id, writing.run_values(session, result, suite_id), lease)
        candidates = writing.insert_candidates(session, result)
        writing.insert_noise_floor(session, result)
        writing.insert_alerts(session, result, check_id)
        insert_blocks(session, encoded, candidates)
        if result.reference is not None:
            # Late: on PostgreSQL, other first runs with this tokenizer wait for the commit.
            save_vocabulary(session, result.reference.fingerprint.tokenizer_sha, suite.vocabulary)
        note_ended(session, check_id, result.run_id, result.status)
        if then is not None:
            then(session, result)


def get_result(db: Database, run_id: str) -> RunResult:
    """Return a run as `finish_run` was given it. Raises UserError when there is no such run."""
    with db.reader() as session:
        result = read_result(session, run_id)
    if result is None:
        raise UserError(f"There is no run {run_id} in database {db.name}.")
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
        held.append(RunRow.lease_token == lease)
    change = update(RunRow).where(*held).values(values).returning(RunRow.id)
    if session.execute(change).first() is not None:
        return
    status = session.scalar(select(RunRow.status).where(RunRow.id == run_id))
    if status is None:
        raise StoreError(f"There is no run {run_id} in database {db.name}; it has not begun.")
    if RunStatus(status).is_ended:
        raise StoreError(f"Run {run_id} is {status} already; an ended run never changes.")
    raise StoreError(f"Run {run_id} is held by another worker; what this one found is dropped.")
