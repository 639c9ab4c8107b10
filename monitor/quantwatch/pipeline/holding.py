"""Holding on to a run while it is measured: heartbeats, and a progress that stops when told to."""

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from quantwatch.domain import Progress, RunEvent
from quantwatch.errors import LeaseLostError, MonitorError, RunStoppedError, StoreError
from quantwatch.observability import logs
from quantwatch.store import leases
from quantwatch.store.leases import Claim, Report

if TYPE_CHECKING:
    from quantwatch.store.session import Database

log = logs.get(__name__)


LOOK_S = 2.0
"""How soon a cancellation is seen."""
_BEATS_PER_LEASE = 4


class Heart:
    """Renews the lease of one run from a thread of its own. A context manager.

    A database that can't be reached for a while is waited for as long as the lease lasts.
    """

    def __init__(self, database: "Database", claim: Claim, look_s: float = LOOK_S) -> None:
        self._database, self._claim = database, claim
        self._look_s, self._beat_s = look_s, claim.lease_s / _BEATS_PER_LEASE
        self._report = Report()
        self._trouble: MonitorError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def report(self, report: Report) -> None:
        """Show this from the next heartbeat on."""
        self._report = report

    def check(self) -> None:
        """Raise LeaseLostError or RunStoppedError when the run must not go on."""
        if self._trouble is not None:
            raise self._trouble

    def _live(self) -> None:
        # The first beat is at once: the lease may be old by the time a run is held from here.
        renewed, beaten = time.monotonic(), float("-inf")
        while self._trouble is None:
            started = time.monotonic()
            due = started - beaten >= self._beat_s
            try:
                self._trouble = self._told()
                if due and self._trouble is None:
                    leases.heartbeat(self._database, self._claim, self._report)
                    renewed = beaten = started
            except LeaseLostError as error:
                self._trouble = error
            except StoreError as error:
                log.warning("heartbeat failed", run=self._claim.run_id, reason=str(error))
                if time.monotonic() - renewed >= self._claim.lease_s:
                    self._trouble = leases.lost(self._claim)
            if self._stop.wait(self._look_s):
                return

    def _told(self) -> MonitorError | None:
        """Return why the run must stop, None when it may go on."""
        standing = leases.standing(self._database, self._claim)
        if standing.cancelled_for_s is not None:
            return RunStoppedError(f"Run {self._claim.run_id} was cancelled.", "user")
        if standing.overdue_s >= 0:
            return RunStoppedError(f"Run {self._claim.run_id} ran past its deadline.", "deadline")
        return None


class Silent:
    """A progress that shows nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        """Ignore a stage."""

    def advance(self, tokens: int) -> None:
        """Ignore tokens."""


class Watched:
    """A progress that reports to the heart as well, and raises when the run must not go on."""

    def __init__(
        self, progress: Progress, heart: Heart, database: "Database", claim: Claim
    ) -> None:
        self._progress, self._heart = progress, heart
        self._database, self._claim = database, claim
        self._report = Report()
        self._measuring = False

    def start(self, stage: str, total_tokens: int) -> None:
        """Begin a stage; the first one with tokens is where measuring begins."""
        self._heart.check()
        if total_tokens and not self._measuring:
            self._measuring = True
            leases.advance(self._database, self._claim, RunEvent.MEASURE)
        self._report = Report(stage, 0, total_tokens)
        self._heart.report(self._report)
        self._progress.start(stage, total_tokens)

    def advance(self, tokens: int) -> None:
        """Count tokens."""
        self._heart.check()
        done = self._report.tokens_done + tokens
        self._report = Report(self._report.stage, done, self._report.tokens_total)
        self._heart.report(self._report)
        self._progress.advance(tokens)

    def finalize(self) -> None:
        """Say that all is measured and judged; what follows is one transaction."""
        self._heart.check()
        if not self._measuring:
            # A suite without any token to score has no stage of its own.
            leases.advance(self._database, self._claim, RunEvent.MEASURE)
        leases.advance(self._database, self._claim, RunEvent.FINALIZE)
        self.start("store", 0)
