"""How the service does, as people are shown it: who leads, what waits, what GPUs did in runs."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from quantwatch.domain import Json, RunStatus
from quantwatch.store import clock
from quantwatch.store.states import Timetable
from quantwatch.store.tables import (
    AppliedSettingsRow,
    CheckRow,
    DeliveryRow,
    DeviceSlotRow,
    LeaderRow,
    RunAttemptRow,
    RunCandidateRow,
    RunRow,
    ScheduleRow,
)


@dataclass(frozen=True, slots=True)
class Leader:
    """Who schedules. `left` is negative when the lease has run out."""

    holder: str
    epoch: int
    left: timedelta


@dataclass(frozen=True, slots=True)
class Slot:
    """A device that a run holds, so that no other one measures there."""

    device: str
    run_id: str
    check: str


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the GPUs did during one attempt, or in `gpus` the reason why that is not known."""

    run_id: str
    check: str
    started_at: datetime
    ended_at: datetime | None
    peak_memory_bytes: int | None
    gpus: Json | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A check's schedule and when it runs next; None where nothing was computed."""

    check: str
    timetable: Timetable
    paused_at: datetime | None
    quarantined_at: datetime | None


@dataclass(frozen=True, slots=True)
class AppliedCheck:
    """A check as it was applied last."""

    check: str
    config: Json
    folder: str
    applied_at: datetime | None


def leader(session: Session) -> Leader | None:
    """Return who schedules, or did last; None when nobody ever has."""
    row = session.scalar(select(LeaderRow).where(LeaderRow.name == "scheduler"))
    return None if row is None else Leader(row.holder, row.epoch, row.until - clock.now(session))


def slots(session: Session) -> tuple[Slot, ...]:
    """Return the devices that runs hold."""
    query = (
        select(DeviceSlotRow.device, DeviceSlotRow.run_id, CheckRow.name)
        .join(RunRow, RunRow.id == DeviceSlotRow.run_id)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .order_by(DeviceSlotRow.device)
    )
    return tuple(Slot(*row) for row in session.execute(query))


def candidate_notes(
    session: Session, run_ids: Collection[str]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return what loading the candidates of these runs noted, by check and candidate."""
    query = (
        select(CheckRow.name, RunCandidateRow.name, RunCandidateRow.variant_details)
        .join(RunRow, RunRow.id == RunCandidateRow.run_id)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunCandidateRow.run_id.in_(list(run_ids)))
    )
    return {
        (row[0], row[1]): tuple((row[2] or {}).get("notes") or ()) for row in session.execute(query)
    }


def timetable(session: Session) -> tuple[Planned, ...]:
    """Return the schedules of all checks in use, by name.

    Unlike the scheduler's own query it does not look for runs: that reads a year of them.
    """
    query = (
        select(ScheduleRow, CheckRow)
        .join(CheckRow, CheckRow.id == ScheduleRow.check_id)
        .where(CheckRow.removed_at.is_(None))
        .order_by(CheckRow.name)
    )
    return tuple(
        Planned(
            check.name,
            Timetable(row.settings, row.next_slot_at, row.last_slot_at, row.trouble),
            check.paused_at,
            check.quarantined_at,
        )
        for row, check in session.execute(query)
    )


def quarantined(session: Session) -> tuple[tuple[str, datetime], ...]:
    """Return the checks that are set apart, and since when."""
    since = CheckRow.quarantined_at
    query = select(CheckRow.name, since).where(since.is_not(None)).order_by(since)
    return tuple((row[0], row[1]) for row in session.execute(query) if row[1] is not None)


def deliveries_by_state(session: Session) -> dict[str, int]:
    """Return how many deliveries are in each state."""
    query = select(DeliveryRow.state, func.count()).group_by(DeliveryRow.state)
    return {row[0]: row[1] for row in session.execute(query)}


def telemetry(session: Session, limit: int) -> tuple[Telemetry, ...]:
    """Return the attempts of the newest runs, newest first."""
    newest = (
        select(RunRow.id)
        .where(RunRow.status != RunStatus.SKIPPED.value)
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(limit)
    ).subquery()
    query = (
        select(RunAttemptRow, CheckRow.name)
        .join(newest, newest.c.id == RunAttemptRow.run_id)
        .join(RunRow, RunRow.id == RunAttemptRow.run_id)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .order_by(RunAttemptRow.started_at.desc(), RunAttemptRow.run_id.desc())
        .limit(limit)
    )
    own = set(Telemetry.__slots__) - {"check"}
    return tuple(
        Telemetry(check=check, **{name: getattr(row, name) for name in own})
        for row, check in session.execute(query)
    )


def checks_applied(session: Session) -> tuple[AppliedCheck, ...]:
    """Return the checks that the service works with, by name."""
    query = select(CheckRow).where(CheckRow.config_sha.is_not(None), CheckRow.removed_at.is_(None))
    return tuple(
        AppliedCheck(row.name, row.config or {}, row.base_dir or "", row.applied_at)
        for row in session.scalars(query.order_by(CheckRow.name))
    )


def settings_applied(session: Session) -> tuple[tuple[str, Json, datetime], ...]:
    """Return what was applied besides checks: name, document without secrets, when."""
    rows = session.scalars(select(AppliedSettingsRow).order_by(AppliedSettingsRow.name))
    return tuple((row.name, row.document, row.applied_at) for row in rows)


def schema_revision(session: Session) -> str | None:
    """Return the newest migration that this database has."""
    found = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)
