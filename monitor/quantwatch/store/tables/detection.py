"""What rules could have found in a run, and the planted faults that show whether they do."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, Prose


class DetectableRow(Base):
    """The smallest change that one rule of one candidate of a run finds, at its worst scope."""

    __tablename__ = "detectable"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy's own class attribute

    run_candidate_id: Mapped[int] = mapped_column(
        ForeignKey("run_candidate.id", ondelete="CASCADE"), primary_key=True
    )
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its place among the candidate's rules."""
    rule: Mapped[str]
    metric: Mapped[str]
    statistic: Mapped[str]
    scope: Mapped[str | None]
    """NULL: nothing was measured where the rule looks."""
    num_scopes: Mapped[Count]
    expected: Mapped[float | None]
    limit: Mapped[float | None]
    value: Mapped[float | None]
    """NULL: no change would be found, however large; `reason` says why."""
    power: Mapped[float]
    reason: Mapped[Prose]


class CanaryRow(Base):
    """A planted fault: one per run at most. No figure of the run knows of it."""

    __tablename__ = "canary"
    __table_args__ = (
        CheckConstraint("(state = 'measured') = (found IS NOT NULL)", "found_iff_measured"),
        Index("ix_canary_check_id_turn", "check_id", "turn"),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"))
    candidate: Mapped[str]
    of: Mapped[str]
    turn: Mapped[Count]
    fault: Mapped[str]
    size: Mapped[float]
    place: Mapped[str | None]
    channel: Mapped[Count | None]
    made_at: Mapped[datetime]
    seconds: Mapped[float]
    state: Mapped[str]
    found: Mapped[bool | None]
    located: Mapped[bool | None]
    named: Mapped[str | None]
    rule: Mapped[str | None]
    scope: Mapped[str | None]
    value: Mapped[float | None]
    threshold: Mapped[float | None]
    reason: Mapped[Prose]
