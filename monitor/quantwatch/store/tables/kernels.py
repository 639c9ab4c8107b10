"""What `quantwatch kernels test` and `kernels bench` found: one batch per call of the command."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument, Prose

_NO_ROWID = {"sqlite_with_rowid": False}


def _batch_key() -> Mapped[str]:
    return mapped_column(ForeignKey("kernel_batch.id", ondelete="CASCADE"), primary_key=True)


class KernelBatchRow(Base):
    """One call of the command: where, when, on which code."""

    __tablename__ = "kernel_batch"
    __table_args__ = (Index("ix_kernel_batch_kind_started_at", "kind", "started_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    """A ULID."""
    kind: Mapped[str]
    """test or bench."""
    device: Mapped[str]
    git_sha: Mapped[str | None]
    """Commit of the kernels' checkout; NULL when they are installed."""
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    num_passed: Mapped[Count]
    num_failed: Mapped[Count]
    num_not_applicable: Mapped[Count]


class KernelCaseRow(Base):
    """One operator on one back end, shape, dtype and layout against its float64 twin."""

    __tablename__ = "kernel_case"
    __table_args__ = (
        CheckConstraint("error_kind <> 'finite' OR error IS NOT NULL", "finite_error"),
        _NO_ROWID,
    )

    batch_id: Mapped[str] = _batch_key()
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    operator: Mapped[str]
    backend: Mapped[str]
    variant: Mapped[str]
    shape: Mapped[JsonDocument]
    dtype: Mapped[str]
    layout: Mapped[str]
    status: Mapped[str]
    """passed, failed or not applicable."""
    error: Mapped[float | None]
    error_kind: Mapped[str]
    tolerance: Mapped[float]
    message: Mapped[Prose]
    fallbacks: Mapped[JsonDocument]
    """[back end that answered, reason, count]."""


class KernelSpeedRow(Base):
    """How many times as fast as bfloat16 F.linear an operator was, with its interval."""

    __tablename__ = "kernel_speed"
    __table_args__ = _NO_ROWID

    batch_id: Mapped[str] = _batch_key()
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    operator: Mapped[str]
    backend: Mapped[str]
    variant: Mapped[str]
    shape: Mapped[JsonDocument]
    dtype: Mapped[str]
    ratio: Mapped[float]
    ratio_low: Mapped[float]
    ratio_high: Mapped[float]
    seconds: Mapped[float]
    baseline_seconds: Mapped[float]
    rounds: Mapped[Count]
    threads: Mapped[Count]
    message: Mapped[Prose]
    """What another back end did instead; empty when the asked one ran."""
