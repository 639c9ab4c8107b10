"""When checks run, who runs them, and what a team did to them."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument, Key, Prose


class ScheduleRow(Base):
    """One check's schedule as it was applied, and where the scheduler stands with it."""

    __tablename__ = "schedule"

    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"), primary_key=True)
    settings: Mapped[JsonDocument]
    """The check's `schedule` section."""
    settings_sha: Mapped[str]
    anchor_at: Mapped[datetime]
    """Slots begin after this instant; an interval counts elapsed time from it."""
    last_slot_at: Mapped[datetime | None]
    """Newest nominal instant that was queued or skipped."""
    next_slot_at: Mapped[datetime | None] = mapped_column(index=True)
    """Next nominal instant; NULL when there is none (paused, broken, never)."""
    look_at: Mapped[datetime] = mapped_column(index=True)
    """When to look at it again: next slot plus jitter, or later after an error."""
    trouble: Mapped[Prose | None]
    """Why no instant could be computed."""


class DeviceSlotRow(Base):
    """One run per device at a time: the row is taken together with the run's lease."""

    __tablename__ = "device_slot"

    device: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    lease_token: Mapped[str]


class LeaderRow(Base):
    """Who schedules. An optimisation: the slot's UNIQUE key is the safety."""

    __tablename__ = "leader"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    epoch: Mapped[Count]
    until: Mapped[datetime]


class TriggerRow(Base):
    """An idempotency key of a manual run, by who used it."""

    __tablename__ = "trigger_key"

    actor: Mapped[str] = mapped_column(primary_key=True)
    key_sha: Mapped[str] = mapped_column(primary_key=True)
    request_sha: Mapped[str]
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    expires_at: Mapped[datetime]


class ComponentRow(Base):
    """A running part of the service: scheduler, worker, delivery, metrics."""

    __tablename__ = "component"

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    host: Mapped[str]
    pid: Mapped[Count]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    details: Mapped[JsonDocument]


class AppliedSettingsRow(Base):
    """A part of the configuration that has no row of its own, as it was applied last."""

    __tablename__ = "applied_settings"

    name: Mapped[str] = mapped_column(primary_key=True)
    """service, retention, or endpoint: and its name."""
    document: Mapped[JsonDocument]
    """Without secrets: of them and of addresses there is a digest."""
    applied_at: Mapped[datetime]


class FailedTaskRow(Base):
    """A failed operation, once per thing it was about: counted by operation or by error."""

    __tablename__ = "failed_task"
    __table_args__ = (
        Index(None, "operation", "error_code", "subject", unique=True),
        Index(None, "last_at"),
    )

    id: Mapped[Key]
    operation: Mapped[str]
    error_code: Mapped[str]
    subject: Mapped[str]
    attempts: Mapped[Count]
    first_at: Mapped[datetime]
    last_at: Mapped[datetime]
    message: Mapped[Prose]
    resolved_at: Mapped[datetime | None]


class AuditRow(Base):
    """Who changed what, and how it was before."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "subject", "at"),)

    id: Mapped[Key]
    at: Mapped[datetime]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    before: Mapped[JsonDocument | None]
    after: Mapped[JsonDocument | None]
