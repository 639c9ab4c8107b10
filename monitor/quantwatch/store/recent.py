"""The headline of each check's newest runs, copied in the transaction that ends a run."""

from datetime import datetime
from typing import Any

from sqlalchemy import and_, delete, func, insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import MODEL, RunStatus
from quantwatch.store.statistics import statistic_kind
from quantwatch.store.tables import (
    MeasurementRow,
    MetricRow,
    NoiseFloorRow,
    RecentPointRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
)

KEPT = 30
"""Runs with results of a check that an overview draws, and the runs without any between them."""
HEADLINE = "logit_kl"
NO_CANDIDATE = -1
_QUIET = {"synchronize_session": False}


def note_point(session: Session, check_id: int, run_id: str) -> None:
    """Copy an ended run's headline, and drop what is older than the check's newest results.

    Of a run that was noted before nothing is written twice; of an old one (imported) nothing is
    kept.
    """
    session.execute(
        delete(RecentPointRow).where(RecentPointRow.run_id == run_id).execution_options(**_QUIET)
    )
    session.execute(insert(RecentPointRow), _points(session, check_id, run_id))
    _drop_old(session, check_id)


def verdict_since(session: Session, check_id: int, run_id: str) -> datetime | None:
    """Return when the first of the succeeded runs in a row with this one's verdict began."""
    verdict = select(RunRow.verdict).where(RunRow.id == run_id).scalar_subquery()
    succeeded = and_(RunRow.check_id == check_id, RunRow.status == RunStatus.SUCCEEDED.value)
    other = session.scalar(
        select(RunRow.started_at)
        .where(succeeded, RunRow.verdict != verdict)
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(1)
    )
    streak = select(RunRow.started_at).where(succeeded, RunRow.verdict == verdict)
    if other is not None:
        streak = streak.where(RunRow.started_at > other)
    return session.scalar(streak.order_by(RunRow.started_at, RunRow.id).limit(1))


def _points(session: Session, check_id: int, run_id: str) -> list[dict[str, Any]]:
    row = MeasurementRow
    metric = select(MetricRow.id).where(MetricRow.slug == HEADLINE).scalar_subquery()
    scope = select(ScopeRow.id).where(ScopeRow.name == MODEL).scalar_subquery()
    floor = and_(
        NoiseFloorRow.run_id == RunRow.id,
        NoiseFloorRow.metric_id == metric,
        NoiseFloorRow.scope_id == scope,
    )
    headline = and_(
        row.run_candidate_id == RunCandidateRow.id,
        row.metric_id == metric,
        row.scope_id == scope,
    )
    query = (
        select(RunRow.started_at, RunCandidateRow.idx, RunCandidateRow.name)
        .add_columns(RunCandidateRow.verdict, NoiseFloorRow.value.label("floor"))
        .add_columns(row.mean, row.se, row.kinds, row.n_nan, row.n_posinf, row.n_neginf)
        .outerjoin(RunCandidateRow, RunCandidateRow.run_id == RunRow.id)
        .outerjoin(row, headline)
        .outerjoin(NoiseFloorRow, floor)
        .where(RunRow.id == run_id)
    )
    known = {"check_id": check_id, "run_id": run_id}
    return [{**known, **_values(found)} for found in session.execute(query).mappings()]


def _values(found: Any) -> dict[str, Any]:
    kind = statistic_kind(found["mean"], (found["kinds"] or {}).get("mean"), found)
    return {
        "idx": NO_CANDIDATE if found["idx"] is None else found["idx"],
        "started_at": found["started_at"],
        "candidate": found["name"],
        "verdict": found["verdict"],
        "value": found["mean"],
        "kind": kind,
        "se": found["se"],
        "floor": found["floor"],
    }


def _drop_old(session: Session, check_id: int) -> None:
    mine = RecentPointRow.check_id == check_id
    has_results = func.max(RecentPointRow.idx) > NO_CANDIDATE
    query = select(RecentPointRow.started_at, RecentPointRow.run_id, has_results).where(mine)
    runs = session.execute(query.group_by(RecentPointRow.started_at, RecentPointRow.run_id))
    old = _old(sorted(((at, run, bool(has)) for at, run, has in runs), reverse=True))
    if old:
        gone = delete(RecentPointRow).where(mine, RecentPointRow.run_id.in_(old))
        session.execute(gone.execution_options(**_QUIET))


def _old(newest_first: list[tuple[datetime, str, bool]]) -> list[str]:
    """Return the runs to drop: those without results never push out one that has some.

    Of the former as many are kept, so that a check that always fails doesn't grow for ever.
    """
    old, measured, unmeasured = [], 0, 0
    for _, run_id, has_results in newest_first:
        if measured >= KEPT or (not has_results and unmeasured >= KEPT):
            old.append(run_id)
        measured += has_results
        unmeasured += not has_results
    return old
