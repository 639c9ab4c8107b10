"""What `quantwatch attribute` found: one per candidate of a run, the newest."""

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument

_NO_ROWID = {"sqlite_with_rowid": False}


class AttributionRow(Base):
    """The candidate's KL on some of the suite's tokens, and the controls. KL in nats."""

    __tablename__ = "attribution"

    run_candidate_id: Mapped[int] = mapped_column(
        ForeignKey("run_candidate.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    made_at: Mapped[datetime]
    detail: Mapped[str]
    seed: Mapped[Count]
    num_prompts: Mapped[Count]
    num_tokens: Mapped[Count]
    num_scored: Mapped[Count]
    kl: Mapped[float]
    together_kl: Mapped[float]
    num_boundaries: Mapped[Count]
    notes: Mapped[JsonDocument]
    restoration: Mapped[JsonDocument | None]


class AttributionPartRow(Base):
    """One part of the candidate put into the reference alone."""

    __tablename__ = "attribution_part"
    __table_args__ = _NO_ROWID

    run_candidate_id: Mapped[int] = mapped_column(
        ForeignKey("attribution.run_candidate_id", ondelete="CASCADE"), primary_key=True
    )
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its place in the order of the model."""
    scope: Mapped[str]
    kind: Mapped[str]
    is_whole: Mapped[bool]
    kl: Mapped[float]
    noise_kl: Mapped[float]
    relative_error: Mapped[float | None]
    """NULL: the reference's output is 0."""
