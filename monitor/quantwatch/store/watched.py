"""A check as its alerts see it, held still while they change."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from quantwatch.domain import Json, RunStatus
from quantwatch.store import queue
from quantwatch.store.tables import AlertRow, CheckRow, RunRow, ScheduleRow

_INACTIVE = "inactive"
_NOT_EXPECTED = ("paused", "maintenance")
"""Reasons of skipped slots from which nobody waited for a success."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of a check besides its runs."""

    id: int
    name: str
    config: Json | None
    removed_at: datetime | None
    paused_at: datetime | None
    quarantined_at: datetime | None
    last_success_at: datetime | None
    unhealthy_runs: int


def hold_check(session: Session, name: str) -> Watched | None:
    """Return a check that other writers of its runs and alerts now wait for; None if unknown."""
    query = select(CheckRow).where(CheckRow.name == name).with_for_update()
    row = session.scalars(query.execution_options(populate_existing=True)).first()
    if row is None:
        return None
    return Watched(**{field: getattr(row, field) for field in Watched.__slots__})


def checks_to_watch(session: Session) -> list[str]:
    """Return the checks that are in service or have an alert that is not inactive."""
    alerting = select(AlertRow.check_id).where(AlertRow.state != _INACTIVE)
    in_service = (CheckRow.applied_at.is_not(None)) & (CheckRow.removed_at.is_(None))
    found = session.scalars(
        select(CheckRow.name)
        .where(or_(in_service, CheckRow.id.in_(alerting)))
        .order_by(CheckRow.name)
    )
    return list(found)


def expected_slots(session: Session, check_id: int, until: datetime) -> list[datetime]:
    """Return the newest slot up to an instant that was consumed, and the one that is due.

    Slots that were skipped because the check was paused are nobody's loss. A slot that is due and
    was not consumed shows a scheduler that stands still.
    """
    newest = session.scalar(
        select(RunRow.slot_key)
        .where(
            RunRow.check_id == check_id,
            RunRow.slot_key.startswith("s:"),
            RunRow.slot_key <= queue.slot_key(until),
            or_(RunRow.reason_code.is_(None), RunRow.reason_code.not_in(_NOT_EXPECTED)),
        )
        .order_by(RunRow.slot_key.desc())
        .limit(1)
    )
    due = session.scalar(select(ScheduleRow.next_slot_at).where(ScheduleRow.check_id == check_id))
    consumed = [] if newest is None else [datetime.fromisoformat(newest[len("s:") :])]
    return [*consumed, *([due] if due is not None and due <= until else [])]


def last_trouble(session: Session, check_id: int) -> str:
    """Return how the newest run of a check that ended without results ended, in words."""
    row = session.execute(
        select(RunRow.id, RunRow.status, RunRow.reason_code, RunRow.reason_text)
        .where(
            RunRow.check_id == check_id,
            RunRow.status.in_([RunStatus.FAILED, RunStatus.TIMED_OUT, RunStatus.ABANDONED]),
        )
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(1)
    ).first()
    if row is None:
        return ""
    run_id, status, code, text = row
    return f"run {run_id} {status} ({code or 'no reason code'}): {text or 'no words'}"
