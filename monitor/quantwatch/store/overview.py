"""How all checks stand, in a handful of queries however many there are. Reads no history."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, select, true
from sqlalchemy.orm import Session, aliased

from quantwatch.domain import RunStatus, Severity
from quantwatch.store.checks import Pause
from quantwatch.store.comparability import Measured, differences, measured_by
from quantwatch.store.episodes import INACTIVE
from quantwatch.store.headlines import headlines_of, is_decided, recent_runs
from quantwatch.store.records import RunSummary
from quantwatch.store.session import Database
from quantwatch.store.states import (
    CheckState,
    Headline,
    OpenAlerts,
    RecentRun,
    UnendedRun,
)
from quantwatch.store.summaries import summaries_by_id
from quantwatch.store.tables import (
    AlertRow,
    BaselinePinRow,
    CheckRow,
    EpisodeRow,
    LatestRunRow,
    RunRow,
    ScheduleRow,
)
from quantwatch.store.timetables import Timetable

Query = Select[*tuple[Any, ...]]
_UNENDED = [status.value for status in RunStatus if not status.is_ended]
_ENDED = [s.value for s in RunStatus if s.is_ended and s is not RunStatus.SKIPPED]
_FIRING = ("firing", "recovering")


def check_states(
    db: Database, checks: str | Collection[str] | None = None, *, history: bool = True
) -> tuple[CheckState, ...]:
    """Return how every check stands, or some, by name; also those that never ran.

    Without `history`, of the newest runs only `decided` is in `recent`: of hundreds of checks all
    are tens of thousands of values.
    """
    names = [checks] if isinstance(checks, str) else checks
    which = true() if names is None else CheckRow.name.in_(list(names))
    with db.reader() as session:
        heads = session.execute(_heads().where(which)).all()
        runs = {run for row in heads for run in (row.newest, row.latest, row.decided)}
        compared = {row.check_id: _baseline_of(row) for row in heads}
        baselines = {run for run in compared.values() if run is not None}
        found = _Found(
            summaries_by_id(session, runs - {None}),
            recent_runs(session, which if history else and_(which, is_decided())),
            _unended(session, which),
            _alerts(session, which),
            compared,
            headlines_of(session, baselines),
            measured_by(session, baselines | ({row.decided for row in heads} - {None})),
        )
        return tuple(_state(row, found) for row in heads)


def unended_runs(db: Database, check: str | None = None) -> tuple[UnendedRun, ...]:
    """Return the runs that wait or are under way, of one check or of all, oldest first."""
    with db.reader() as session:
        found = _unended(session, true() if check is None else CheckRow.name == check)
    return tuple(run for runs in found.values() for run in runs)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the queries found, by check id or run id."""

    runs: Mapping[str, RunSummary]
    recent: Mapping[int, tuple[RecentRun, ...]]
    unended: Mapping[int, tuple[UnendedRun, ...]]
    alerts: Mapping[int, OpenAlerts]
    compared: Mapping[int, str | None]
    baselines: Mapping[str, Mapping[str, Headline]]
    measured: Mapping[str, Measured]


def _heads() -> Query:
    told = func.coalesce(LatestRunRow.succeeded_run_id, LatestRunRow.run_id)
    return (
        select(CheckRow.id.label("check_id"), CheckRow, ScheduleRow, BaselinePinRow.run_id)
        .add_columns(
            _newest().label("newest"),
            LatestRunRow.run_id.label("latest"),
            LatestRunRow.succeeded_run_id.label("decided"),
            LatestRunRow.verdict_since,
            RunRow.baseline_run_id,
            # Most checks were applied: the configuration in their runs is not read for nothing.
            case((CheckRow.config.is_(None), RunRow.config)).label("run_config"),
        )
        .outerjoin(LatestRunRow, LatestRunRow.check_id == CheckRow.id)
        .outerjoin(RunRow, RunRow.id == told)
        .outerjoin(ScheduleRow, ScheduleRow.check_id == CheckRow.id)
        .outerjoin(BaselinePinRow, BaselinePinRow.check_id == CheckRow.id)
        .order_by(CheckRow.name)
    )


