"""The headline of each check's newest runs, and since when its verdict is what it is.

What takes long reads years of runs. That comes before anything is locked that the service writes:
with the foreign keys no run may be written to until the end. What ended meanwhile is made good.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_STRING, _INT, _COUNT = sa.String(), sa.Integer(), sa.BigInteger()
_TIME = sa.DateTime(timezone=True)
_DOUBLE: Any = sa.Double()

_KEPT = 30
# What a mean without a value was: its own kind, else that of the values it was taken over.
_KIND = """CASE
  WHEN m.mean IS NOT NULL THEN 'finite'
  WHEN m.kinds LIKE '%"mean":"nan"%' THEN 'nan'
  WHEN m.kinds LIKE '%"mean":"posinf"%' THEN 'posinf'
  WHEN m.kinds LIKE '%"mean":"neginf"%' THEN 'neginf'
  WHEN m.n_nan > 0 THEN 'nan'
  WHEN m.n_posinf > 0 THEN 'posinf'
  WHEN m.n_neginf > 0 THEN 'neginf'
  ELSE 'missing' END"""
# The newest runs with results, and those without between them, which push none of the former out.
_POINTS = f"""
INSERT INTO recent_point
  (run_id, idx, check_id, started_at, candidate, verdict, value, kind, se, floor)
SELECT r.id, COALESCE(c.idx, -1), r.check_id, r.started_at, c.name, c.verdict, m.mean, {_KIND},
  m.se, f.value
