"""Which slots are queued and which are skipped: a pure function of a plan and of where it stands.

A slot is its nominal instant. It is due at that instant plus the check's jitter, and how late it is
counts from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from quantwatch.config.plans import Plan
from quantwatch.schedules import instants, next_instant

PUNCTUAL = timedelta(minutes=5)
"""A start within this time is not late: looks are 30 s apart, and a take-over takes 30 s more."""
MOST_RECORDED = 100
"""Slots of one downtime that get a row each; older ones are counted and logged."""
MOST_AT_ONCE = 10_000
"""Slots that one look goes through; a minutely check that was down for a year takes several."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a check stands when somebody looks at its schedule."""

    dealt_with: datetime
    """Slots up to this instant are settled."""
    now: datetime
    busy: bool = False
    """Whether one of its runs is queued or under way."""
    paused_at: datetime | None = None
    quarantined_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the slots that are due, oldest first."""

    run: datetime | None
    skipped: tuple[tuple[datetime, str], ...]
    """Slots to record, each with its reason code."""
    num_missed: int
    """Missed slots, recorded or not."""
    num_unrecorded: int
    """Slots that are too many to be recorded."""
    last: datetime | None
    """The newest slot dealt with."""
    next: datetime
    """The next nominal instant."""
    look_at: datetime


def decide(plan: Plan, standing: Standing) -> Decision:
    """Decide about all slots that are due; about the oldest part of them when they are too many."""
    until = standing.now - plan.jitter
    found = instants(plan.schedule, standing.dealt_with, until)
    slots = list(islice(found, MOST_AT_ONCE + MOST_RECORDED))
    if len(slots) == MOST_AT_ONCE + MOST_RECORDED:
        return _too_many(slots, plan, standing)
    last = slots[-1] if slots else None
    coming = next_instant(plan.schedule, last or standing.dealt_with)
    newest = slots[-1:]
    reasons = [(slot, _reason_of_older(slot, plan, standing)) for slot in slots[:-1]]
    reasons += [
        (slot, code) for slot in newest if (code := _reason_of_newest(slot, plan, standing))
    ]
    return Decision(
        run=last if last is not None and len(reasons) < len(slots) else None,
        skipped=tuple(reasons[-MOST_RECORDED:]),
        num_missed=_count_missed(reasons),
        num_unrecorded=max(len(reasons) - MOST_RECORDED, 0),
        last=last,
        next=coming,
        look_at=coming + plan.jitter,
    )


def _too_many(slots: Sequence[datetime], plan: Plan, standing: Standing) -> Decision:
    """Count the older ones and look again at once, with enough left to be recorded."""
    counted = slots[:MOST_AT_ONCE]
    reasons = [(slot, _reason_of_older(slot, plan, standing)) for slot in counted]
    return Decision(
        run=None,
        skipped=(),
        num_missed=_count_missed(reasons),
        num_unrecorded=len(counted),
        last=counted[-1],
        next=slots[MOST_AT_ONCE],
        look_at=standing.now,
    )


def _reason_of_older(slot: datetime, plan: Plan, standing: Standing) -> str:
    """Only the newest slot can still be run."""
    return _held_back(slot, plan, standing) or "missed"


def _reason_of_newest(slot: datetime, plan: Plan, standing: Standing) -> str | None:
    if standing.paused_at is not None or standing.quarantined_at is not None:
        # One that should have run before somebody paused the check is not made up for meanwhile.
        return _reason_of_older(slot, plan, standing)
    allowed = plan.grace if plan.catch_up else min(plan.grace, PUNCTUAL)
    if standing.now - (slot + plan.jitter) > allowed:
        return "missed"
    return "overlap" if standing.busy else None


def _held_back(slot: datetime, plan: Plan, standing: Standing) -> str | None:
    """Return why a slot was not to be run: the check was paused or quarantined when it was due."""
    since = {"paused": standing.paused_at, "quarantined": standing.quarantined_at}
    due_at = slot + plan.jitter
    return next((code for code, at in since.items() if at is not None and due_at >= at), None)


def _count_missed(reasons: Sequence[tuple[datetime, str]]) -> int:
    return sum(code == "missed" for _, code in reasons)
