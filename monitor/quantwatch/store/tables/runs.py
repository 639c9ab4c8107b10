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
        Index(None, "status", "not_before"),
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
    trigger: Mapped[str] = mapped_column(default="manual")
    """schedule, manual, confirm, or retry of a skipped slot; who asked is `actor`."""
    actor: Mapped[str | None]
    parent_run_id: Mapped[str | None]
    """The run that this one confirms. No foreign key: retention may drop it."""
    scheduled_for: Mapped[datetime | None]
    """The nominal, un-jittered instant."""
    queued_at: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    device: Mapped[str | None]
    """Where it measures; a queued run waits until nobody else measures there."""
    base_dir: Mapped[str | None]
    """What relative paths of the configuration start at."""
    attempt: Mapped[Count] = mapped_column(default=0)
    max_attempts: Mapped[Count] = mapped_column(default=1)
    deadline_s: Mapped[float | None]
    deadline_at: Mapped[datetime | None]
    lease_token: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    stage: Mapped[str | None]
    tokens_done: Mapped[Count] = mapped_column(default=0)
    tokens_total: Mapped[Count] = mapped_column(default=0)
    heartbeat_at: Mapped[datetime | None]
    kept_until: Mapped[datetime | None]
    """Raw matrices of a flagged run stay until then."""


class RunAttemptRow(Base):
    """One try of a run by one worker. `outcome` is NULL while it lasts."""

    __tablename__ = "run_attempt"

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker: Mapped[str]
    host: Mapped[str]
    pid: Mapped[Count]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]
    """succeeded, failed, timed_out, cancelled, abandoned, or released (not counted)."""
    reason_code: Mapped[str | None]
    """Why it ended without results: one of `REASON_CODES`."""
    error_class: Mapped[str | None]
    message: Mapped[Prose | None]
    peak_memory_bytes: Mapped[Count | None]
    gpus: Mapped[JsonDocument | None]
    """Telemetry during the attempt by GPU UUID; NULL when there is none, with the reason."""


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
    verdict_since: Mapped[datetime | None]
    """When the first of the succeeded runs in a row with the newest one's verdict began."""


class RecentPointRow(Base):
    """The headline of each check's newest ended runs, for sparklines of hundreds of checks at once.

    A copy, made in the transaction that ends the run: looking each value up by its key would read
    a page of the disk for every point.
    """

    __tablename__ = "recent_point"
    __table_args__ = (
        CheckConstraint("(kind = 'finite') = (value IS NOT NULL)", "value_iff_finite"),
        Index(None, "check_id", "started_at"),
        {"sqlite_with_rowid": False},
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    idx: Mapped[Count] = mapped_column(primary_key=True, autoincrement=False)
    """The candidate's place in its run; -1 for a run that ended without results."""
    check_id: Mapped[int] = mapped_column(ForeignKey("check.id"))
    started_at: Mapped[datetime]
    candidate: Mapped[str | None]
    verdict: Mapped[str | None]
    value: Mapped[float | None]
    """Mean output KL."""
    kind: Mapped[str]
    se: Mapped[float | None]
    floor: Mapped[float | None]
    """Noise floor of the output KL in that run."""
