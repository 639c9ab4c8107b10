"""The life of a run as one table: what may happen in which state, and where it leads.

The store takes its guards from here: an UPDATE names the states that an event may come from, and
exactly one row must change. A slot that is not run is inserted as `skipped` and never moves.
"""

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum

from quantwatch.domain.words import RunStatus


class RunEvent(StrEnum):
    """What can happen to a run."""

    CLAIM = "claim"
    BEAT = "beat"
    """A heartbeat: the lease is renewed, the state stays."""
    PREPARE = "prepare"
    MEASURE = "measure"
    FINALIZE = "finalize"
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    """The attempt is over, by an error or a lost worker; another one follows after a while."""
    RELEASE = "release"
    """The worker is stopped by its owner: the attempt doesn't count."""
    TIME_OUT = "time_out"
    ABANDON = "abandon"
    """The worker is gone and no attempt is left."""
    CANCEL = "cancel"
    EXPIRE = "expire"
    """Nobody could take the run for too long."""


_ACTIVE = tuple(status for status in RunStatus if status.is_active)
_STEPS = {
    (RunStatus.QUEUED, RunEvent.CLAIM): RunStatus.CLAIMED,
    (RunStatus.CLAIMED, RunEvent.PREPARE): RunStatus.PREPARING,
    (RunStatus.PREPARING, RunEvent.MEASURE): RunStatus.MEASURING,
    (RunStatus.MEASURING, RunEvent.FINALIZE): RunStatus.FINALIZING,
    (RunStatus.FINALIZING, RunEvent.SUCCEED): RunStatus.SUCCEEDED,
    (RunStatus.QUEUED, RunEvent.CANCEL): RunStatus.CANCELLED,
    (RunStatus.QUEUED, RunEvent.EXPIRE): RunStatus.FAILED,
}
_FROM_ANY_ACTIVE = {
    RunEvent.FAIL: RunStatus.FAILED,
    RunEvent.RETRY: RunStatus.QUEUED,
    RunEvent.RELEASE: RunStatus.QUEUED,
    RunEvent.TIME_OUT: RunStatus.TIMED_OUT,
    RunEvent.ABANDON: RunStatus.ABANDONED,
    RunEvent.CANCEL: RunStatus.CANCELLED,
}
TRANSITIONS: Mapping[tuple[RunStatus, RunEvent], RunStatus] = {
    **_STEPS,
    **{(status, RunEvent.BEAT): status for status in _ACTIVE},
    **{(s, event): target for s in _ACTIVE for event, target in _FROM_ANY_ACTIVE.items()},
}
"""(from, event) → to; what is not in it can't happen."""
BACKOFF = (timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
"""How long the next attempt waits after the first, second, third and later one."""


def sources(event: RunEvent) -> frozenset[RunStatus]:
    """Return the states that an event may find a run in."""
    return frozenset(status for status, possible in TRANSITIONS if possible is event)


def target(event: RunEvent) -> RunStatus | None:
    """Return the state that an event leads to, None when the state stays as it is."""
    found = {to for (_, possible), to in TRANSITIONS.items() if possible is event}
    return next(iter(found)) if len(found) == 1 else None


def after_error(
    *, retryable: bool, attempt: int, max_attempts: int, cancel_requested: bool
) -> RunEvent:
    """Say what an error of an attempt means for the run; somebody who cancelled gets no retry."""
    if cancel_requested:
        return RunEvent.CANCEL
    return RunEvent.RETRY if retryable and attempt < max_attempts else RunEvent.FAIL


def after_loss(*, attempt: int, max_attempts: int, cancel_requested: bool) -> RunEvent:
    """Say what a worker that is gone, without an error of its own, means for the run."""
    if cancel_requested:
        return RunEvent.CANCEL
    return RunEvent.RETRY if attempt < max_attempts else RunEvent.ABANDON


def backoff(attempt: int) -> timedelta:
    """Return how long a run waits after its n-th attempt (from 1)."""
    return BACKOFF[min(max(attempt, 1), len(BACKOFF)) - 1]
