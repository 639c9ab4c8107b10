"""What /metrics is told of runs: by the worker, since a run's own process has gone by then."""

import time
from typing import TYPE_CHECKING

from quantwatch.domain import RunStatus
from quantwatch.observability import logs, meters
from quantwatch.store.endings import Trouble
from quantwatch.store.figures import count_non_finite
from quantwatch.store.leases import Claim
from quantwatch.store.records import RunSummary
from quantwatch.store.summaries import get_summary

if TYPE_CHECKING:
    from quantwatch.store.session import Database

log = logs.get(__name__)


class Stopwatch:
    """Times one attempt."""

    def __init__(self, claim: Claim) -> None:
        self._claim, self._started = claim, time.monotonic()

    def note(self, database: "Database") -> None:
        """Log and count an attempt that is over, and the run if it has ended with it."""
        claim, took = self._claim, time.monotonic() - self._started
        if claim.attempt > 1:
            meters.RETRIES.labels(operation="run").inc()
            meters.RETRY_LATENCY.labels(operation="run").observe(took)
        summary = get_summary(database, claim.run_id)
        if summary is None or not summary.status.is_ended:
            log.info("run is given back", run=claim.run_id, check=claim.check)
            return
        log.info("run ended", run=claim.run_id, check=claim.check, **_ending(summary))
        meters.RUNS.labels(check=claim.check, status=summary.status.value).inc()
        meters.RUN_DURATION.labels(check=claim.check).observe(took)
        for name, verdict in summary.candidates:
            if verdict is not None:
                labels = {"check": claim.check, "variant": name, "verdict": verdict.value}
                meters.VERDICTS.labels(**labels).inc()
        for name, count in count_non_finite(database, claim.run_id).items():
            meters.NON_FINITE.labels(check=claim.check, variant=name).inc(count)


def has_ended_itself(database: "Database", claim: Claim) -> bool:
    """Say whether a run that is held no longer was ended by its own process, not by a reaper."""
    summary = get_summary(database, claim.run_id)
    return summary is not None and summary.status in (RunStatus.SUCCEEDED, RunStatus.FAILED)


def _ending(summary: RunSummary) -> dict[str, str]:
    """Return what the log says of an end: the verdict, or why there is none."""
    said = {"status": summary.status.value}
    if summary.verdict is not None:
        return said | {"verdict": summary.verdict.value}
    return said if summary.reason is None else said | {"reason": summary.reason}


def note_reaped(trouble: Trouble) -> None:
    """Count a run that the reaper ended."""
    if trouble.status.is_ended:
        meters.RUNS.labels(check=trouble.check, status=trouble.status.value).inc()
