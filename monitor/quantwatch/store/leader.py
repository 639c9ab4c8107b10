"""Who schedules: a lease on the database's clock, with an epoch that counts take-overs.

Only an optimisation: two leaders at once do each other's work once, because a slot is UNIQUE.
"""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from quantwatch.store import clock, lookups
from quantwatch.store.session import Database
from quantwatch.store.tables import LeaderRow

TTL = timedelta(seconds=30)
_NAME = "scheduler"


@dataclass(frozen=True, slots=True)
class Lease:
    """What its holder shows to renew it."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Leader:
    """Who schedules. `left` is negative when the lease has run out."""

    holder: str
    epoch: int
    left: timedelta


def current(session: Session) -> Leader | None:
    """Return who schedules, or did last; None when nobody ever has."""
    row = session.scalar(select(LeaderRow).where(LeaderRow.name == _NAME))
    return None if row is None else Leader(row.holder, row.epoch, row.until - clock.now(session))


def acquire(db: Database, holder: str) -> Lease | None:
    """Take the lease if nobody has it or it has run out; None when somebody else leads."""
    with db.writer() as session:
        moment = clock.now(session)
        # Further ahead than any lease reaches: the clock was set back, and nobody should wait.
        free = or_(LeaderRow.until <= moment, LeaderRow.until > moment + TTL)
        take_over = (
            update(LeaderRow)
            .where(LeaderRow.name == _NAME, free)
            .values(holder=holder, epoch=LeaderRow.epoch + 1, until=moment + TTL)
            .returning(LeaderRow.epoch)
        )
        epoch = session.execute(take_over).scalar()
        if epoch is None:
            row = {"name": _NAME, "holder": holder, "epoch": 1, "until": moment + TTL}
            insert = lookups.insert_new(session, LeaderRow).values(row).returning(LeaderRow.epoch)
            epoch = session.execute(insert).scalar()
    return None if epoch is None else Lease(holder, int(epoch))


def renew(db: Database, lease: Lease) -> bool:
    """Hold the lease for longer; False when it ran out or somebody else took over."""
    return _set_until(db, lease, TTL)


def release(db: Database, lease: Lease) -> None:
    """Let the next one lead at once."""
    _set_until(db, lease, timedelta(0))


def _set_until(db: Database, lease: Lease, length: timedelta) -> bool:
    with db.writer() as session:
        moment = clock.now(session)
        change = (
            update(LeaderRow)
            .where(LeaderRow.name == _NAME, LeaderRow.until > moment)
            .where(LeaderRow.holder == lease.holder, LeaderRow.epoch == lease.epoch)
            .values(until=moment + length)
            .returning(LeaderRow.name)
        )
        return session.execute(change).first() is not None
