"""A run that somebody holds: measured, judged, stored under its lease, or not at all."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from quantwatch.config.durations import seconds
from quantwatch.domain import Canary, Progress, RunResult, Suite
from quantwatch.pipeline.canary import carry_canary
from quantwatch.pipeline.canary_judge import Night
from quantwatch.pipeline.holding import LOOK_S, Heart, Watched
from quantwatch.pipeline.judge import judge_against
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import canaries, disk, runs
from quantwatch.store.leases import Claim

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from quantwatch.store.session import Database

Settle = Callable[["Session", RunResult], None]


def run_claimed(
    request: RunRequest,
    database: "Database",
    claim: Claim,
    progress: Progress,
    then: Settle | None = None,
    look_s: float = LOOK_S,
) -> RunResult:
    """Measure and judge a run and end it in one transaction, in which `then` takes part.

    The run is `preparing` and held by this process. Raises LeaseLostError when somebody else has
    it by now, RunStoppedError when it was cancelled or is overdue, StoreError when the disk is as
    good as full, and whatever measuring raises: nothing is written then, and the caller ends the
    attempt.
    """
    disk.require_room(database)
    with Heart(database, claim, look_s) as heart:
        watched = Watched(progress, heart, database, claim)
        with measure_check(request, watched) as measured:
            result, against = judge_against(
                request, measured, claim.run_id, claim.claimed_at, database
            )
            canary = _canary(Night(request, measured, result, against), database, watched)
            watched.finalize()
            suite = measured.suite if request.check.store_text else _without_text(measured.suite)
            blocks = disk.affordable(database, measured.blocks())
            then = _with_canary(canary, then)
            runs.finish_run(database, result, suite, blocks, lease=claim.token, then=then)
            return result


def _canary(night: Night, database: "Database", progress: Progress) -> Canary | None:
    """Return the canary that a run carries once it is judged, None when none is due."""
    config = night.request.check.canary
    if config is None:
        return None
    due = canaries.due(database, night.result.run_id, seconds(config.every))
    return None if due is None else carry_canary(night, config, due, progress)


def _with_canary(canary: Canary | None, then: Settle | None) -> Settle | None:
    """Return what belongs to the end of a run: its canary before the alerts, which look at it."""
    if canary is None:
        return then

    def both(session: "Session", result: RunResult) -> None:
        canaries.save_canary(session, result.run_id, canary)
        if then is not None:
            then(session, result)

    return both


def _without_text(suite: Suite) -> Suite:
    """Keep the token ids, which identify the suite, and nothing a person could read."""
    bare = (replace(prompt, text=None, pieces=()) for prompt in suite.prompts)
    return replace(suite, prompts=tuple(bare), vocabulary=())
