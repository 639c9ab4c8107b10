"""The devices of a host: a run takes all that it measures on, or waits."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus
from quantwatch.store import lookups
from quantwatch.store.attempts import WorkerId
from quantwatch.store.queue import split
from quantwatch.store.tables import DeviceSlotRow, RunRow


def free_needs(
    session: Session, worker: WorkerId, devices: Sequence[str], moment: datetime
) -> list[str]:
    """Return what waiting runs need of the devices, where all of it is free on this host."""
    queued = select(RunRow.device).distinct().where(RunRow.status == RunStatus.QUEUED.value)
    needs = session.scalars(queued.where(RunRow.not_before <= moment))
    taken = set(session.scalars(select(DeviceSlotRow.device)))
    return [
        need
        for need in needs
        if need is not None
        and set(split(need)) <= set(devices)
        and taken.isdisjoint(map(worker.slot, split(need)))
    ]


def take(session: Session, worker: WorkerId, need: str, run_id: str, token: str) -> bool:
    """Take all devices that a run needs, or none: in one order, so that nobody waits in a ring."""
    for device in split(need):
        row = {"device": worker.slot(device), "run_id": run_id, "lease_token": token}
        insert = lookups.insert_new(session, DeviceSlotRow).values(row)
        if session.execute(insert.returning(DeviceSlotRow.device)).first() is None:
            session.execute(delete(DeviceSlotRow).where(DeviceSlotRow.lease_token == token))
            return False
    return True
