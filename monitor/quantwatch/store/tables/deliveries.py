"""The outbox: what is to be told, to whom, and how that went."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, Key, Prose

_OPEN: Any = {
    "sqlite_where": text("ended_at IS NULL"),
    "postgresql_where": text("ended_at IS NULL"),
}


class EventRow(Base):
    """Something that is told, written in the transaction in which it happened. Never changes."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "subject", "seq"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """ULID: the `webhook-id` of every attempt and replay."""
    type: Mapped[str]
    """alert.firing, alert.escalated, alert.reminder, alert.resolved, endpoint.…, test."""
    occurred_at: Mapped[datetime]
    subject: Mapped[str]
    """What the order is kept for: an episode's group, or the endpoint itself."""
    seq: Mapped[Count]
    """Order within the subject."""
    body: Mapped[bytes]
    """The versioned JSON document, from which other formats are rendered."""


class DeliveryRow(Base):
    """One event for one endpoint.

    state: pending → sending → delivered | retry_wait → … | dead | suppressed | cancelled; or
    grouped while a digest carries it, which it then ends like.
    """

    __tablename__ = "delivery"
    __table_args__ = (
        UniqueConstraint("event_id", "endpoint"),
        Index(None, "state", "next_at"),
        Index(None, "endpoint", "subject", "seq"),
        # What waits, oldest first, and before what: a long history never slows a claim.
        Index("ix_delivery_waiting", "endpoint", "id", **_OPEN),
        Index("ix_delivery_open", "endpoint", "subject", "seq", **_OPEN),
    )

    id: Mapped[Key]
    event_id: Mapped[str] = mapped_column(ForeignKey("event.id", ondelete="CASCADE"))
    endpoint: Mapped[str]
    subject: Mapped[str]
    seq: Mapped[Count]
    state: Mapped[str]
    attempt: Mapped[Count]
    created_at: Mapped[datetime]
    next_at: Mapped[datetime]
    lease_token: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    left_machine: Mapped[bool]
    """Whether any attempt may have reached the receiver."""
    digest_id: Mapped[str | None]
    """The digest (an event) that carries it, when there were too many for single messages."""
    last_status: Mapped[int | None]
    last_error: Mapped[Prose | None]
    ended_at: Mapped[datetime | None]


class DeliveryAttemptRow(Base):
    """One try, with what the receiver said."""

    __tablename__ = "delivery_attempt"

    delivery_id: Mapped[int] = mapped_column(
        ForeignKey("delivery.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    duration_s: Mapped[float]
    status: Mapped[int | None]
    error_code: Mapped[str | None]
    error: Mapped[Prose | None]


class EndpointRow(Base):
    """How an endpoint of the configuration has been doing."""

    __tablename__ = "endpoint"

    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    """enabled, disabled_auto (days without success), disabled_gone (410), invalid (refused)."""
    reason: Mapped[Prose | None]
    settings_sha: Mapped[str]
    """A changed setting enables it again."""
    failing_since: Mapped[datetime | None]
    """Begin of the streak, moved on by what no attempt was made in (more than a day at a time)."""
    num_failures: Mapped[Count]
    """In a row."""
    failure_ratio: Mapped[float]
    """Moving average over recent attempts: 0 healthy, 1 down; stretches the back-off."""
    last_success_at: Mapped[datetime | None]
    last_attempt_at: Mapped[datetime | None]
    tokens: Mapped[float]
    """Of the rate limit, when they were last counted."""
    tokens_at: Mapped[datetime]
