"""Lists of runs and series over runs: what overview pages and `runs list` show."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, select
from sqlalchemy.orm import Session

from quantwatch.domain import RunStatus, Verdict, reason_words
from quantwatch.store.records import RunSummary, SeriesPoint
from quantwatch.store.session import Database
from quantwatch.store.statistics import require_statistic, statistic_kind
from quantwatch.store.tables import (
    CheckRow,
    LatestRunRow,
    MeasurementRow,
    MetricRow,
    NoiseFloorRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
)

Query = Select[*tuple[Any, ...]]
_MORE_THAN_MEASURED = 10_000_000
"""More than a candidate has measurements."""
_NONFINITE = ("n_nan", "n_posinf", "n_neginf")


def list_runs(
    db: Database, check: str | None = None, limit: int = 50, *, skipped: bool = True
) -> list[RunSummary]:
    """Return the newest runs first, of one check or of all, in any state.

    Without `skipped` the slots that were not run are left out: a paused check has one per hour.
    """
    query = _headers().order_by(RunRow.started_at.desc(), RunRow.id.desc()).limit(limit)
    if not skipped:
        query = query.where(RunRow.status != RunStatus.SKIPPED.value)
    if check is not None:
        query = query.where(CheckRow.name == check)
    with db.reader() as session:
        return _summaries(session, query)


def get_summary(db: Database, run_id: str) -> RunSummary | None:
    """Return one run in any state, None when there is none."""
    with db.reader() as session:
        return next(iter(_summaries(session, _headers().where(RunRow.id == run_id))), None)


def latest_by_check(db: Database) -> list[RunSummary]:
    """Return each check's newest ended run by check name. Reads no history."""
    query = _headers().join(LatestRunRow, LatestRunRow.run_id == RunRow.id).order_by(CheckRow.name)
    with db.reader() as session:
        return _summaries(session, query)


def summaries_by_id(session: Session, run_ids: Collection[str]) -> dict[str, RunSummary]:
    """Return runs in any state by their id; those that are not there are left out."""
    query = _headers().where(RunRow.id.in_(sorted(run_ids)))
    return {run.run_id: run for run in _summaries(session, query)}


def measured_places(db: Database, run_id: str) -> list[tuple[str, str]]:
    """Return the (metric, scope) that any candidate of a run was measured at, in their order."""
    row = MeasurementRow
    # One row a place: of all candidates and layers there are tens of thousands.
    place = RunCandidateRow.idx * _MORE_THAN_MEASURED + row.idx
    first = (
        select(row.metric_id, row.scope_id, func.min(place).label("place"))
        .join(RunCandidateRow, RunCandidateRow.id == row.run_candidate_id)
        .where(RunCandidateRow.run_id == run_id)
        .group_by(row.metric_id, row.scope_id)
        .subquery()
    )
    query = (
        select(MetricRow.slug, ScopeRow.name)
        .join(first, first.c.metric_id == MetricRow.id)
        .join(ScopeRow, ScopeRow.id == first.c.scope_id)
        .order_by(first.c.place)
    )
    with db.reader() as session:
        return [(found[0], found[1]) for found in session.execute(query)]


def get_series(
    db: Database,
    check: str,
    metric: str,
    scope: str = "model",
    statistic: str = "mean",
    limit: int = 400,
) -> list[SeriesPoint]:
    """Return one statistic of every candidate in the newest `limit` succeeded runs, oldest first.

    A candidate without that measurement has a point of kind `missing`: a gap is shown, not hidden.
    Raises UserError on an unknown statistic.
    """
    which = (
        _succeeded()
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(CheckRow.name == check)
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(limit)
    )
    return _points(db, which, (metric, scope, statistic))


def points_of(
    db: Database, run_id: str, metric: str, scope: str = "model", statistic: str = "mean"
) -> list[SeriesPoint]:
    """Return one statistic of every candidate of one run; [] when it has not succeeded.

    Raises UserError on an unknown statistic.
    """
    return _points(db, _succeeded().where(RunRow.id == run_id), (metric, scope, statistic))


def _succeeded() -> Query:
    return select(RunRow.id, RunRow.started_at).where(RunRow.status == RunStatus.SUCCEEDED.value)


