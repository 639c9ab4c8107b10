"""One run from beginning to end: measure, judge, store in one transaction."""

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quantwatch.domain import Progress, RunResult
from quantwatch.errors import LeaseLostError, StoreError
from quantwatch.pipeline.claimed import Settle, run_claimed
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.reasons import explain
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import endings, runs
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import reap
from quantwatch.telemetry import new_run_id

if TYPE_CHECKING:
    from quantwatch.store.session import Database


def run_check(
    request: RunRequest,
    *,
    database: "Database | None",
    progress: Progress,
    then: Settle | None = None,
) -> RunResult:
    """Measure a check, judge it, and store everything about it in one transaction or nothing.

    `then` takes part in that transaction. Raises UserError when something the check names is wrong,
    MonitorError when the monitor failed, RunStoppedError when somebody cancelled the run.
    A KeyboardInterrupt passes through; the run is then marked as cancelled.
    """
    run_id, started = new_run_id(), datetime.now(UTC)
    if database is None:
        with measure_check(request, progress) as measured:
            return judge(request, measured, run_id, started, None)
    # Without a service nobody else would end the run of a command that was killed.
    reap(database)
    config = request.check.model_dump(mode="json")
    claim = runs.begin_run(
        database, run_id=run_id, check=request.name, config=config, started_at=started
    )
    try:
        return run_claimed(request, database, claim, progress, then)
    except BaseException as error:
        _end(database, claim, error)
        raise


def _end(database: "Database", claim: Claim, error: BaseException) -> None:
    """Record why a run ended. The first error is the one to show: a failing store adds nothing."""
    with contextlib.suppress(StoreError, LeaseLostError):
        endings.conclude(database, claim, explain(error))
