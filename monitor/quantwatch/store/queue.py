"""Runs that wait for a worker, and slots that are skipped. The UNIQUE slot key is the safety."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from sqlalchemy import Insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from quantwatch.config.durations import seconds
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import REASON_CODES, Json, RunStatus
from quantwatch.store import clock, lookups
from quantwatch.store.tables import RunRow
from quantwatch.telemetry import new_run_id

_AND = ","


@dataclass(frozen=True, slots=True)
class NewRun:
    """What is asked for: a check as it is configured now, and why it runs."""

    check: str
    slot_key: str
    """`s:` + nominal UTC instant, `m:` + key hash or run id, `c:` + parent run + `:` + number."""
    config: Json
    base_dir: str
    trigger: str = "manual"
    device: str = "cpu"
    scheduled_for: datetime | None = None
    not_before: datetime | None = None
    parent_run_id: str | None = None
    actor: str | None = None
    max_attempts: int = 3
    deadline_s: float = 7200.0

    @classmethod
    def of(cls, name: str, check: CheckConfig, base_dir: str, slot_key: str, **fields: Any) -> Self:
        """Ask for a run of a check as configured: its device, attempts and deadline."""
        schedule = check.schedule
        if schedule is not None:
            limits = {"max_attempts": schedule.attempts, "deadline_s": seconds(schedule.deadline)}
            fields = {**limits, **fields}
        return cls(
            check=name,
            slot_key=slot_key,
            config=check.model_dump(mode="json"),
            base_dir=base_dir,
            device=device_of(check),
            **fields,
        )


def device_of(check: CheckConfig) -> str:
    """Return the devices that a check measures on, as `split` reads them: the CPU beside none."""
    devices = {variant.device for variant in (check.reference, *check.candidates)} - {"cpu"}
    named = {"cuda:0" if device == "cuda" else device for device in devices}
    return _AND.join(sorted(named or {"cpu"}))


def split(device: str) -> tuple[str, ...]:
    """Return all devices that a run needs at once, in the one order in which they are taken."""
    return tuple(device.split(_AND))


def slot_key(scheduled_for: datetime) -> str:
    """Return the key of a scheduled slot: its nominal instant in UTC, to the second."""
    if scheduled_for.tzinfo is None:
        raise ValueError(f"slot {scheduled_for.isoformat()} has no time zone")
    return f"s:{scheduled_for.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def enqueue(session: Session, new: NewRun) -> str | None:
    """Queue a run; return its id, or None when its slot was taken already."""
    return _insert(session, new, {"status": RunStatus.QUEUED.value})


def skip(session: Session, new: NewRun, reason_code: str) -> str | None:
    """Record a slot that is not run (missed, overlap, paused, …); it is consumed like any other.

    Return the id of the row, or None when the slot was taken already.
    """
    if reason_code not in REASON_CODES:
        raise ValueError(f"reason code {reason_code!r} is none of {', '.join(REASON_CODES)}")
    ended = clock.now(session)
    values = {"status": RunStatus.SKIPPED.value, "reason_code": reason_code, "finished_at": ended}
    return _insert(session, new, values)


def _insert(session: Session, new: NewRun, values: dict[str, Any]) -> str | None:
    moment = clock.now(session)
    row = {
        "id": new_run_id(),
        "check_id": lookups.check_id(session, new.check),
        **{name: getattr(new, name) for name in NewRun.__slots__ if name != "check"},
        **EMPTY,
        "started_at": moment,
        "queued_at": moment,
        "not_before": new.not_before or moment,
        **values,
    }
    done = session.execute(_insert_once(session).values(**row).returning(RunRow.id)).first()
    return None if done is None else str(done[0])


def _insert_once(session: Session) -> Insert:
    key = ["check_id", "slot_key"]
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(RunRow).on_conflict_do_nothing(index_elements=key)
    return sqlite.insert(RunRow).on_conflict_do_nothing(index_elements=key)


EMPTY: dict[str, Any] = {
    "suite_name": "",
    "num_tokens": 0,
    "num_prompts": 0,
    "capture_sha": "",
    "metrics_version": 0,
    "num_alerts": 0,
    "attempt": 0,
    "tokens_done": 0,
    "tokens_total": 0,
    "capture": {},
    "timings_s": {},
    "baseline_mismatch": [],
}
"""What a run has before it is measured."""
