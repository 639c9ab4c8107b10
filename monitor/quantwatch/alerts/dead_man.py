"""The dead-man alert: a scheduled check from which no success came in time."""

from datetime import datetime, timedelta

from quantwatch.domain import RuleOutcome, Severity

DEAD_MAN = "dead-man"
"""Name of the rule; its candidate is empty, because it is about the check itself."""
_SHA = "dead-man 1"


def overdue_slot(
    slots: list[datetime], last_success_at: datetime | None, grace: timedelta, at: datetime
) -> datetime | None:
    """Return the newest slot whose grace is over and since which nothing succeeded, else None."""
    expected = max((slot for slot in slots if slot + grace <= at), default=None)
    if expected is None or (last_success_at is not None and last_success_at >= expected):
        return None
    return expected


def believed(last_success_at: datetime | None, grace: timedelta, at: datetime) -> datetime | None:
    """Return the last success as far as it can have been: never later than now.

    One that lies farther ahead than the grace was written by a clock that was wrong, so nobody
    knows when it was: then as if there had been none, or the check could die unseen until then.
    """
    if last_success_at is None or last_success_at - at > grace:
        return None
    return min(last_success_at, at)


def dead_man(
    slot: datetime | None, last_success_at: datetime | None, grace: timedelta, at: datetime
) -> RuleOutcome:
    """Return the outcome of the rule; `slot` is the one that is overdue. Values are in seconds."""
    last = "never" if last_success_at is None else f"{last_success_at:%Y-%m-%d %H:%M} UTC"
    words = (
        f"no successful run although the slot of {slot:%Y-%m-%d %H:%M} UTC should have had one by "
        f"{slot + grace:%Y-%m-%d %H:%M} UTC; last success: {last}"
        if slot is not None
        else f"last success: {last}"
    )
    return RuleOutcome(
        rule=DEAD_MAN,
        candidate="",
        rule_sha=_SHA,
        severity=Severity.CRITICAL,
        outcome="clear" if slot is None else "breach",
        enter_runs=1,
        leave_runs=1,
        scope=None,
        value=None if slot is None else (at - slot).total_seconds(),
        value_kind="missing" if slot is None else "finite",
        threshold=grace.total_seconds(),
        words=words,
    )