def _points(db: Database, which: Query, shown: tuple[str, str, str]) -> list[SeriesPoint]:
    metric, scope, statistic = shown
    require_statistic(statistic)
    with db.reader() as session:
        metric_id = session.scalar(select(MetricRow.id).where(MetricRow.slug == metric))
        scope_id = session.scalar(select(ScopeRow.id).where(ScopeRow.name == scope))
        if metric_id is None or scope_id is None:
            return []
        rows = session.execute(_series(which, statistic, (metric_id, scope_id)))
        return [_point(row, statistic) for row in rows.mappings()]


def _series(which: Query, statistic: str, ids: tuple[int, int]) -> Query:
    """Walk the index of the check's runs, then primary keys: never the table of measurements."""
    recent = which.subquery()
    row = MeasurementRow
    columns = (
        recent.c.id.label("run_id"),
        recent.c.started_at,
        RunCandidateRow.name.label("candidate"),
        RunCandidateRow.verdict,
        getattr(row, statistic).label("value"),
        row.kinds,
        row.se.label("se"),
        NoiseFloorRow.value.label("floor"),
        *(getattr(row, name) for name in _NONFINITE),
    )
    measured = row.run_candidate_id == RunCandidateRow.id
    floor = NoiseFloorRow.run_id == recent.c.id
    return (
        select(*columns)
        .join_from(recent, RunCandidateRow, RunCandidateRow.run_id == recent.c.id)
        .outerjoin(row, and_(measured, _is_at(row, ids)))
        .outerjoin(NoiseFloorRow, and_(floor, _is_at(NoiseFloorRow, ids)))
        .order_by(recent.c.started_at, recent.c.id, RunCandidateRow.idx)
    )


def _is_at(row: type[MeasurementRow | NoiseFloorRow], ids: tuple[int, int]) -> ColumnElement[bool]:
    return and_(row.metric_id == ids[0], row.scope_id == ids[1])


def _point(row: Any, statistic: str) -> SeriesPoint:
    kind = statistic_kind(row["value"], (row["kinds"] or {}).get(statistic), row)
    return SeriesPoint(
        run_id=row["run_id"],
        started_at=row["started_at"],
        candidate=row["candidate"],
        value=row["value"],
        kind=kind,
        verdict=_verdict(row["verdict"]),
        se=row["se"],
        floor=row["floor"],
    )


def _headers() -> Query:
    return select(
        RunRow.id,
        CheckRow.name,
        RunRow.status,
        RunRow.verdict,
        RunRow.started_at,
        RunRow.finished_at,
        RunRow.suite_name,
        RunRow.num_tokens,
        RunRow.num_alerts,
        RunRow.reason_text,
        RunRow.reason_code,
    ).join(CheckRow, CheckRow.id == RunRow.check_id)


def _summaries(session: Session, query: Query) -> list[RunSummary]:
    rows = session.execute(query).all()
    candidates = _candidates(session, [row.id for row in rows])
    return [
        RunSummary(
            run_id=row.id,
            check=row.name,
            status=RunStatus(row.status),
            verdict=_verdict(row.verdict),
            started_at=row.started_at,
            finished_at=row.finished_at,
            suite_name=row.suite_name,
            num_tokens=row.num_tokens,
            candidates=tuple(candidates.get(row.id, ())),
            num_alerts=row.num_alerts,
            reason=reason_words(row.reason_code) if row.reason_text is None else row.reason_text,
        )
        for row in rows
    ]


def _candidates(
    session: Session, run_ids: list[str]
) -> dict[str, list[tuple[str, Verdict | None]]]:
    rows = session.execute(
        select(RunCandidateRow.run_id, RunCandidateRow.name, RunCandidateRow.verdict)
        .where(RunCandidateRow.run_id.in_(run_ids))
        .order_by(RunCandidateRow.run_id, RunCandidateRow.idx)
    )
    found: dict[str, list[tuple[str, Verdict | None]]] = {}
    for run_id, name, verdict in rows:
        found.setdefault(run_id, []).append((name, _verdict(verdict)))
    return found


def _verdict(text: str | None) -> Verdict | None:
    return None if text is None else Verdict(text)
