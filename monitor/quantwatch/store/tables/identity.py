"""What a run refers to: checks, suites, variants, environments, and the names of what is measured.

Rows here are written once and found again by a digest or a name; nothing in them ever changes,
except that a suite kept without its text may be completed later.
"""

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from quantwatch.store.tables.base import Base, Count, JsonDocument, Key, Prose


class CheckRow(Base):
    """A check by name, and its configuration as the service applied it last.

    The configuration lives in git and, as used, on each run.
    """

    __tablename__ = "check"

    id: Mapped[Key]
    name: Mapped[str] = mapped_column(unique=True)
    config: Mapped[JsonDocument | None]
    config_sha: Mapped[str | None]
    base_dir: Mapped[str | None]
    applied_at: Mapped[datetime | None]
    removed_at: Mapped[datetime | None]
    """When it was no longer in the file: nothing is deleted."""
    paused_at: Mapped[datetime | None]
    paused_by: Mapped[str | None]
    pause_reason: Mapped[Prose | None]
    quarantined_at: Mapped[datetime | None]
    """Set when it has killed its worker again and again: nothing claims it until released."""
    last_success_at: Mapped[datetime | None]
    """End of its newest succeeded run: what the dead-man alert looks at."""
    unhealthy_runs: Mapped[Count] = mapped_column(default=0)
    """Runs in a row that failed, timed out or were abandoned."""


class EnvironmentRow(Base):
    """Versions, CPU, driver, GPUs: a cause of a drift, never identity."""

    __tablename__ = "environment"

    id: Mapped[Key]
    sha: Mapped[str] = mapped_column(unique=True)
    details: Mapped[JsonDocument]


class VariantRow(Base):
    """Identity of a model as loaded: six digests, and the digest of the six."""

    __tablename__ = "variant"

    id: Mapped[Key]
    fingerprint: Mapped[str] = mapped_column(unique=True)
    weights_sha: Mapped[str]
    config_sha: Mapped[str]
    tokenizer_sha: Mapped[str]
    recipe_sha: Mapped[str]
    serve_sha: Mapped[str]
    fault_sha: Mapped[str]


class SuiteRow(Base):
    """A suite by the digest of its token ids. `name` is the first one it was seen under."""

    __tablename__ = "suite"

    id: Mapped[Key]
    hash: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]


class SuitePromptRow(Base):
    """One prompt. `pieces` and `text` are NULL where the check must not keep what people can read.

    All three are compressed bytes: text columns of PostgreSQL refuse NUL, which pieces contain.
    """

    __tablename__ = "suite_prompt"

    suite_id: Mapped[int] = mapped_column(
        ForeignKey("suite.id", ondelete="CASCADE"), primary_key=True
    )
    idx: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    category: Mapped[Prose]
    source: Mapped[Prose]
    num_tokens: Mapped[Count]
    score_start: Mapped[Count]
    token_hash: Mapped[str]
    tokens: Mapped[bytes]
    pieces: Mapped[bytes | None]
    text: Mapped[bytes | None]


class VocabularyRow(Base):
    """The text of every token id of a tokenizer, compressed, with the digest of the bytes."""

    __tablename__ = "vocabulary"

    tokenizer_sha: Mapped[str] = mapped_column(String(64), primary_key=True)
    num_tokens: Mapped[Count]
    sha256: Mapped[str]
    data: Mapped[bytes]


class MetricRow(Base):
    """A metric's slug. Unit, direction and formula live in the registry, with its version."""

    __tablename__ = "metric"

    id: Mapped[Key]
    slug: Mapped[str] = mapped_column(unique=True)


class ScopeRow(Base):
    """A measured place by its canonical name."""

    __tablename__ = "scope"

    id: Mapped[Key]
    name: Mapped[str] = mapped_column(unique=True)
    layer_index: Mapped[int | None]


class ScopeListRow(Base):
    """The rows of a block, shared by all blocks with the same ones."""

    __tablename__ = "scope_list"

    id: Mapped[Key]
    sha: Mapped[str] = mapped_column(unique=True)
    names: Mapped[JsonDocument]
