"""Every try of a run by a worker: who, when, how it ended, and with which words."""

import os
import platform
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import REASON_CODES, Json, RunStatus
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunAttemptRow, RunRow

COMMAND_LINE = "command line"
"""Name of whoever runs a check by hand: a person's kill -9 puts no check into quarantine."""


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Who holds a run."""

    name: str
    host: str
    pid: int

    @classmethod
    def here(cls, name: str) -> Self:
        """Return the identity of this process under a name."""
        return cls(name, platform.node() or "localhost", os.getpid())

    def slot(self, device: str) -> str:
        """Return the name of a device of this host, which one run at a time may have."""
        return f"{self.host}/{device}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended without results. `message` is redacted already.

    `error_class` is None when no exception was seen: the process was gone.
    """

    code: str
    message: str
    error_class: str | None = None
    retryable: bool = False

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            raise ValueError(f"reason code {self.code!r} is none of {', '.join(REASON_CODES)}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try as it was kept. `outcome` is None while it lasts."""

    number: int
    worker: str
    host: str
    pid: int
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    reason_code: str | None
    error_class: str | None
    message: str | None
    peak_memory_bytes: int | None
    gpus: Json | None


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the GPUs did during one attempt, or in `gpus` the reason why that is not known."""

    run_id: str
    check: str
    started_at: datetime
    ended_at: datetime | None
    peak_memory_bytes: int | None
    gpus: Json | None


def open_attempt(session: Session, run_id: str, worker: WorkerId, moment: datetime) -> int:
    """Begin the next attempt of a run; return its number, which released ones have, too."""
    who = {"worker": worker.name, "host": worker.host, "pid": worker.pid}
    number = last_number(session, run_id) + 1
    session.add(RunAttemptRow(run_id=run_id, number=number, started_at=moment, **who))
    session.flush()
    return number


def last_number(session: Session, run_id: str) -> int:
    """Return the number of a run's newest attempt, 0 when it has none."""
    newest = select(func.max(RunAttemptRow.number)).where(RunAttemptRow.run_id == run_id)
    return session.scalar(newest) or 0


def close_attempt(
    session: Session, run_id: str, outcome: str, moment: datetime, failure: Failure | None = None
) -> None:
    """End the attempt that lasts, if any (a run from before attempts were kept has none)."""
    values: dict[str, object] = {"outcome": outcome, "ended_at": moment}
    if failure is not None:
        values |= {
            "reason_code": failure.code,
            "error_class": failure.error_class,
            "message": failure.message,
        }
    session.execute(
        update(RunAttemptRow)
        .where(RunAttemptRow.run_id == run_id, RunAttemptRow.outcome.is_(None))
        .values(values)
    )


def note_usage(
    session: Session, run_id: str, number: int, peak_memory_bytes: int, gpus: Json | None
) -> None:
    """Keep what an attempt took: memory in bytes, and what the GPUs did."""
    session.execute(
        update(RunAttemptRow)
        .where(RunAttemptRow.run_id == run_id, RunAttemptRow.number == number)
        .values(peak_memory_bytes=peak_memory_bytes, gpus=gpus)
    )


def list_attempts(db: Database, run_id: str) -> list[Attempt]:
    """Return a run's attempts, the first one first."""
    query = select(RunAttemptRow).where(RunAttemptRow.run_id == run_id)
    with db.reader() as session:
        rows = session.scalars(query.order_by(RunAttemptRow.number))
        return [Attempt(**{name: getattr(row, name) for name in Attempt.__slots__}) for row in rows]


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
