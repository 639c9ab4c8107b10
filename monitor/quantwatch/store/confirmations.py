"""Confirmation runs: queued in the transaction of the run whose breach they are to confirm."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import Json, RunStatus
from quantwatch.store import queue
from quantwatch.store.tables import CheckRow, RunRow

TRIGGER = "confirm"


@dataclass(frozen=True, slots=True)
class Origin:
    """Why a run was made. `confirms` is the run that it is to confirm."""

    confirms: str | None
    repeatable: bool
    """Whether a worker could run the same again: a run of the command line has no folder."""


def origin(session: Session, run_id: str) -> Origin:
    """Return why a run was made."""
    trigger, parent, base_dir = session.execute(
        select(RunRow.trigger, RunRow.parent_run_id, RunRow.base_dir).where(RunRow.id == run_id)
    ).one()
    return Origin(parent if trigger == TRIGGER else None, base_dir is not None)


def was_asked(session: Session, run_id: str) -> bool:
    """Say whether a confirmation of a run was ever queued: there is one at most."""
    mine = RunRow.slot_key == f"c:{run_id}:1", RunRow.parent_run_id == run_id
    return session.scalar(select(RunRow.id).where(*mine).limit(1)) is not None


def queue_confirmation(session: Session, run_id: str, config: Json | None = None) -> str | None:
    """Queue the same run once more; return its id, None when that was done before.

    `config` has the rules that it is judged by; the run's own when absent.
    """
    run, check = session.execute(
        select(RunRow, CheckRow.name)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunRow.id == run_id)
        .execution_options(populate_existing=True)
    ).one()
    limits: dict[str, Any] = {} if run.deadline_s is None else {"deadline_s": run.deadline_s}
    new = queue.NewRun(
        check=check,
        slot_key=f"c:{run_id}:1",
        config=run.config if config is None else config,
        base_dir=run.base_dir or "",
        trigger=TRIGGER,
        device=run.device or "cpu",
        parent_run_id=run_id,
        actor=run.actor,
        max_attempts=max(run.max_attempts, 1),
        **limits,
    )
    return queue.enqueue(session, new)


def answer(session: Session, run_id: str) -> str | None:
    """Return the status in which the confirmation of a run ended; None while it may still answer.

    One that is not there any more counts as cancelled.
    """
    status = session.scalar(
        select(RunRow.status)
        .where(RunRow.slot_key == f"c:{run_id}:1", RunRow.parent_run_id == run_id)
        .limit(1)
    )
    if status is None:
        return RunStatus.CANCELLED.value
    return status if RunStatus(status).is_ended else None
