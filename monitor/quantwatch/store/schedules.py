"""Schedules as they were applied, and how far each check's slots have been dealt with."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from quantwatch.config.plans import length
from quantwatch.config.schema import CheckConfig
from quantwatch.config.watching import ScheduleConfig
from quantwatch.domain import Json, RunStatus
from quantwatch.schedules import jitter_of
from quantwatch.store import clock, lookups
from quantwatch.store.tables import CheckRow, RunRow, ScheduleRow
from quantwatch.store.types import json_sha

_TIMING = ("cron", "every", "zone")
_UNENDED = [status.value for status in RunStatus if not status.is_ended]


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A check's schedule and where it stands, as one transaction reads it."""

    check_id: int
    check: str
    settings: Json
    settings_sha: str
    anchor_at: datetime
    last_slot_at: datetime | None
    next_slot_at: datetime | None
    look_at: datetime
    trouble: str | None
    config: Json | None
    base_dir: str | None
    paused_at: datetime | None
    quarantined_at: datetime | None
    busy: bool
    """Whether a run of the check is queued or under way."""

    @property
    def dealt_with(self) -> datetime:
        """Slots up to this instant are settled: each is queued, skipped, or none of ours."""
        return max(self.anchor_at, self.last_slot_at or self.anchor_at)


def apply(session: Session, checks: Mapping[str, CheckConfig]) -> None:
    """Make these the schedules in force; a check that has none any more is scheduled no longer."""
    _hold_all(session)
    wanted = {name: check.schedule for name, check in checks.items() if check.schedule is not None}
    for name in sorted(wanted):
        apply_one(session, name, wanted[name])
    kept = select(CheckRow.id).where(CheckRow.name.in_(list(wanted)))
    gone = delete(ScheduleRow).where(ScheduleRow.check_id.not_in(kept))
    session.execute(gone.execution_options(synchronize_session=False))


def apply_one(session: Session, check: str, section: ScheduleConfig) -> None:
    """Put a check's schedule in force. Its history stays: a slot's key is its instant.

    A new or moved schedule begins now, with the slots whose jittered time is still to come.
    """
    settings = section.model_dump(mode="json")
    check_id, moment = lookups.check_id(session, check), clock.now(session)
    row = session.get(ScheduleRow, check_id, with_for_update=True, populate_existing=True)
    if row is not None and row.settings_sha == json_sha(settings):
        return
    if row is None or any(row.settings.get(key) != settings[key] for key in _TIMING):
        anchor = moment - jitter_of(check, length(section.jitter))
    else:
        anchor = row.anchor_at
    changed = {
        "settings": settings,
        "settings_sha": json_sha(settings),
        "anchor_at": anchor,
        "next_slot_at": None,
        "look_at": moment,
        "trouble": None,
    }
    if row is None:
        session.execute(
            lookups.insert_new(session, ScheduleRow), [{"check_id": check_id, **changed}]
        )
    else:
        _update(session, check_id, changed)


def due(session: Session, limit: int) -> list[int]:
    """Return the checks whose schedule is to be looked at now, longest due first."""
    moment = clock.now(session)
    query = (
        select(ScheduleRow.check_id)
        .join(CheckRow, CheckRow.id == ScheduleRow.check_id)
        .where(ScheduleRow.look_at <= moment, CheckRow.removed_at.is_(None))
        .order_by(ScheduleRow.look_at, ScheduleRow.check_id)
        .limit(limit)
    )
    return list(session.scalars(query))


def next_look(session: Session) -> datetime | None:
    """Return when a schedule is to be looked at next; None without schedules."""
    query = select(func.min(ScheduleRow.look_at)).join(
        CheckRow, CheckRow.id == ScheduleRow.check_id
    )
    return session.scalar(query.where(CheckRow.removed_at.is_(None)))


def read_state(session: Session, check_id: int) -> ScheduleState | None:
    """Return a check's schedule; None when it has none."""
    return next(iter(_states(session, CheckRow.id == check_id)), None)


