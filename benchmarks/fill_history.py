"""Old nights: copies of a run that the real writer wrote, every statistic moved a little.

One INSERT … SELECT per night and table, so that millions of rows take minutes. Columns are taken
from the store's tables: a column that is added there is copied, too.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Integer,
    MetaData,
    String,
    Table,
    case,
    func,
    insert,
    literal,
    select,
    text,
)
from sqlalchemy.orm import Session

from quantwatch.store.statistics import STATISTICS
from quantwatch.store.tables import (
    Base,
    MeasurementRow,
    MetricRow,
    NoiseFloorRow,
    RunAttemptRow,
    RunCandidateRow,
    RunRow,
)
from quantwatch.store.types import UtcDateTime

_UNMOVED = ("nll_reference", "nll_candidate")
_AT_MOST_ONE = ("top1_agreement",)
_OF_SCRATCH = MetaData()
_RUNS = Table(
    "fill_runs",
    _OF_SCRATCH,
    Column("model", String),
    Column("id", String, primary_key=True),
    Column("started_at", UtcDateTime()),
    Column("finished_at", UtcDateTime()),
    Column("environment_id", Integer),
    prefixes=["TEMPORARY"],
)
_CANDIDATES = Table(
    "fill_candidates",
    _OF_SCRATCH,
    Column("model", BigInteger),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("run_id", String),
    Column("drift", Double),
    prefixes=["TEMPORARY"],
)


@dataclass(frozen=True, slots=True)
class Copy:
    """A night to write: which run it is like, and what is its own."""

    model: str
    run_id: str
    started_at: datetime
    environment_id: int
    drift: float


class Copier:
    """Writes copies of runs into the caller's transactions."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.rng = rng
        self._metrics = dict(session.execute(select(MetricRow.slug, MetricRow.id)).all())
        rows = session.execute(select(RunCandidateRow.run_id, RunCandidateRow.id))
        self._candidates: dict[str, list[int]] = {}
        for run_id, candidate_id in rows:
            self._candidates.setdefault(run_id, []).append(candidate_id)
        self._next = 1

    def write(self, session: Session, copies: Sequence[Copy]) -> None:
        """Write one night's copies; their run ids must be new."""
        connection = session.connection()
        # Runs that are written in full come between, and number themselves.
        self._next = (session.scalar(select(func.max(RunCandidateRow.id))) or 0) + 1
        _OF_SCRATCH.create_all(connection, checkfirst=False)
        session.execute(insert(_RUNS), [self._run(copy) for copy in copies])
        candidates = [row for copy in copies for row in self._candidates_of(copy)]
        session.execute(insert(_CANDIDATES), candidates)
        self._copy_runs(session)
        self._copy_candidates(session)
        _OF_SCRATCH.drop_all(connection, checkfirst=False)
        if session.get_bind().dialect.name == "postgresql":
            words = "SELECT setval(pg_get_serial_sequence('run_candidate', 'id'), :last)"
            session.execute(text(words), {"last": self._next - 1})

    def _run(self, copy: Copy) -> dict[str, Any]:
        took = timedelta(seconds=140 + 60 * self.rng.random())
        return {
            "model": copy.model,
            "id": copy.run_id,
            "started_at": copy.started_at,
            "finished_at": copy.started_at + took,
            "environment_id": copy.environment_id,
        }

    def _candidates_of(self, copy: Copy) -> list[dict[str, Any]]:
        rows = []
        for model in self._candidates[copy.model]:
            drift = copy.drift * self.rng.lognormvariate(0, 0.03)
            rows.append({"model": model, "id": self._next, "run_id": copy.run_id, "drift": drift})
            self._next += 1
        return rows

    def _copy_runs(self, session: Session) -> None:
        new, run, tried = _RUNS.c, RunRow.__table__.c, RunAttemptRow.__table__.c
        own = {
            "id": new.id,
            "slot_key": literal("m:") + new.id,
            "started_at": new.started_at,
            "finished_at": new.finished_at,
            "environment_id": new.environment_id,
            "baseline_run_id": new.model,
        }
        _copy(session, RunRow, own, (_RUNS, new.model == run.id))
        own = {"run_id": new.id, "started_at": new.started_at, "ended_at": new.finished_at}
        _copy(session, RunAttemptRow, own, (_RUNS, new.model == tried.run_id))
        floor = NoiseFloorRow.__table__.c
        _copy(session, NoiseFloorRow, {"run_id": new.id}, (_RUNS, new.model == floor.run_id))

    def _copy_candidates(self, session: Session) -> None:
        new, old = _CANDIDATES.c, RunCandidateRow.__table__.c
        own: dict[str, Any] = {"id": new.id, "run_id": new.run_id}
        _copy(session, RunCandidateRow, own, (_CANDIDATES, new.model == old.id))
        row = MeasurementRow.__table__.c
        # A number of its own for each row, the same on both databases.
        dice = (row.scope_id * 7919 + row.metric_id * 104729 + new.id * 31337) % 1009
        unmoved = [self._metrics[slug] for slug in _UNMOVED]
        factor = case(
            (row.metric_id.in_(unmoved), literal(1.0)),
            else_=new.drift * (0.97 + dice / literal(16817.0)),
        )
        own = {"run_candidate_id": new.id}
        for name in STATISTICS:
            moved = row[name] * factor
            best = case((moved > 1, literal(1.0)), else_=moved)
            ratio = row.metric_id.in_([self._metrics[slug] for slug in _AT_MOST_ONE])
            own[name] = case((ratio, best), else_=moved)
        _copy(session, MeasurementRow, own, (_CANDIDATES, new.model == row.run_candidate_id))


def _copy(
    session: Session, table: type[Base], own: Mapping[str, Any], scratch: tuple[Table, Any]
) -> None:
    """Copy the rows of a table that are joined to the scratch table, with some columns changed."""
    columns = table.__table__.columns
    values = [own.get(column.name, column) for column in columns]
    query = select(*values).select_from(table.__table__.join(*scratch))
    if table is MeasurementRow:
        query = query.order_by(_CANDIDATES.c.id, columns["scope_id"], columns["metric_id"])
    session.execute(insert(table.__table__).from_select([c.name for c in columns], query))


def count(session: Session, table: type[Base]) -> int:
    """Return how many rows a table has."""
    return session.scalar(select(func.count()).select_from(table)) or 0
