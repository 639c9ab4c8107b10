"""Rules on m of n runs, and second judgements of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COUNT = sa.BigInteger()
_KEY = "pk_rule_evaluation"


def upgrade() -> None:
    _bound_lock_waits()
    op.add_column("alert", sa.Column("breach_window", _COUNT, nullable=False, server_default="0"))
    with op.batch_alter_table("rule_evaluation") as table:
        table.add_column(sa.Column("eval_version", _COUNT, nullable=False, server_default="1"))
        table.drop_constraint(op.f(_KEY), type_="primary")
        table.create_primary_key(op.f(_KEY), ["alert_id", "run_id", "eval_version"])


def downgrade() -> None:
    _bound_lock_waits()
    # There is room for one judgement of a run: the first, which the alerts moved by.
    op.execute("DELETE FROM rule_evaluation WHERE eval_version > 1")
    with op.batch_alter_table("rule_evaluation") as table:
        table.drop_constraint(op.f(_KEY), type_="primary")
        table.drop_column("eval_version")
        table.create_primary_key(op.f(_KEY), ["alert_id", "run_id"])
    op.drop_column("alert", "breach_window")


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
