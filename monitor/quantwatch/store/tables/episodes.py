"""What an alert lives through: evaluations, episodes, silences."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument, Key, Prose


class RuleEvaluationRow(Base):
    """A rule judged on a run: once, and again for each time that somebody insisted."""

    __tablename__ = "rule_evaluation"
    # Deleting a run looks for its evaluations.
    __table_args__ = (Index(None, "run_id"),)

    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    eval_version: Mapped[Count] = mapped_column(primary_key=True, autoincrement=False, default=1)
    """1 for the judgement that ended the run; a forced one is the next."""
    outcome: Mapped[str]
    """breach, clear (better than the leave threshold), between, undecided, or missing."""
    value: Mapped[float | None]
    value_kind: Mapped[str]
    threshold: Mapped[float | None]
    evaluated_at: Mapped[datetime]


class EpisodeRow(Base):
    """One time that an alert was true, from pending to resolved."""

    __tablename__ = "episode"
    __table_args__ = (Index(None, "alert_id", "opened_at"), Index(None, "resolved_at"))

    id: Mapped[str] = mapped_column(primary_key=True)
    """ULID."""
    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id"))
    severity: Mapped[str]
    opened_at: Mapped[datetime]
    fired_at: Mapped[datetime | None]
    """NULL while nobody was to be told; an episode that never fired is dropped silently."""
    resolved_at: Mapped[datetime | None]
    resolve_reason: Mapped[str | None]
    first_run_id: Mapped[str | None]
    last_run_id: Mapped[str | None]
    num_runs: Mapped[Count]
    peak_value: Mapped[float | None]
    peak_kind: Mapped[str]
    told: Mapped[JsonDocument]
    """Endpoints that were told of it: they, and only they, are told of its end."""
    muted_at: Mapped[datetime | None]
    """Since when something untold waits for the end of a silence or a maintenance window."""
    reminded_at: Mapped[datetime | None]
    """When it was told last."""
    acked_at: Mapped[datetime | None]
    acked_by: Mapped[str | None]
    ack_comment: Mapped[Prose | None]
    evidence: Mapped[JsonDocument]
    """What the messages say: scopes, worst first, threshold, interval, differences."""


class SilenceRow(Base):
    """Keeps matching alerts from being told, not from being evaluated."""

    __tablename__ = "silence"

    id: Mapped[Key]
    matcher: Mapped[JsonDocument]
    """Globs by label: check, candidate, rule, severity; all must match."""
    starts_at: Mapped[datetime]
    ends_at: Mapped[datetime] = mapped_column(index=True)
    author: Mapped[str]
    comment: Mapped[Prose]
    created_at: Mapped[datetime]
