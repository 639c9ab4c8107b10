"""How an endpoint is doing: its streak of failures, when it is disabled, when others are told."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from quantwatch.delivery.backoff import LONGEST_S, next_ratio
from quantwatch.delivery.outcomes import Outcome
from quantwatch.store.suppression import RECOVERED

ENABLED, AUTO, GONE, INVALID = "enabled", "disabled_auto", "disabled_gone", "invalid"
LONGEST_FAILURE = timedelta(days=5)
LONGEST_GAP = timedelta(seconds=LONGEST_S)
"""Of the time between two attempts no more is evidence: nothing waits longer for its next one."""
TOLD_AT_FAILURE = 4


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of an endpoint."""

    state: str = ENABLED
    reason: str | None = None
    failing_since: datetime | None = None
    """Moved on by what nobody tried in: a jump of the clock is no failure of the receiver."""
    num_failures: int = 0
    """In a row."""
    failure_ratio: float = 0.0
    last_success_at: datetime | None = None
    last_attempt_at: datetime | None = None


def after(health: Health, outcome: Outcome, at: datetime) -> Health:
    """Return the health after one attempt; a success ends the streak but enables nothing."""
    if outcome.effect == "success":
        return Health(
            state=health.state,
            reason=health.reason,
            failure_ratio=next_ratio(health.failure_ratio, failed=False),
            last_success_at=at,
            last_attempt_at=at,
        )
    since = _since(health, at)
    failing = replace(
        health,
        failing_since=since,
        num_failures=health.num_failures + 1,
        failure_ratio=next_ratio(health.failure_ratio, failed=True),
        last_attempt_at=at,
    )
    if health.state != ENABLED:
        return failing
    state, reason = _state(outcome, at - since)
    return replace(failing, state=state, reason=reason)


def notices(before: Health, now: Health, outcome: Outcome) -> tuple[str, ...]:
    """Return the events that the others are told: failing, exhausted, disabled, recovered.

    Each success may be a recovery, as a streak is forgotten when an endpoint is enabled: whoever
    was told of no trouble is not told of its end.
    """
    if outcome.effect == "success":
        return (RECOVERED,) if now.state == ENABLED else ()
    told = []
    if now.num_failures == TOLD_AT_FAILURE and now.state == ENABLED:
        told.append("endpoint.failing")
    if now.state != before.state:
        told.append("endpoint.disabled")
    elif outcome.next == "dead" and now.state == ENABLED:
        told.append("endpoint.exhausted")
    return tuple(told)


def _since(health: Health, at: datetime) -> datetime:
    """Return when the streak began, as far as attempts bear witness to it."""
    if health.failing_since is None:
        return at
    gap = at - (health.last_attempt_at or health.failing_since)
    unseen = max(timedelta(), gap - LONGEST_GAP)
    # A clock that was ahead must not put off the end for as long.
    return min(health.failing_since + unseen, at)


def _state(outcome: Outcome, failing_for: timedelta) -> tuple[str, str | None]:
    if outcome.effect == "gone":
        return GONE, "the receiver answered 410 (gone)"
    if outcome.effect == "invalid":
        return INVALID, "its address is one that no message is sent to"
    if failing_for >= LONGEST_FAILURE:
        return AUTO, f"no success for {LONGEST_FAILURE.days} days, last {outcome.error_code}"
    return ENABLED, None
