"""Runs that nobody can take: no worker that lives has the devices they need."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.config.durations import seconds
from quantwatch.domain import Json, RunEvent, RunStatus
from quantwatch.errors import LeaseLostError
from quantwatch.store import clock
from quantwatch.store.attempts import Failure
from quantwatch.store.components import list_components
from quantwatch.store.endings import Tell, Trouble, end, hold_still
from quantwatch.store.leases import LEASE_S
from quantwatch.store.queue import split
from quantwatch.store.reaper import one_by_one
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow

PATIENCE = timedelta(hours=6)
"""How long a run without a schedule waits; one with a schedule waits for its grace."""
_SILENT_AFTER = timedelta(seconds=LEASE_S)


def expire(db: Database, tell: Tell | None = None) -> list[Trouble]:
    """End runs that have waited for too long for a device that no living worker has."""
    with db.reader() as session:
        moment = clock.now(session)
        offered = list(_offered(session))
        waiting = select(RunRow.device).distinct().where(RunRow.status == RunStatus.QUEUED.value)
        missing = [
            need
            for need in session.scalars(waiting)
            if need is not None and not any(has.issuperset(split(need)) for has in offered)
        ]
        late = dict(_late(session, missing, moment))
    return one_by_one(late, lambda run_id: _expire_one(db, run_id, late[run_id], tell))


def _offered(session: Session) -> Iterable[set[str]]:
    for seen in list_components(session):
        if seen.component.kind == "worker" and seen.age <= _SILENT_AFTER:
            yield set(seen.details.get("devices") or ())


def _late(session: Session, needs: list[str], moment: datetime) -> Iterable[tuple[str, str]]:
    if not needs:
        return
    queued = RunRow.status == RunStatus.QUEUED.value
    query = select(RunRow.id, RunRow.device, RunRow.not_before, RunRow.config)
    for run_id, need, since, config in session.execute(
        query.where(queued, RunRow.device.in_(needs))
    ):
        if need is not None and since is not None and moment - since > _patience(config):
            yield run_id, need


def _patience(config: Json) -> timedelta:
    schedule: Any = config.get("schedule")
    return PATIENCE if not schedule else timedelta(seconds=seconds(schedule["grace"]))


def _expire_one(db: Database, run_id: str, need: str, tell: Tell | None) -> Trouble | None:
    """Return None when somebody took the run, or cancelled it, a moment ago."""
    text = f"no worker that is alive has {' and '.join(split(need))}; the run waited for too long"
    try:
        with db.writer() as session:
            run = hold_still(session, run_id)
            if run is None:
                return None
            return end(session, run, RunEvent.EXPIRE, Failure("gpu_unavailable", text), tell)
    except LeaseLostError:
        return None
