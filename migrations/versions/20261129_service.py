"""Schedules, leases, attempts: what the service needs of runs and checks."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME = sa.DateTime(timezone=True)
_DOUBLE: Any = sa.Double()

_TABLES = (
    *("schedule", "run_attempt", "device_slot", "leader", "trigger_key"),
    *("component", "failed_task", "audit"),
)


def upgrade() -> None:
    _bound_lock_waits()
    _add("check", *_check_columns())
    _add("run", *_run_columns())
    # Rows that are there already began on request and are never retried.
    _index("run", "status", "not_before")
    _create_schedules()
    _create_attempts()
    _create_records()


def downgrade() -> None:
    _bound_lock_waits()
    for table in reversed(_TABLES):
        op.drop_table(table)
    op.drop_index("ix_run_status_not_before", "run")
    _drop("run", _run_columns())
    _drop("check", _check_columns())


def _check_columns() -> list[sa.Column[Any]]:
    return [
        *_optional(_TEXT, "config"),
        *_optional(_STRING, "config_sha", "base_dir"),
        *_optional(_TIME, "applied_at", "removed_at", "paused_at"),
        *_optional(_STRING, "paused_by"),
        *_optional(_TEXT, "pause_reason"),
        *_optional(_TIME, "quarantined_at", "last_success_at"),
        _filled("unhealthy_runs", _COUNT, "0"),
    ]


def _run_columns() -> list[sa.Column[Any]]:
    return [
        _filled("trigger", _STRING, "manual"),
        *_optional(_STRING, "actor", "parent_run_id"),
        *_optional(_TIME, "scheduled_for", "queued_at", "not_before"),
        *_optional(_STRING, "device", "base_dir"),
        _filled("attempt", _COUNT, "0"),
        _filled("max_attempts", _COUNT, "1"),
        *_optional(_DOUBLE, "deadline_s"),
        *_optional(_TIME, "deadline_at"),
        *_optional(_STRING, "lease_token"),
        *_optional(_TIME, "lease_until", "cancel_requested_at"),
        *_optional(_STRING, "stage"),
        _filled("tokens_done", _COUNT, "0"),
        _filled("tokens_total", _COUNT, "0"),
        *_optional(_TIME, "heartbeat_at", "kept_until"),
    ]


def _create_schedules() -> None:
    op.create_table(
        "schedule",
        *_required(_INT, "check_id"),
        *_required(_TEXT, "settings"),
        *_required(_STRING, "settings_sha"),
        *_required(_TIME, "anchor_at"),
        *_optional(_TIME, "last_slot_at", "next_slot_at"),
        *_required(_TIME, "look_at"),
        *_optional(_TEXT, "trouble"),
        _pk("schedule", "check_id"),
        _fk("schedule", "check_id", "check"),
    )
    _index("schedule", "next_slot_at")
    _index("schedule", "look_at")
    op.create_table(
        "leader",
        *_required(_STRING, "name", "holder"),
        *_required(_COUNT, "epoch"),
        *_required(_TIME, "until"),
        _pk("leader", "name"),
    )
    op.create_table(
        "trigger_key",
        *_required(_STRING, "actor", "key_sha", "request_sha", "run_id"),
        *_required(_TIME, "expires_at"),
        _pk("trigger_key", "actor", "key_sha"),
        _fk("trigger_key", "run_id", "run", ondelete="CASCADE"),
    )


def _create_attempts() -> None:
    op.create_table(
        "run_attempt",
        *_required(_STRING, "run_id"),
        *_required(_INT, "number"),
        *_required(_STRING, "worker", "host"),
        *_required(_COUNT, "pid"),
        *_required(_TIME, "started_at"),
        *_optional(_TIME, "ended_at"),
        *_optional(_STRING, "outcome", "reason_code", "error_class"),
        *_optional(_TEXT, "message"),
        *_optional(_COUNT, "peak_memory_bytes"),
        *_optional(_TEXT, "gpus"),
        _pk("run_attempt", "run_id", "number"),
        _fk("run_attempt", "run_id", "run", ondelete="CASCADE"),
    )
    op.create_table(
        "device_slot",
        *_required(_STRING, "device", "run_id", "lease_token"),
        _pk("device_slot", "device"),
        _fk("device_slot", "run_id", "run", ondelete="CASCADE"),
    )


def _create_records() -> None:
    op.create_table(
        "component",
        *_required(_STRING, "id", "kind", "host"),
        *_required(_COUNT, "pid"),
        *_required(_TIME, "started_at", "seen_at"),
        *_required(_TEXT, "details"),
        _pk("component", "id"),
    )
    op.create_table(
        "failed_task",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        *_required(_STRING, "operation", "error_code", "subject"),
        *_required(_COUNT, "attempts"),
        *_required(_TIME, "first_at", "last_at"),
        *_required(_TEXT, "message"),
        *_optional(_TIME, "resolved_at"),
        _pk("failed_task", "id"),
    )
    _index("failed_task", "operation", "error_code", "subject", unique=True)
    _index("failed_task", "last_at")
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        *_required(_TIME, "at"),
        *_required(_STRING, "actor", "action", "subject"),
        *_optional(_TEXT, "before", "after"),
        _pk("audit", "id"),
    )
    _index("audit", "subject", "at")


def _filled(name: str, kind: Any, value: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=value)


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
