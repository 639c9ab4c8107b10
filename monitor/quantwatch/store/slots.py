"""The devices of a host: a run takes all that it measures on, or waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus
from quantwatch.store import lookups
from quantwatch.store.attempts import WorkerId
from quantwatch.store.queue import split
from quantwatch.store.tables import CheckRow, DeviceSlotRow, RunRow


@dataclass(frozen=True, slots=True)
class Slot:
    """A device that a run holds, so that no other one measures there."""

    device: str
    run_id: str
    check: str


def held(session: Session) -> tuple[Slot, ...]:
    """Return the devices that runs hold."""
    query = (
        select(DeviceSlotRow.device, DeviceSlotRow.run_id, CheckRow.name)
        .join(RunRow, RunRow.id == DeviceSlotRow.run_id)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .order_by(DeviceSlotRow.device)
    )
    return tuple(Slot(*row) for row in session.execute(query))


def free_needs(
    session: Session, worker: WorkerId, devices: Sequence[str], moment: datetime
) -> list[str]:
    """Return what waiting runs need of the devices, where all of it is free on this host.

    Who waits longer is served first: a run that waits for two devices keeps younger runs from both
    of them, or it would be overtaken for as long as there are any.
    """
    taken = set(session.scalars(select(DeviceSlotRow.device)))
    kept, free = {device for device in devices if worker.slot(device) in taken}, []
    for need in _needs(session, moment):
        wanted = set(split(need))
        if not wanted <= set(devices):
            # Another host's: it can't be carried out here.
            continue
        if kept.isdisjoint(wanted):
            free.append(need)
        else:
            kept |= wanted
    return free


def without(needs: Sequence[str], blocked: str) -> list[str]:
    """Return the needs that share no device with a blocked one."""
    return [need for need in needs if set(split(need)).isdisjoint(split(blocked))]


def _needs(session: Session, moment: datetime) -> list[str]:
    """Return what the runs that may start need, that of the oldest run first."""
    query = (
        select(RunRow.device)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunRow.status == RunStatus.QUEUED.value, RunRow.not_before <= moment)
        .where(CheckRow.quarantined_at.is_(None))
        .group_by(RunRow.device)
        .order_by(func.min(RunRow.queued_at), func.min(RunRow.id))
    )
    return [need for need in session.scalars(query) if need is not None]


def take(session: Session, worker: WorkerId, need: str, run_id: str, token: str) -> bool:
    """Take all devices that a run needs, or none: in one order, so that nobody waits in a ring."""
    for device in split(need):
        row = {"device": worker.slot(device), "run_id": run_id, "lease_token": token}
        insert = lookups.insert_new(session, DeviceSlotRow).values(row)
        if session.execute(insert.returning(DeviceSlotRow.device)).first() is None:
            session.execute(delete(DeviceSlotRow).where(DeviceSlotRow.lease_token == token))
            return False
    return True
