"""What rules could have found in a run, and planted faults that show whether they do."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME, _BOOL = sa.DateTime(timezone=True), sa.Boolean()
_DOUBLE: Any = sa.Double()


def upgrade() -> None:
    _bound_lock_waits()
    op.create_table(
        "detectable",
        *_columns(_INT, "run_candidate_id", "idx"),
        *_columns(_STRING, "rule", "metric", "statistic"),
        *_columns(_STRING, "scope", nullable=True),
        *_columns(_COUNT, "num_scopes"),
        *_columns(_DOUBLE, "expected", "limit", "value", nullable=True),
        *_columns(_DOUBLE, "power"),
        *_columns(_TEXT, "reason"),
        sa.PrimaryKeyConstraint("run_candidate_id", "idx", name=op.f("pk_detectable")),
        _to("detectable", "run_candidate_id", "run_candidate", ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "canary",
        *_columns(_STRING, "run_id"),
        *_columns(_INT, "check_id"),
        *_columns(_STRING, "candidate", "of"),
        *_columns(_COUNT, "turn"),
        *_columns(_STRING, "fault"),
        *_columns(_DOUBLE, "size"),
        *_columns(_STRING, "place", nullable=True),
        *_columns(_COUNT, "channel", nullable=True),
        *_columns(_TIME, "made_at"),
        *_columns(_DOUBLE, "seconds"),
        *_columns(_STRING, "state"),
        *_columns(_BOOL, "found", "located", nullable=True),
        *_columns(_STRING, "named", "rule", "scope", nullable=True),
        *_columns(_DOUBLE, "value", "threshold", nullable=True),
        *_columns(_TEXT, "reason"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_canary")),
        _to("canary", "run_id", "run", ondelete="CASCADE"),
        _to("canary", "check_id", "check"),
        sa.CheckConstraint(
            "(state = 'measured') = (found IS NOT NULL)", name=op.f("ck_canary_found_iff_measured")
        ),
    )
    op.create_index("ix_canary_check_id_turn", "canary", ["check_id", "turn"])


def downgrade() -> None:
    _bound_lock_waits()
    op.drop_table("canary")
    op.drop_table("detectable")


def _columns(kind: Any, *names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable, autoincrement=False) for name in names]


def _to(table: str, column: str, other: str, ondelete: str | None = None) -> Any:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name, ondelete=ondelete)


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
