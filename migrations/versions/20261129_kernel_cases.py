"""Kernel cases and kernel speeds."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME = sa.DateTime(timezone=True)
_DOUBLE: Any = sa.Double()


def upgrade() -> None:
    _bound_lock_waits()
    op.create_table(
        "kernel_batch",
        *_required(_STRING, "id", "kind", "device"),
        sa.Column("git_sha", _STRING, nullable=True),
        *_required(_INT, "environment_id"),
        *_required(_TIME, "started_at", "finished_at"),
        *_required(_COUNT, "num_passed", "num_failed", "num_not_applicable"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kernel_batch")),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["environment.id"],
            name=op.f("fk_kernel_batch_environment_id_environment"),
        ),
    )
    op.create_index("ix_kernel_batch_kind_started_at", "kernel_batch", ["kind", "started_at"])
    op.create_table(
        "kernel_case",
        *_place(),
        *_required(_STRING, "layout", "status"),
        sa.Column("error", _DOUBLE, nullable=True),
        *_required(_STRING, "error_kind"),
        *_required(_DOUBLE, "tolerance"),
        *_required(_TEXT, "message", "fallbacks"),
        sa.CheckConstraint(
            "error_kind <> 'finite' OR error IS NOT NULL", name=op.f("ck_kernel_case_finite_error")
        ),
        *_keys("kernel_case"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "kernel_speed",
        *_place(),
        *_required(_DOUBLE, "ratio", "ratio_low", "ratio_high", "seconds", "baseline_seconds"),
        *_required(_COUNT, "rounds", "threads"),
        *_required(_TEXT, "message"),
        *_keys("kernel_speed"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    _bound_lock_waits()
    for table in ("kernel_speed", "kernel_case", "kernel_batch"):
        op.drop_table(table)


def _place() -> list[sa.Column[Any]]:
    return [
        *_required(_STRING, "batch_id"),
        *_required(_INT, "idx"),
        *_required(_STRING, "operator", "backend", "variant"),
        *_required(_TEXT, "shape"),
        *_required(_STRING, "dtype"),
    ]


def _keys(table: str) -> list[sa.Constraint]:
    return [
        sa.PrimaryKeyConstraint("batch_id", "idx", name=op.f(f"pk_{table}")),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["kernel_batch.id"],
            name=op.f(f"fk_{table}_batch_id_kernel_batch"),
            ondelete="CASCADE",
        ),
    ]


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
