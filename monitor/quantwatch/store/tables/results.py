"""What a run measured: statistics as wide rows, matrices as blobs."""

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument

_NO_ROWID = {"sqlite_with_rowid": False}


def _candidate_key() -> Mapped[int]:
    return mapped_column(ForeignKey("run_candidate.id", ondelete="CASCADE"), primary_key=True)


class MeasurementRow(Base):
    """All statistics of one metric at one scope for one candidate of one run.

    A statistic that is not finite is NULL and has its kind in `kinds`, e.g. ``{"mean": "posinf"}``.
    """

    __tablename__ = "measurement"
    __table_args__ = _NO_ROWID

    run_candidate_id: Mapped[int] = _candidate_key()
    scope_id: Mapped[int] = mapped_column(ForeignKey("scope.id"), primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric.id"), primary_key=True)
    idx: Mapped[Count]
    n: Mapped[Count]
    n_nan: Mapped[Count]
    n_posinf: Mapped[Count]
    n_neginf: Mapped[Count]
    n_missing: Mapped[Count]
    mean: Mapped[float | None]
    std: Mapped[float | None]
    se: Mapped[float | None]
    min: Mapped[float | None]
    p50: Mapped[float | None]
    p90: Mapped[float | None]
    p95: Mapped[float | None]
    p99: Mapped[float | None]
    p999: Mapped[float | None]
    max: Mapped[float | None]
    kinds: Mapped[JsonDocument | None]
    max_prompt: Mapped[Count | None]
    max_position: Mapped[Count | None]
    method: Mapped[str]


class NoiseFloorRow(Base):
    """Largest difference of the reference against itself, per metric and scope."""

    __tablename__ = "noise_floor"
    __table_args__ = (
        CheckConstraint("(kind = 'finite') = (value IS NOT NULL)", "value_iff_finite"),
        _NO_ROWID,
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    scope_id: Mapped[int] = mapped_column(ForeignKey("scope.id"), primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric.id"), primary_key=True)
    value: Mapped[float | None]
    kind: Mapped[str]


class BlockRow(Base):
    """One matrix: compressed bytes, what they hold, and their digest."""

    __tablename__ = "block"

    run_candidate_id: Mapped[int] = _candidate_key()
    kind: Mapped[str] = mapped_column(primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric.id"), primary_key=True)
    prompt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """-1 for a block over all prompts: NULL can't be part of a key."""
    scope_list_id: Mapped[int] = mapped_column(ForeignKey("scope_list.id"))
    codec: Mapped[str]
    shape: Mapped[JsonDocument]
    sha256: Mapped[str]
    num_bytes: Mapped[Count]
    payload: Mapped[bytes]
