"""${message}

Revision ${up_revision}, after ${down_revision | comma,n}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    _bound_lock_waits()
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    _bound_lock_waits()
    ${downgrades if downgrades else "pass"}


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
