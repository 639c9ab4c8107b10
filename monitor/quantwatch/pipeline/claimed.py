"""A run that somebody holds: measured, judged, stored under its lease, or not at all."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from quantwatch.domain import Progress, RunResult, Suite
from quantwatch.pipeline.holding import LOOK_S, Heart, Watched
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import disk, runs
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
            result = judge(request, measured, claim.run_id, claim.claimed_at, database)
            watched.finalize()
            suite = measured.suite if request.check.store_text else _without_text(measured.suite)
            blocks = disk.affordable(database, measured.blocks())
            runs.finish_run(database, result, suite, blocks, lease=claim.token, then=then)
            return result


def _without_text(suite: Suite) -> Suite:
    """Keep the token ids, which identify the suite, and nothing a person could read."""
    bare = (replace(prompt, text=None, pieces=()) for prompt in suite.prompts)
    return replace(suite, prompts=tuple(bare), vocabulary=())