def _newest() -> ColumnElement[str]:
    """Return the id of a check's newest ended run: the first rows of an index, from its end.

    Cancelled ones count, which `latest_run` passes over; slots that were skipped are no runs.
    """
    run = aliased(RunRow)
    return (
        select(run.id)
        .where(run.check_id == CheckRow.id, run.status.in_(_ENDED))
        .order_by(run.started_at.desc(), run.id.desc())
        .limit(1)
        .scalar_subquery()
    )


def _config(row: Any) -> Mapping[str, Any]:
    return row.CheckRow.config or row.run_config or {}


def _baseline_of(row: Any) -> str | None:
    """Return the run that is pinned; of another kind the one that was compared with last."""
    kind = (_config(row).get("baseline") or {}).get("kind", "pinned")
    found: str | None = row.run_id if kind == "pinned" else row.baseline_run_id
    return found


def _unended(session: Session, which: ColumnElement[bool]) -> dict[int, tuple[UnendedRun, ...]]:
    own = [name for name in UnendedRun.__slots__ if name not in ("run_id", "check", "status")]
    query = (
        select(RunRow.id, RunRow.status, CheckRow.name.label("check"), RunRow.check_id)
        .add_columns(*(getattr(RunRow, name) for name in own))
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunRow.status.in_(_UNENDED), which)
        .order_by(RunRow.started_at, RunRow.id)
    )
    found: dict[int, list[UnendedRun]] = defaultdict(list)
    for row in session.execute(query):
        values = {name: getattr(row, name) for name in own}
        run = UnendedRun(run_id=row.id, check=row.check, status=RunStatus(row.status), **values)
        found[row.check_id].append(run)
    return {check_id: tuple(runs) for check_id, runs in found.items()}


def _alerts(session: Session, which: ColumnElement[bool]) -> dict[int, OpenAlerts]:
    firing = AlertRow.state.in_(_FIRING)
    critical = and_(firing, AlertRow.severity == Severity.CRITICAL.value)
    query = (
        select(AlertRow.check_id)
        .add_columns(
            _count(firing).label("firing"),
            _count(and_(firing, EpisodeRow.acked_at.is_not(None))).label("acknowledged"),
            _count(AlertRow.state == "pending").label("pending"),
            _count(critical).label("critical"),
        )
        .join(CheckRow, CheckRow.id == AlertRow.check_id)
        .outerjoin(EpisodeRow, EpisodeRow.id == AlertRow.episode_id)
        .where(AlertRow.state != INACTIVE, which)
        .group_by(AlertRow.check_id)
    )
    return {row.check_id: _open(row) for row in session.execute(query)}


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.sum(case((condition, 1), else_=0))


def _open(row: Any) -> OpenAlerts:
    worst = Severity.CRITICAL if row.critical else Severity.WARNING
    severity = worst if row.firing else None
    return OpenAlerts(int(row.firing), int(row.acknowledged), int(row.pending), severity)


def _state(row: Any, found: _Found) -> CheckState:
    check, schedule, compared = row.CheckRow, row.ScheduleRow, found.compared[row.check_id]
    now, before = found.measured.get(row.decided), found.measured.get(compared or "")
    return CheckState(
        check=check.name,
        config=_config(row),
        in_use=check.removed_at is None,
        newest=found.runs.get(row.newest),
        latest=found.runs.get(row.latest),
        decided=found.runs.get(row.decided),
        since=row.verdict_since,
        last_success_at=check.last_success_at,
        unhealthy_runs=check.unhealthy_runs,
        pause=_pause(check),
        quarantined_at=check.quarantined_at,
        timetable=None if schedule is None else _timetable(schedule),
        unended=found.unended.get(row.check_id, ()),
        alerts=found.alerts.get(row.check_id, OpenAlerts()),
        recent=found.recent.get(row.check_id, ()),
        baseline_run_id=compared,
        baseline=found.baselines.get(compared or "", {}),
        differs=differences(now, before),
    )


def _pause(check: CheckRow) -> Pause | None:
    if check.paused_at is None:
        return None
    return Pause(check.paused_at, check.paused_by, check.pause_reason)


def _timetable(row: ScheduleRow) -> Timetable:
    return Timetable(row.settings, row.next_slot_at, row.last_slot_at, row.trouble)
