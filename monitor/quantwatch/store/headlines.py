"""Mean output KL of runs: of many checks' newest ones from its copy, of others where it lies."""

from collections import defaultdict
from collections.abc import Collection
from itertools import groupby
from operator import itemgetter

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from quantwatch.domain import MODEL, Verdict
from quantwatch.store.recent import HEADLINE, NO_CANDIDATE
from quantwatch.store.states import Headline, RecentRun
from quantwatch.store.statistics import statistic_kind
from quantwatch.store.tables import (
    CheckRow,
    LatestRunRow,
    MeasurementRow,
    MetricRow,
    RecentPointRow,
    RunCandidateRow,
    ScopeRow,
)

_VERDICTS = {verdict.value: verdict for verdict in Verdict}


def recent_runs(session: Session, which: ColumnElement[bool]) -> dict[int, tuple[RecentRun, ...]]:
    """Return the copied headlines of checks by their id, each oldest first."""
    point = RecentPointRow.__table__.c
    query = (
        select(point.check_id, point.run_id, point.started_at, point.floor, point.idx)
        .add_columns(point.candidate, point.value, point.kind, point.se, point.verdict)
        .join(CheckRow, CheckRow.id == point.check_id)
        .where(which)
        .order_by(point.check_id, point.started_at, point.run_id, point.idx)
    )
    found: dict[int, list[RecentRun]] = defaultdict(list)
    # By position, not by name: there are thousands of points.
    for (check_id, run_id), rows in groupby(session.execute(query), key=itemgetter(0, 1)):
        points = list(rows)
        lines = tuple(_line(*row[5:]) for row in points if row[4] != NO_CANDIDATE)
        found[check_id].append(RecentRun(run_id, points[0][2], lines, points[0][3]))
    return {check_id: tuple(each) for check_id, each in found.items()}


def is_decided() -> ColumnElement[bool]:
    """Return the condition that a copied headline is of its check's newest succeeded run."""
    decided = select(LatestRunRow.succeeded_run_id).where(
        LatestRunRow.succeeded_run_id.is_not(None)
    )
    return RecentPointRow.run_id.in_(decided)


def _line(
    candidate: str, value: float | None, kind: str, se: float | None, verdict: str | None
) -> Headline:
    return Headline(candidate, value, kind, se, None if verdict is None else _VERDICTS[verdict])


def headlines_of(session: Session, run_ids: Collection[str]) -> dict[str, dict[str, Headline]]:
    """Return runs' headlines by run and candidate, from their measurements."""
    row = MeasurementRow
    measured = and_(
        row.run_candidate_id == RunCandidateRow.id,
        row.metric_id == select(MetricRow.id).where(MetricRow.slug == HEADLINE).scalar_subquery(),
        row.scope_id == select(ScopeRow.id).where(ScopeRow.name == MODEL).scalar_subquery(),
    )
    query = (
        select(RunCandidateRow.run_id, RunCandidateRow.name, RunCandidateRow.verdict)
        .add_columns(row.mean, row.se, row.kinds, row.n_nan, row.n_posinf, row.n_neginf)
        .join(row, measured)
        .where(RunCandidateRow.run_id.in_(sorted(run_ids)))
    )
    found: dict[str, dict[str, Headline]] = defaultdict(dict)
    for each in session.execute(query).mappings():
        kind = statistic_kind(each["mean"], (each["kinds"] or {}).get("mean"), dict(each))
        line = _line(each["name"], each["mean"], kind, each["se"], each["verdict"])
        found[each["run_id"]][line.candidate] = line
    return found
