"""Initial schema."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A migration writes down types and names as they were: it imports nothing of the program.
_TEXT, _STRING, _INT, _COUNT = sa.Text(), sa.String(), sa.Integer(), sa.BigInteger()
_TIME, _BYTES = sa.DateTime(timezone=True), sa.LargeBinary()
_DOUBLE: Any = sa.Double()

_TABLES = (
    *("check", "environment", "variant", "suite", "suite_prompt", "vocabulary"),
    *("metric", "scope", "scope_list", "run", "run_candidate", "latest_run"),
    *("measurement", "noise_floor", "block", "alert", "alert_scope", "baseline_pin"),
)


def upgrade() -> None:
    _bound_lock_waits()
    _create_names()
    _create_texts()
    _create_runs()
    _create_candidates()
    _create_measurements()
    _create_blocks()
    _create_alerts()
    _create_pointers()


def downgrade() -> None:
    _bound_lock_waits()
    for table in reversed(_TABLES):
        op.drop_table(table)


def _create_names() -> None:
    """Create what is found by one unique column."""
    digests = ("weights_sha", "config_sha", "tokenizer_sha", "recipe_sha", "serve_sha", "fault_sha")
    for table, key, more in (
        ("check", "name", ()),
        ("metric", "slug", ()),
        ("scope", "name", _optional(_INT, "layer_index")),
        ("environment", "sha", _required(_TEXT, "details")),
        ("scope_list", "sha", _required(_TEXT, "names")),
        ("variant", "fingerprint", _required(_STRING, *digests)),
        ("suite", "hash", _required(_STRING, "name")),
    ):
        op.create_table(table, _id(), *_required(_STRING, key), *more, _pk(table), _uq(table, key))


def _create_texts() -> None:
    op.create_table(
        "suite_prompt",
        *_required(_INT, "suite_id", "idx"),
        *_required(_TEXT, "category", "source"),
        *_required(_COUNT, "num_tokens", "score_start"),
        *_required(_STRING, "token_hash"),
        *_required(_BYTES, "tokens"),
        *_optional(_BYTES, "pieces", "text"),
        _pk("suite_prompt", "suite_id", "idx"),
        _fk("suite_prompt", "suite_id", "suite", ondelete="CASCADE"),
    )
    op.create_table(
        "vocabulary",
        *_required(sa.String(64), "tokenizer_sha"),
        *_required(_COUNT, "num_tokens"),
        *_required(_STRING, "sha256"),
        *_required(_BYTES, "data"),
        _pk("vocabulary", "tokenizer_sha"),
    )


def _create_runs() -> None:
    op.create_table(
        "run",
        *_required(_STRING, "id", "slot_key", "status", "suite_name", "capture_sha"),
        *_optional(_STRING, "reason_code", "verdict", "baseline_run_id"),
        *_required(_INT, "check_id"),
        *_optional(_INT, "suite_id", "reference_variant_id", "environment_id"),
        *_required(_TIME, "started_at"),
        *_optional(_TIME, "finished_at"),
        *_required(_COUNT, "num_tokens", "num_prompts", "metrics_version", "num_alerts"),
        *_required(_TEXT, "config", "capture", "timings_s", "baseline_mismatch"),
        *_optional(_TEXT, "reason_text", "reference_details"),
        _pk("run"),
        _uq("run", "check_id", "slot_key"),
        _ck("run", "verdict_iff_succeeded", "(status = 'succeeded') = (verdict IS NOT NULL)"),
        _fk("run", "check_id", "check"),
        _fk("run", "suite_id", "suite"),
        _fk("run", "reference_variant_id", "variant"),
        _fk("run", "environment_id", "environment"),
    )
    op.create_index("ix_run_check_id_started_at_id", "run", ["check_id", "started_at", "id"])
    op.create_index("ix_run_started_at_id", "run", ["started_at", "id"])


def _create_candidates() -> None:
    op.create_table(
        "run_candidate",
        _id(),
        *_required(_STRING, "run_id", "name"),
        *_optional(_STRING, "verdict", "execution"),
        *_required(_COUNT, "idx"),
        *_optional(_COUNT, "size_bytes"),
        *_optional(_INT, "variant_id"),
        *_optional(_DOUBLE, "bits_per_weight"),
        *_required(sa.Boolean(), "bit_equal"),
        *_required(_TEXT, "baseline_differences"),
        *_optional(_TEXT, "variant_details", "culprit", "first_nonfinite", "failure"),
        _pk("run_candidate"),
        _uq("run_candidate", "run_id", "name"),
        _fk("run_candidate", "run_id", "run", ondelete="CASCADE"),
        _fk("run_candidate", "variant_id", "variant"),
    )


def _create_measurements() -> None:
    statistics = ("mean", "std", "se", "min", "p50", "p90", "p95", "p99", "p999", "max")
    op.create_table(
        "measurement",
        *_required(_INT, "run_candidate_id", "scope_id", "metric_id"),
        *_required(_COUNT, "idx", "n", "n_nan", "n_posinf", "n_neginf", "n_missing"),
        *_optional(_DOUBLE, *statistics),
        *_optional(_TEXT, "kinds"),
        *_optional(_COUNT, "max_prompt", "max_position"),
        *_required(_STRING, "method"),
        _pk("measurement", "run_candidate_id", "scope_id", "metric_id"),
        _fk("measurement", "run_candidate_id", "run_candidate", ondelete="CASCADE"),
        *(_fk("measurement", f"{name}_id", name) for name in ("scope", "metric")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "noise_floor",
        *_required(_STRING, "run_id", "kind"),
        *_required(_INT, "scope_id", "metric_id"),
        *_optional(_DOUBLE, "value"),
        _pk("noise_floor", "run_id", "scope_id", "metric_id"),
        _ck("noise_floor", "value_iff_finite", "(kind = 'finite') = (value IS NOT NULL)"),
        _fk("noise_floor", "run_id", "run", ondelete="CASCADE"),
        *(_fk("noise_floor", f"{name}_id", name) for name in ("scope", "metric")),
        sqlite_with_rowid=False,
    )


def _create_blocks() -> None:
    op.create_table(
        "block",
        *_required(_INT, "run_candidate_id", "metric_id", "prompt", "scope_list_id"),
        *_required(_STRING, "kind", "codec", "sha256"),
        *_required(_TEXT, "shape"),
        *_required(_COUNT, "num_bytes"),
        *_required(_BYTES, "payload"),
        _pk("block", "run_candidate_id", "kind", "metric_id", "prompt"),
        _fk("block", "run_candidate_id", "run_candidate", ondelete="CASCADE"),
        _fk("block", "metric_id", "metric"),
        _fk("block", "scope_list_id", "scope_list"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # The payload is compressed already.
        op.execute("ALTER TABLE block ALTER COLUMN payload SET STORAGE EXTERNAL")


def _create_alerts() -> None:
    op.create_table(
        "alert",
        _id(),
        *_required(_INT, "check_id"),
        *_required(_STRING, "candidate", "rule"),
        _pk("alert"),
        _uq("alert", "check_id", "candidate", "rule"),
        _fk("alert", "check_id", "check"),
    )
    op.create_table(
        "alert_scope",
        *_required(_STRING, "run_id", "statistic", "value_kind", "severity"),
        *_required(_COUNT, "idx"),
        *_required(_INT, "alert_id", "metric_id", "scope_id"),
        *_optional(_DOUBLE, "value"),
        *_required(_DOUBLE, "threshold"),
        *_required(_TEXT, "words"),
        _pk("alert_scope", "run_id", "idx"),
        _ck("alert_scope", "value_iff_finite", "(value_kind = 'finite') = (value IS NOT NULL)"),
        _fk("alert_scope", "run_id", "run", ondelete="CASCADE"),
        *(_fk("alert_scope", f"{name}_id", name) for name in ("alert", "metric", "scope")),
    )
    op.create_index("ix_alert_scope_alert_id_run_id", "alert_scope", ["alert_id", "run_id"])


def _create_pointers() -> None:
    op.create_table(
        "latest_run",
        *_required(_INT, "check_id"),
        *_required(_STRING, "run_id"),
        *_optional(_STRING, "succeeded_run_id"),
        _pk("latest_run", "check_id"),
        _fk("latest_run", "check_id", "check"),
        _fk("latest_run", "run_id", "run"),
        _fk("latest_run", "succeeded_run_id", "run"),
    )
    op.create_table(
        "baseline_pin",
        *_required(_INT, "check_id"),
        *_required(_STRING, "run_id"),
        *_required(_TIME, "pinned_at"),
        _pk("baseline_pin", "check_id"),
        _fk("baseline_pin", "check_id", "check"),
        _fk("baseline_pin", "run_id", "run"),
    )


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer(), autoincrement=True, nullable=False)


def _required(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=True) for name in names]


def _pk(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*(columns or ("id",)), name=op.f(f"pk_{table}"))


def _uq(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def _ck(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def _fk(table: str, column: str, other: str, **on: Any) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name, **on)


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
