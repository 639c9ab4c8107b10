"""Alert episodes, silences, the outbox."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME, _BYTES = sa.DateTime(timezone=True), sa.LargeBinary()
_DOUBLE: Any = sa.Double()

_TABLES = (
    *("rule_evaluation", "episode", "silence"),
    *("event", "delivery", "delivery_attempt", "endpoint"),
)


def upgrade() -> None:
    _bound_lock_waits()
    _add("alert", *_alert_columns())
    _create_episodes()
    _create_outbox()
    _create_endpoints()


def downgrade() -> None:
    _bound_lock_waits()
    for table in reversed(_TABLES):
        op.drop_table(table)
    _drop("alert", _alert_columns())


def _alert_columns() -> list[sa.Column[Any]]:
    counters = ("num_breaches", "num_clear", "num_missing", "seq")
    return [
        sa.Column("state", _STRING, nullable=False, server_default="inactive"),
        *_optional(_STRING, "severity", "rule_sha", "episode_id", "last_run_id", "awaits_run_id"),
        *_optional(_TIME, "changed_at"),
        *(sa.Column(name, _COUNT, nullable=False, server_default="0") for name in counters),
    ]


def _create_episodes() -> None:
    op.create_table(
        "rule_evaluation",
        *_required(_INT, "alert_id"),
        *_required(_STRING, "run_id", "outcome", "value_kind"),
        *_optional(_DOUBLE, "value", "threshold"),
        *_required(_TIME, "evaluated_at"),
        _pk("rule_evaluation", "alert_id", "run_id"),
        _fk("rule_evaluation", "alert_id", "alert"),
        _fk("rule_evaluation", "run_id", "run", ondelete="CASCADE"),
    )
    _index("rule_evaluation", "run_id")
    op.create_table(
        "episode",
        *_required(_STRING, "id", "severity", "peak_kind"),
        *_required(_INT, "alert_id"),
        *_required(_TIME, "opened_at"),
        *_optional(_TIME, "fired_at", "resolved_at", "muted_at"),
        *_optional(_TIME, "reminded_at", "acked_at"),
        *_optional(_STRING, "resolve_reason", "first_run_id", "last_run_id", "acked_by"),
        *_required(_COUNT, "num_runs"),
        *_optional(_DOUBLE, "peak_value"),
        *_optional(_TEXT, "ack_comment"),
        *_required(_TEXT, "told", "evidence"),
        _pk("episode", "id"),
        _fk("episode", "alert_id", "alert"),
    )
    _index("episode", "alert_id", "opened_at")
    _index("episode", "resolved_at")
    op.create_table(
        "silence",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        *_required(_TEXT, "matcher", "comment"),
        *_required(_TIME, "starts_at", "ends_at", "created_at"),
        *_required(_STRING, "author"),
        _pk("silence", "id"),
    )
    _index("silence", "ends_at")


def _create_outbox() -> None:
    op.create_table(
        "event",
        *_required(_STRING, "id", "type", "subject"),
        *_required(_TIME, "occurred_at"),
        *_required(_COUNT, "seq"),
        *_required(_BYTES, "body"),
        _pk("event", "id"),
    )
    _index("event", "subject", "seq")
    op.create_table(
        "delivery",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        *_required(_STRING, "event_id", "endpoint", "subject", "state"),
        *_required(_COUNT, "seq", "attempt"),
        *_required(_TIME, "created_at", "next_at"),
        *_optional(_STRING, "lease_token", "digest_id"),
        *_optional(_TIME, "lease_until", "ended_at"),
        *_required(sa.Boolean(), "left_machine"),
        *_optional(_INT, "last_status"),
        *_optional(_TEXT, "last_error"),
        _pk("delivery", "id"),
        sa.UniqueConstraint("event_id", "endpoint", name=op.f("uq_delivery_event_id_endpoint")),
        _fk("delivery", "event_id", "event", ondelete="CASCADE"),
    )
    _index("delivery", "state", "next_at")
    _index("delivery", "endpoint", "subject", "seq")
    is_open = sa.text("ended_at IS NULL")
    for name, columns in (
        ("ix_delivery_waiting", ["endpoint", "id"]),
        ("ix_delivery_open", ["endpoint", "subject", "seq"]),
    ):
        where: Any = {"sqlite_where": is_open, "postgresql_where": is_open}
        op.create_index(name, "delivery", columns, **where)


def _create_endpoints() -> None:
    op.create_table(
        "delivery_attempt",
        *_required(_INT, "delivery_id", "number"),
        *_required(_TIME, "at"),
        *_required(_DOUBLE, "duration_s"),
        *_optional(_INT, "status"),
        *_optional(_STRING, "error_code"),
        *_optional(_TEXT, "error"),
        _pk("delivery_attempt", "delivery_id", "number"),
        _fk("delivery_attempt", "delivery_id", "delivery", ondelete="CASCADE"),
    )
    op.create_table(
        "endpoint",
        *_required(_STRING, "name", "state", "settings_sha"),
        *_optional(_TEXT, "reason"),
        *_optional(_TIME, "failing_since", "last_success_at", "last_attempt_at"),
        *_required(_COUNT, "num_failures"),
        *_required(_DOUBLE, "failure_ratio", "tokens"),
        *_required(_TIME, "tokens_at"),
        _pk("endpoint", "name"),
    )


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _pk(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def _fk(table: str, column: str, other: str, **on: Any) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name, **on)


def _index(table: str, *columns: str, unique: bool = False) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns), unique=unique)


def _add(table: str, *columns: sa.Column[Any]) -> None:
    for column in columns:
        op.add_column(table, column)


def _drop(table: str, columns: list[sa.Column[Any]]) -> None:
    for column in columns:
        op.drop_column(table, column.name)


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
