"""What each part of a candidate costs alone."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME = sa.DateTime(timezone=True)
_DOUBLE: Any = sa.Double()


def upgrade() -> None:
    _bound_lock_waits()
    op.create_table(
        "attribution",
        *_required(_INT, "run_candidate_id"),
        *_required(_TIME, "made_at"),
        *_required(_STRING, "detail"),
        *_required(_COUNT, "seed", "num_prompts", "num_tokens", "num_scored"),
        *_required(_DOUBLE, "kl", "together_kl"),
        *_required(_COUNT, "num_boundaries"),
        *_required(_TEXT, "notes"),
        sa.Column("restoration", _TEXT, nullable=True),
        sa.PrimaryKeyConstraint("run_candidate_id", name=op.f("pk_attribution")),
        sa.ForeignKeyConstraint(
            ["run_candidate_id"],
            ["run_candidate.id"],
            name=op.f("fk_attribution_run_candidate_id_run_candidate"),
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "attribution_part",
        *_required(_INT, "run_candidate_id", "idx"),
        *_required(_STRING, "scope", "kind"),
        *_required(sa.Boolean(), "is_whole"),
        *_required(_DOUBLE, "kl", "noise_kl"),
        sa.Column("relative_error", _DOUBLE, nullable=True),
        sa.PrimaryKeyConstraint("run_candidate_id", "idx", name=op.f("pk_attribution_part")),
        sa.ForeignKeyConstraint(
            ["run_candidate_id"],
            ["attribution.run_candidate_id"],
            name=op.f("fk_attribution_part_run_candidate_id_attribution"),
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    _bound_lock_waits()
    op.drop_table("attribution_part")
    op.drop_table("attribution")


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, autoincrement=False) for name in names]


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
