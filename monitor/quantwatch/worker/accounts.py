"""What /metrics is told of runs: by the worker, since a run's own process has gone by then."""

import time
from typing import TYPE_CHECKING

from quantwatch.observability import meters
from quantwatch.store.endings import Trouble
from quantwatch.store.figures import count_non_finite
from quantwatch.store.leases import Claim
from quantwatch.store.summaries import get_summary

if TYPE_CHECKING:
    from quantwatch.store.session import Database


class Stopwatch:
    """Times one attempt."""

    def __init__(self, claim: Claim) -> None:
        self._claim, self._started = claim, time.monotonic()

    def note(self, database: "Database") -> None:
        """Count an attempt that is over, and the run if it has ended with it."""
        claim, took = self._claim, time.monotonic() - self._started
        if claim.attempt > 1:
            meters.RETRIES.labels(operation="run").inc()
            meters.RETRY_LATENCY.labels(operation="run").observe(took)
        summary = get_summary(database, claim.run_id)
        if summary is None or not summary.status.is_ended:
            return
        meters.RUNS.labels(check=claim.check, status=summary.status.value).inc()
        meters.RUN_DURATION.labels(check=claim.check).observe(took)
        for name, verdict in summary.candidates:
            if verdict is not None:
                labels = {"check": claim.check, "variant": name, "verdict": verdict.value}
                meters.VERDICTS.labels(**labels).inc()
        for name, count in count_non_finite(database, claim.run_id).items():
            meters.NON_FINITE.labels(check=claim.check, variant=name).inc(count)


def note_reaped(trouble: Trouble) -> None:
    """Count a run that the reaper ended."""
    if trouble.status.is_ended:
        meters.RUNS.labels(check=trouble.check, status=trouble.status.value).inc()
