"""Who holds a run: claimed by one conditional UPDATE, kept by heartbeats, fenced by a token.

Times are the database's. Every write of a worker names its token; when it meets no row the run is
somebody else's by now, and the worker drops what it found.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from quantwatch.domain import Json, RunEvent, RunStatus
from quantwatch.errors import LeaseLostError
from quantwatch.store import clock, slots
from quantwatch.store.attempts import WorkerId, last_number, open_attempt
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunRow
from quantwatch.store.transitions import change

LEASE_S = 120.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that this process holds until its lease ends or it is taken away."""

    run_id: str
    check: str
    token: str
    attempt: int
    max_attempts: int
    number: int
    """Which row of `run_attempt`; differs from `attempt` when attempts were released."""
    claimed_at: datetime
    deadline_at: datetime | None
    config: Json
    base_dir: str
    device: str
    lease_s: float = LEASE_S


@dataclass(frozen=True, slots=True)
class Report:
    """How far a run is."""

    stage: str | None = None
    tokens_done: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker has to know about the run it holds. Seconds by the database's clock."""

    cancelled_for_s: float | None
    """Since somebody asked to cancel it; None when nobody did."""
    overdue_s: float
    """Past its deadline; negative before."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A new hold on a run: its token, since when, for how long."""

    token: str
    moment: datetime
    lease_s: float = LEASE_S

    @property
    def values(self) -> dict[str, Any]:
        """The columns of the run's row."""
        until = self.moment + timedelta(seconds=self.lease_s)
        return {"lease_token": self.token, "lease_until": until, "heartbeat_at": self.moment}


def claim(
    session: Session, worker: WorkerId, devices: Sequence[str], *, lease_s: float = LEASE_S
) -> Claim | None:
    """Take the oldest run that may start on these devices, with all that it needs of them, or None.

    Passed over: runs whose time hasn't come, checks in quarantine, devices of this host in use.
    """
    moment = clock.now(session)
    free = slots.free_needs(session, worker, devices, moment)
    while free:
        found = session.execute(_next(moment, free)).first()
        if found is None:
            return None
        token = new_token()
        if slots.take(session, worker, found.device, found.id, token):
            return _hold(session, worker, found, Lease(token, moment, lease_s))
        # Another worker took a device a moment ago; nobody younger gets the others of this run.
        free = slots.without(free, found.device)
    return None


def heartbeat(db: Database, held: Claim, report: Report) -> None:
    """Renew the lease and show progress. Raises LeaseLostError when it has ended or was taken."""
    with db.writer() as session:
        moment = clock.now(session)
        values = {
            **Lease(held.token, moment, held.lease_s).values,
            "stage": report.stage,
            "tokens_done": report.tokens_done,
            "tokens_total": report.tokens_total,
        }
        alive = RunRow.lease_until > moment
        mine = RunRow.lease_token == held.token
        if not change(session, held.run_id, RunEvent.BEAT, values, mine, alive):
            raise lost(held)


def advance(db: Database, held: Claim, event: RunEvent) -> None:
    """Move a held run one step (prepare, measure, finalize); that is a heartbeat, too.

    Raises LeaseLostError when it is no longer held, or not in the state that the step begins in.
    """
    with db.writer() as session:
        values = Lease(held.token, clock.now(session), held.lease_s).values
        if not change(session, held.run_id, event, values, RunRow.lease_token == held.token):
            raise lost(held)


def standing(db: Database, held: Claim) -> Standing:
    """Look whether a held run was cancelled or is overdue; writes nothing.

    Raises LeaseLostError when it is no longer held.
    """
    query = select(RunRow.cancel_requested_at, RunRow.deadline_at)
    with db.reader() as session:
        moment = clock.now(session)
        found = session.execute(
            query.where(RunRow.id == held.run_id, RunRow.lease_token == held.token)
        ).first()
    if found is None:
        raise lost(held)
    asked, deadline = found
    overdue = float("-inf") if deadline is None else (moment - deadline).total_seconds()
    return Standing(None if asked is None else (moment - asked).total_seconds(), overdue)


def find_claim(db: Database, run_id: str, token: str, lease_s: float = LEASE_S) -> Claim:
    """Return the claim of a run that is held under a token. Raises LeaseLostError when it isn't."""
    with db.reader() as session:
        mine = _runs().where(RunRow.id == run_id, RunRow.lease_token == token)
        found = session.execute(mine).first()
        number = last_number(session, run_id)
    if found is None:
        raise LeaseLostError(f"Run {run_id} is not held by this worker.")
    return _claim(found, Lease(token, found.started_at, lease_s), found.attempt, number)


def lost(held: Claim) -> LeaseLostError:
    """Return the error of a worker whose run was taken away."""
    return LeaseLostError(
        f"Run {held.run_id} is no longer held by this worker (attempt {held.attempt}); what it "
        "found is dropped."
    )


def new_token() -> str:
    """Return a fencing token: random, never used before."""
    return secrets.token_hex(16)


def _next(moment: datetime, needs: Sequence[str]) -> Select[*tuple[Any, ...]]:
    return (
        _runs()
        .where(RunRow.status == RunStatus.QUEUED.value, RunRow.not_before <= moment)
        .where(RunRow.device.in_(needs), CheckRow.quarantined_at.is_(None))
        .order_by(RunRow.queued_at, RunRow.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=RunRow)
    )


def _runs() -> Select[*tuple[Any, ...]]:
    return select(
        RunRow.id,
        RunRow.attempt,
        RunRow.max_attempts,
        RunRow.deadline_s,
        RunRow.device,
        RunRow.config,
        RunRow.base_dir,
        RunRow.started_at,
        CheckRow.name,
    ).join(CheckRow, CheckRow.id == RunRow.check_id)


def _hold(session: Session, worker: WorkerId, found: Any, lease: Lease) -> Claim:
    deadline = _deadline(lease.moment, found.deadline_s)
    values = {
        **lease.values,
        "attempt": found.attempt + 1,
        "started_at": lease.moment,
        "deadline_at": deadline,
    }
    if not change(session, found.id, RunEvent.CLAIM, values):
        raise LeaseLostError(f"Run {found.id} was claimed by somebody else meanwhile.")
    number = open_attempt(session, found.id, worker, lease.moment)
    return _claim(found, lease, found.attempt + 1, number)


def _claim(found: Any, lease: Lease, attempt: int, number: int) -> Claim:
    return Claim(
        run_id=found.id,
        check=found.name,
        token=lease.token,
        attempt=attempt,
        max_attempts=found.max_attempts,
        number=number,
        claimed_at=lease.moment,
        deadline_at=_deadline(lease.moment, found.deadline_s),
        config=found.config,
        base_dir=found.base_dir or ".",
        device=found.device or "cpu",
        lease_s=lease.lease_s,
    )


def _deadline(moment: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else moment + timedelta(seconds=seconds)