def states_by_check(session: Session) -> dict[str, ScheduleState]:
    """Return all schedules by their check's name."""
    return {state.check: state for state in _states(session, CheckRow.removed_at.is_(None))}


def bring_back(session: Session, state: ScheduleState) -> bool:
    """Take back what a clock that ran ahead has dealt with; say whether anything was.

    A slot that is there already is not run twice, by its key.
    """
    now = clock.now(session)
    if state.dealt_with <= now:
        return False
    last = None if state.last_slot_at is None else min(state.last_slot_at, now)
    values = {"anchor_at": min(state.anchor_at, now), "last_slot_at": last}
    _update(session, state.check_id, values)
    return True


def advance(
    session: Session,
    state: ScheduleState,
    last_slot_at: datetime | None,
    next_slot_at: datetime | None,
    look_at: datetime,
) -> bool:
    """Note that slots are dealt with, unless somebody else did or the schedule was edited.

    A guarded update: False means that somebody else won, and nothing is to be queued.
    """
    change = (
        update(ScheduleRow)
        .where(ScheduleRow.check_id == state.check_id)
        .where(ScheduleRow.settings_sha == state.settings_sha)
        .where(ScheduleRow.anchor_at == state.anchor_at)
        .where(ScheduleRow.last_slot_at.is_not_distinct_from(state.last_slot_at))
        .values(last_slot_at=last_slot_at, next_slot_at=next_slot_at, look_at=look_at, trouble=None)
        .returning(ScheduleRow.check_id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(change).first() is not None


def push_back(session: Session, check_id: int, look_at: datetime, trouble: str) -> None:
    """Look at a check later and say why: nothing can be computed for it now."""
    _update(session, check_id, {"next_slot_at": None, "look_at": look_at, "trouble": trouble})


def look_again(session: Session, check: str | None = None) -> None:
    """Let all schedules, or a check's, be looked at now. What was dealt with stays so."""
    change = update(ScheduleRow).values(look_at=clock.now(session))
    if check is None:
        _hold_all(session)
    else:
        mine = select(CheckRow.id).where(CheckRow.name == check)
        change = change.where(ScheduleRow.check_id == mine.scalar_subquery())
    session.execute(change.execution_options(synchronize_session=False))


def _hold_all(session: Session) -> None:
    """Lock every schedule in one order: two that change all of them would wait for each other."""
    query = select(ScheduleRow.check_id).order_by(ScheduleRow.check_id).with_for_update()
    session.execute(query).all()


def _update(session: Session, check_id: int, values: Json) -> None:
    change = update(ScheduleRow).where(ScheduleRow.check_id == check_id).values(**values)
    session.execute(change.execution_options(synchronize_session=False))


def _states(session: Session, which: ColumnElement[bool]) -> list[ScheduleState]:
    busy = (
        select(RunRow.id)
        .where(RunRow.check_id == CheckRow.id, RunRow.status.in_(_UNENDED))
        .exists()
    )
    query = select(ScheduleRow, CheckRow, busy).join(CheckRow, CheckRow.id == ScheduleRow.check_id)
    rows = session.execute(
        query.where(which).order_by(CheckRow.name).execution_options(populate_existing=True)
    )
    return [_state(*row) for row in rows]


def _state(schedule: ScheduleRow, check: CheckRow, busy: bool) -> ScheduleState:
    return ScheduleState(
        check_id=check.id,
        check=check.name,
        settings=schedule.settings,
        settings_sha=schedule.settings_sha,
        anchor_at=schedule.anchor_at,
        last_slot_at=schedule.last_slot_at,
        next_slot_at=schedule.next_slot_at,
        look_at=schedule.look_at,
        trouble=schedule.trouble,
        config=check.config,
        base_dir=check.base_dir,
        paused_at=check.paused_at,
        quarantined_at=check.quarantined_at,
        busy=busy,
    )