FROM (
  SELECT id, check_id, started_at, measured,
    ROW_NUMBER() OVER (PARTITION BY check_id, measured ORDER BY started_at DESC, id DESC) AS place,
    SUM(measured) OVER (PARTITION BY check_id ORDER BY started_at DESC, id DESC
      ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS results
  FROM (
    SELECT id, check_id, started_at, CASE
      WHEN EXISTS (SELECT 1 FROM run_candidate AS own WHERE own.run_id = run.id) THEN 1
      ELSE 0 END AS measured
    FROM run WHERE status IN ('succeeded', 'failed', 'timed_out', 'abandoned') AND {{which}}
  ) AS ended
) AS r
LEFT JOIN run_candidate AS c ON c.run_id = r.id
LEFT JOIN measurement AS m ON m.run_candidate_id = c.id
  AND m.metric_id = (SELECT id FROM metric WHERE slug = 'logit_kl')
  AND m.scope_id = (SELECT id FROM scope WHERE name = 'model')
LEFT JOIN noise_floor AS f ON f.run_id = r.id
  AND f.metric_id = (SELECT id FROM metric WHERE slug = 'logit_kl')
  AND f.scope_id = (SELECT id FROM scope WHERE name = 'model')
WHERE r.place <= {_KEPT} AND r.results - r.measured < {_KEPT}"""
# The first succeeded run after the last one with another verdict. Each set is read once: a check
# has thousands of runs.
_SINCE = """
WITH told AS (
  SELECT l.check_id, n.verdict, n.id FROM latest_run AS l
  JOIN run AS n ON n.id = l.succeeded_run_id WHERE {which}
), other AS (
  SELECT told.check_id, MAX(r.started_at) AS at
  FROM told JOIN run AS r ON r.check_id = told.check_id AND r.verdict <> told.verdict
  WHERE r.status = 'succeeded' GROUP BY told.check_id
), streak AS (
  SELECT told.check_id, MIN(r.started_at) AS at
  FROM told JOIN run AS r ON r.check_id = told.check_id AND r.verdict = told.verdict
  LEFT JOIN other ON other.check_id = told.check_id
  WHERE r.status = 'succeeded' AND (other.at IS NULL OR r.started_at > other.at)
  GROUP BY told.check_id
)
SELECT told.check_id, told.id, streak.at
FROM told JOIN streak ON streak.check_id = told.check_id"""
_ALL = "1 = 1"


def upgrade() -> None:
    _bound_lock_waits()
    keys = (_to("run_id", "run", ondelete="CASCADE"), _to("check_id", "check"))
    # SQLite lets one write at a time anyway, and can't add a key to a table that is there.
    late = op.get_bind().dialect.name != "sqlite"
    _create_table(() if late else keys)
    op.execute(_POINTS.format(which=_ALL))
    since = _since(_ALL)
    if late:
        op.execute('LOCK TABLE run, "check", latest_run IN SHARE ROW EXCLUSIVE MODE')
        _make_good(since)
        for key in keys:
            table = key.elements[0].target_fullname.rpartition(".")[0]
            op.create_foreign_key(
                str(key.name), "recent_point", table, list(key.column_keys), ["id"],
                ondelete=key.ondelete,
            )  # fmt: skip
    op.add_column("latest_run", sa.Column("verdict_since", _TIME, nullable=True))
    _note(since)


def _since(which: str) -> dict[int, tuple[str, datetime]]:
    """Return, by check, the newest succeeded run and when the first with its verdict began."""
    columns = {"check_id": _INT, "id": _STRING, "at": _TIME}
    query = sa.text(_SINCE.format(which=which)).columns(**columns)
    return {row.check_id: (row.id, row.at) for row in op.get_bind().execute(query)}


def _note(since: dict[int, tuple[str, datetime]]) -> None:
    latest = sa.table("latest_run", sa.column("check_id"), sa.column("verdict_since", _TIME))
    for check_id, (_, at) in since.items():
        op.execute(sa.update(latest).where(latest.c.check_id == check_id).values(verdict_since=at))


def _make_good(since: dict[int, tuple[str, datetime]]) -> None:
    """Take in runs that ended while the points were written, and leave out those deleted."""
    bind = op.get_bind()
    op.execute("DELETE FROM recent_point WHERE run_id NOT IN (SELECT id FROM run)")
    ended = bind.execute(
        sa.text(
            "SELECT check_id FROM latest_run AS l WHERE NOT EXISTS"
            " (SELECT 1 FROM recent_point AS p WHERE p.run_id = l.run_id)"
        )
    )
    if checks := [row.check_id for row in ended]:
        op.execute(f"DELETE FROM recent_point WHERE {_among('check_id', checks)}")
        op.execute(_POINTS.format(which=_among("run.check_id", checks)))
    newest = bind.execute(sa.text("SELECT check_id, succeeded_run_id FROM latest_run"))
    known = {check: run for check, (run, _) in since.items()}
    if other := [row.check_id for row in newest if known.get(row.check_id) != row.succeeded_run_id]:
        since |= _since(_among("l.check_id", other))


def _among(column: str, checks: Collection[int]) -> str:
    return f"{column} IN ({', '.join(map(str, checks))})"


def _create_table(keys: Collection[sa.ForeignKeyConstraint]) -> None:
    op.create_table(
        "recent_point",
        *_columns(_STRING, "run_id"),
        *_columns(_COUNT, "idx"),
        *_columns(_INT, "check_id"),
        *_columns(_TIME, "started_at"),
        *_columns(_STRING, "candidate", "verdict", nullable=True),
        *_columns(_DOUBLE, "value", nullable=True),
        *_columns(_STRING, "kind"),
        *_columns(_DOUBLE, "se", "floor", nullable=True),
        sa.PrimaryKeyConstraint("run_id", "idx", name=op.f("pk_recent_point")),
        *keys,
        sa.CheckConstraint(
            "(kind = 'finite') = (value IS NOT NULL)",
            name=op.f("ck_recent_point_value_iff_finite"),
        ),
        sqlite_with_rowid=False,
    )
    op.create_index(
        op.f("ix_recent_point_check_id_started_at"), "recent_point", ["check_id", "started_at"]
    )


def downgrade() -> None:
    _bound_lock_waits()
    op.drop_table("recent_point")
    op.drop_column("latest_run", "verdict_since")


def _columns(kind: Any, *names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _to(column: str, table: str, ondelete: str | None = None) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_recent_point_{column}_{table}")
    return sa.ForeignKeyConstraint([column], [f"{table}.id"], name=name, ondelete=ondelete)


def _bound_lock_waits() -> None:
    """Fail rather than queue behind a long transaction and block everybody else."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '10s'")
