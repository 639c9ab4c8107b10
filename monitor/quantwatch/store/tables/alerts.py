"""Rules that were breached, and the runs that are pinned as baselines."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, Key, Prose


class AlertRow(Base):
    """What an alert is about: a rule, a candidate, a check. Never a layer: that is evidence."""

    __tablename__ = "alert"
    __table_args__ = (UniqueConstraint("check_id", "candidate", "rule"),)

    id: Mapped[Key]
    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"))
    candidate: Mapped[str]
    """Empty for what is about the check itself: dead-man, health, drift of the reference."""
    rule: Mapped[str]
    state: Mapped[str] = mapped_column(default="inactive")
    """inactive → pending → firing → recovering → inactive."""
    severity: Mapped[str | None]
    num_breaches: Mapped[Count] = mapped_column(default=0)
    """Runs that breached, in a row or among the last n, while pending."""
    breach_window: Mapped[Count] = mapped_column(default=0)
    """Bits: which of the last judged runs breached, the newest lowest; only under m of n."""
    num_clear: Mapped[Count] = mapped_column(default=0)
    """Runs in a row beyond the leave threshold, while firing or recovering."""
    num_missing: Mapped[Count] = mapped_column(default=0)
    rule_sha: Mapped[str | None]
    """Digest of the rule that the state belongs to: an edited rule closes the episode."""
    episode_id: Mapped[str | None]
    """The open episode."""
    last_run_id: Mapped[str | None]
    awaits_run_id: Mapped[str | None]
    """The run whose confirmation it waits for, while pending."""
    changed_at: Mapped[datetime | None]
    seq: Mapped[Count] = mapped_column(default=0)
    """How many events it has caused."""


class AlertScopeRow(Base):
    """One scope that breached the rule in one run, with the limit that was used."""

    __tablename__ = "alert_scope"
    __table_args__ = (
        CheckConstraint("(value_kind = 'finite') = (value IS NOT NULL)", "value_iff_finite"),
        Index(None, "alert_id", "run_id"),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    idx: Mapped[Count] = mapped_column(primary_key=True, autoincrement=False)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id"))
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric.id"))
    scope_id: Mapped[int] = mapped_column(ForeignKey("scope.id"))
    statistic: Mapped[str]
    value: Mapped[float | None]
    value_kind: Mapped[str]
    threshold: Mapped[float]
    severity: Mapped[str]
    words: Mapped[Prose]


class BaselinePinRow(Base):
    """The run that a check's runs are compared with."""

    __tablename__ = "baseline_pin"

    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    pinned_at: Mapped[datetime]
