"""One evaluation of a check, its candidates, and the pointer to each check's newest run."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument, Key, Prose


class RunRow(Base):
    """One run. Results appear in the one transaction that sets its last status."""

    __tablename__ = "run"
    __table_args__ = (
        UniqueConstraint("check_id", "slot_key"),
        CheckConstraint("(status = 'succeeded') = (verdict IS NOT NULL)", "verdict_iff_succeeded"),
        Index(None, "check_id", "started_at", "id"),
        Index(None, "started_at", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """ULID: sorts by time."""
    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"))
    slot_key: Mapped[str]
    """What makes a trigger happen once: the scheduled instant, or the run's own id."""
    status: Mapped[str]
    reason_code: Mapped[str | None]
    reason_text: Mapped[Prose | None]
    verdict: Mapped[str | None]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    suite_id: Mapped[int | None] = mapped_column(ForeignKey("suite.id"))
    suite_name: Mapped[str]
    num_tokens: Mapped[Count]
    num_prompts: Mapped[Count]
    reference_variant_id: Mapped[int | None] = mapped_column(ForeignKey("variant.id"))
    reference_details: Mapped[JsonDocument | None]
    """Name, execution, size, source, notes: what the fingerprint doesn't say."""
    capture_sha: Mapped[str]
    metrics_version: Mapped[Count]
    environment_id: Mapped[int | None] = mapped_column(ForeignKey("environment.id"))
    config: Mapped[JsonDocument]
    capture: Mapped[JsonDocument]
    timings_s: Mapped[JsonDocument]
    baseline_run_id: Mapped[str | None]
    """No foreign key: a baseline may come from a file."""
    baseline_mismatch: Mapped[JsonDocument]
    num_alerts: Mapped[Count]


class RunCandidateRow(Base):
    """One candidate of one run. `failure` says why it could not be measured."""

    __tablename__ = "run_candidate"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    id: Mapped[Key]
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    idx: Mapped[Count]
    name: Mapped[str]
    verdict: Mapped[str | None]
    variant_id: Mapped[int | None] = mapped_column(ForeignKey("variant.id"))
    execution: Mapped[str | None]
    size_bytes: Mapped[Count | None]
    bits_per_weight: Mapped[float | None]
    variant_details: Mapped[JsonDocument | None]
    culprit: Mapped[JsonDocument | None]
    first_nonfinite: Mapped[JsonDocument | None]
    bit_equal: Mapped[bool]
    failure: Mapped[Prose | None]
    baseline_differences: Mapped[JsonDocument]


class LatestRunRow(Base):
    """Each check's newest ended run, so that an overview never scans history.

    Measurements of that run are found by primary key; a copy of them would only be able to differ.
    """

    __tablename__ = "latest_run"

    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.id"))
    succeeded_run_id: Mapped[str | None] = mapped_column(ForeignKey("run.id"))
