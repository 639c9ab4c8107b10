"""One run from beginning to end: measure, judge, store in one transaction."""

import contextlib
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quantwatch.domain import Progress, RunResult, RunStatus, Suite
from quantwatch.errors import StoreError
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import baselines, runs
from quantwatch.telemetry import new_run_id

if TYPE_CHECKING:
    from quantwatch.store.session import Database


def run_check(request: RunRequest, *, database: "Database | None", progress: Progress) -> RunResult:
    """Measure a check, judge it, and store everything about it in one transaction or nothing.

    Raises UserError when something the check names is wrong, MonitorError when the monitor failed.
    A KeyboardInterrupt passes through; the run is then marked as cancelled.
    """
    run_id, started = new_run_id(), datetime.now(UTC)
    if database is None:
        with measure_check(request, progress) as measured:
            return judge(request, measured, run_id, started, request.baseline)
    baseline = request.baseline or _pinned(database, request.name)
    config = request.check.model_dump(mode="json")
    runs.begin_run(database, run_id=run_id, check=request.name, config=config, started_at=started)
    try:
        with measure_check(request, progress) as measured:
            result = judge(request, measured, run_id, started, baseline)
            progress.start("store", 0)
            suite = measured.suite if request.check.store_text else _without_text(measured.suite)
            runs.finish_run(database, result, suite, measured.blocks())
            return result
    except BaseException as error:
        _end(database, run_id, error)
        raise


def _without_text(suite: Suite) -> Suite:
    """Keep the token ids, which identify the suite, and nothing a person could read."""
    bare = (replace(prompt, text=None, pieces=()) for prompt in suite.prompts)
    return replace(suite, prompts=tuple(bare), vocabulary=())


def _pinned(database: "Database", check: str) -> RunResult | None:
    run_id = baselines.get_pinned(database, check)
    return None if run_id is None else runs.get_result(database, run_id)


def _end(database: "Database", run_id: str, error: BaseException) -> None:
    """Record why a run ended. The first error is the one to show: a failing store adds nothing."""
    stopped = isinstance(error, KeyboardInterrupt)
    reason = "interrupted by the user" if stopped else f"{type(error).__name__}: {error}"
    with contextlib.suppress(StoreError):
        status = RunStatus.CANCELLED if stopped else RunStatus.FAILED
        runs.end_run(database, run_id, status, reason)
