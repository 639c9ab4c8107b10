"""One look at one check: decide, queue and note it in one transaction, then count and tell."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from quantwatch.config.load import parse
from quantwatch.config.plans import Plan, plan_of
from quantwatch.config.schema import CheckConfig
from quantwatch.config.watching import ScheduleConfig
from quantwatch.errors import UserError
from quantwatch.observability import logs, meters
from quantwatch.observability.redaction import scrub
from quantwatch.scheduler.decision import Decision, Standing, decide
from quantwatch.store import clock, failed_tasks, queue, schedules
from quantwatch.store.queue import NewRun
from quantwatch.store.schedules import ScheduleState
from quantwatch.store.session import Database

log = logs.get(__name__)

PUSH_BACK = timedelta(hours=1)
"""How long a check is left alone whose next instant can't be computed."""
_OPERATION = "schedule"


@dataclass(slots=True)
class Done:
    """What became of the slots of one look."""

    check: str
    decision: Decision
    won: bool
    """Whether the slots were ours to deal with; False when another scheduler was first."""
    run_id: str | None = None
    late: timedelta = timedelta()
    recorded: list[tuple[datetime, str]] = field(default_factory=list)
    num_duplicates: int = 0


def look(db: Database, check_id: int) -> Done | None:
    """Deal with the slots of a check that are due; None when its schedule is gone meanwhile.

    Everything or nothing is written. Raises what computing raises, StoreError on a database error.
    """
    with db.writer() as session:
        state = schedules.read_state(session, check_id)
        if state is None:
            return None
        if schedules.bring_back(session, state):
            state = schedules.read_state(session, check_id) or state
        done = _deal_with(session, state)
    count(done)
    tell(done)
    return done


def push_back(db: Database, check_id: int, error: Exception) -> None:
    """Leave a check alone for an hour because of an error, visibly. Raises StoreError."""
    trouble = scrub(f"{type(error).__name__}: {error}")
    with db.writer() as session:
        state = schedules.read_state(session, check_id)
        if state is None:
            return
        schedules.push_back(session, check_id, clock.now(session) + PUSH_BACK, trouble)
        code = type(error).__name__
        failed_tasks.note_failure(session, _OPERATION, code, state.check, trouble)
    log.error("a check can't be scheduled; the others go on", error=error, check=state.check)


def count(done: Done) -> None:
    """Count what was committed."""
    if not done.won:
        lost = len(done.decision.skipped) + (done.decision.run is not None)
        meters.SLOTS_DUPLICATE.inc(lost)
        return
    meters.SLOTS_DUPLICATE.inc(done.num_duplicates)
    meters.SLOTS_MISSED.labels(check=done.check).inc(done.decision.num_missed)
    meters.RUNS.labels(check=done.check, status="skipped").inc(len(done.recorded))


def tell(done: Done) -> None:
    """Log what was committed."""
    if done.run_id is not None:
        late = round(done.late.total_seconds(), 3)
        slot = _shown(done.decision.run)
        log.info("run queued", check=done.check, run=done.run_id, slot=slot, late_s=late)
    for code in sorted({code for _, code in done.recorded}):
        slots = [slot for slot, why in done.recorded if why == code]
        log.warning(
            "slots skipped",
            check=done.check,
            reason=code,
            slots=len(slots),
            newest=_shown(slots[-1]),
        )
    if done.won and done.decision.num_unrecorded:
        unrecorded = done.decision.num_unrecorded
        log.warning("slots of a long downtime are only counted", check=done.check, slots=unrecorded)


def _deal_with(session: Session, state: ScheduleState) -> Done:
    now = clock.now(session)
    section = parse(ScheduleConfig, state.settings, f"check {state.check}")
    plan = plan_of(state.check, section, state.anchor_at)
    decision = decide(plan, _standing(state, now))
    held = state.paused_at is not None or state.quarantined_at is not None
    upcoming = None if held else decision.next
    last = decision.last or state.last_slot_at
    won = schedules.advance(session, state, last, upcoming, decision.look_at)
    done = Done(state.check, decision, won)
    if won and decision.last is not None:
        _queue(session, state, plan, done)
    if won and state.trouble is not None:
        failed_tasks.resolve(session, _OPERATION, state.check)
    if decision.run is not None:
        done.late = now - decision.run
    return done


def _standing(state: ScheduleState, now: datetime) -> Standing:
    return Standing(state.dealt_with, now, state.busy, state.paused_at, state.quarantined_at)


def _queue(session: Session, state: ScheduleState, plan: Plan, done: Done) -> None:
    """Insert the slots. One that is there already is somebody else's, which is no error."""
    pattern = _pattern(state, plan)
    for slot, code in done.decision.skipped:
        if queue.skip(session, _slot(pattern, slot), code) is None:
            done.num_duplicates += 1
        else:
            done.recorded.append((slot, code))
    if done.decision.run is not None:
        done.run_id = queue.enqueue(session, _slot(pattern, done.decision.run))
        done.num_duplicates += done.run_id is None


def _pattern(state: ScheduleState, plan: Plan) -> NewRun:
    """Return what all slots of a check have in common. Raises UserError before it was applied."""
    if state.config is None or state.base_dir is None:
        raise UserError(f"check {state.check} has no configuration; apply one")
    config = parse(CheckConfig, state.config, f"check {state.check}")
    limits = {"max_attempts": plan.attempts, "deadline_s": plan.deadline_s}
    return NewRun.of(state.check, config, state.base_dir, "", trigger="schedule", **limits)


def _slot(pattern: NewRun, slot: datetime) -> NewRun:
    return replace(pattern, slot_key=queue.slot_key(slot), scheduled_for=slot)


def _shown(slot: datetime | None) -> str | None:
    return None if slot is None else slot.isoformat(timespec="seconds")
