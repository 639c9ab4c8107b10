"""Figures about the whole service, the same in whichever process they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, select, text
from sqlalchemy.orm import Session

from quantwatch.domain import is_layer
from quantwatch.store import clock
from quantwatch.store.disk import Space, space
from quantwatch.store.session import Database
from quantwatch.store.tables import (
    AlertRow,
    CheckRow,
    ComponentRow,
    DeliveryRow,
    LatestRunRow,
    MeasurementRow,
    MetricRow,
    RunCandidateRow,
    ScopeRow,
)

_COUNTED = ("logit_kl", "served_kl", "lens_kl")
STATISTICS = ("mean", "p50", "p99", "max")
LAST_TICK = "last_tick"
"""Key in a scheduler's details: Unix time of its newest look."""
_WAITING = ("pending", "sending", "retry_wait")


@dataclass(frozen=True, slots=True)
class Reading:
    """One statistic of a candidate's KL in its check's newest succeeded run."""

    check: str
    candidate: str
    name: str
    """A statistic (mean, p99, …) of the output KL, or a layer (mean lens KL)."""
    value: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What /metrics shows. None is not known: a remote server does not tell its free disk."""

    last_success: dict[str, datetime]
    """Of checks that are in use and have ever succeeded."""
    open_alerts: dict[tuple[str, str], int]
    """By severity and state."""
    oldest_pending_s: float
    db_size_bytes: int
    disk: Space | None
    last_tick: float | None
    """Unix time of the newest look of any scheduler."""
    kl: Sequence[Reading]
    layers: Sequence[Reading]


def read_figures(db: Database, worst_layers: int = 0) -> Figures:
    """Read all figures in one transaction; `worst_layers` per candidate, 0 for none."""
    with db.reader() as session:
        return Figures(
            last_success=_last_success(session),
            open_alerts=_open_alerts(session),
            oldest_pending_s=_oldest_pending_s(session),
            db_size_bytes=_size(session),
            disk=space(db),
            last_tick=_last_tick(session),
            kl=_model_readings(session),
            layers=_worst_layers(session, worst_layers) if worst_layers else (),
        )


def count_non_finite(db: Database, run_id: str) -> dict[str, int]:
    """Return how many KL values of a run's candidates were NaN or infinite, output and layers."""
    row = MeasurementRow
    bad = func.sum(row.n_nan + row.n_posinf + row.n_neginf)
    query = (
        select(RunCandidateRow.name, bad)
        .join(row, row.run_candidate_id == RunCandidateRow.id)
        .join(MetricRow, MetricRow.id == row.metric_id)
        .where(RunCandidateRow.run_id == run_id, MetricRow.slug.in_(_COUNTED))
        .group_by(RunCandidateRow.name)
    )
    with db.reader() as session:
        return {found[0]: int(found[1]) for found in session.execute(query)}


def scheduler_silence_s(session: Session) -> float | None:
    """Return how long ago any scheduler looked for slots; None when none ever did."""
    tick = _last_tick(session)
    return None if tick is None else clock.now(session).timestamp() - tick


def _last_success(session: Session) -> dict[str, datetime]:
    query = select(CheckRow.name, CheckRow.last_success_at).where(
        CheckRow.removed_at.is_(None), CheckRow.last_success_at.is_not(None)
    )
    return {row.name: row.last_success_at for row in session.execute(query) if row.last_success_at}


def _open_alerts(session: Session) -> dict[tuple[str, str], int]:
    query = (
        select(AlertRow.severity, AlertRow.state, func.count())
        .where(AlertRow.state != "inactive")
        .group_by(AlertRow.severity, AlertRow.state)
    )
    return {(row[0] or "warning", row[1]): row[2] for row in session.execute(query)}


def _oldest_pending_s(session: Session) -> float:
    query = select(func.min(DeliveryRow.created_at)).where(DeliveryRow.state.in_(_WAITING))
    oldest: datetime | None = session.scalar(query)
    return 0.0 if oldest is None else max(0.0, (clock.now(session) - oldest).total_seconds())


def _size(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        return int(
            session.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
        )
    pages, size = (
        session.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size")
    )
    return int(pages) * int(size)


def _last_tick(session: Session) -> float | None:
    rows = session.scalars(select(ComponentRow.details).where(ComponentRow.kind == "scheduler"))
    ticks = [row[LAST_TICK] for row in rows if row and row.get(LAST_TICK)]
    return max(ticks, default=None)


def _model_readings(session: Session) -> list[Reading]:
    query = _newest("logit_kl").where(ScopeRow.name == "model")
    return [
        Reading(row.check, row.candidate, name, value)
        for row in session.execute(query)
        for name in STATISTICS
        if (value := getattr(row.MeasurementRow, name)) is not None
    ]


def _worst_layers(session: Session, most: int) -> list[Reading]:
    query = _newest("lens_kl").where(MeasurementRow.mean.is_not(None))
    found: dict[tuple[str, str], list[Reading]] = {}
    for row in session.execute(query.where(ScopeRow.layer_index.is_not(None))):
        if is_layer(row.scope):
            reading = Reading(row.check, row.candidate, row.scope, row.MeasurementRow.mean)
            found.setdefault((row.check, row.candidate), []).append(reading)
    worst = (sorted(each, key=lambda reading: -reading.value)[:most] for each in found.values())
    return [reading for each in worst for reading in each]


def _newest(metric: str) -> Select[str, str, str, MeasurementRow]:
    """Select a metric's measurements in each check's newest succeeded run. Reads no history."""
    return (
        select(
            CheckRow.name.label("check"),
            RunCandidateRow.name.label("candidate"),
            ScopeRow.name.label("scope"),
            MeasurementRow,
        )
        .join(LatestRunRow, LatestRunRow.check_id == CheckRow.id)
        .join(RunCandidateRow, RunCandidateRow.run_id == LatestRunRow.succeeded_run_id)
        .join(MeasurementRow, MeasurementRow.run_candidate_id == RunCandidateRow.id)
        .join(MetricRow, MetricRow.id == MeasurementRow.metric_id)
        .join(ScopeRow, ScopeRow.id == MeasurementRow.scope_id)
        .where(MetricRow.slug == metric, CheckRow.removed_at.is_(None))
        .order_by(CheckRow.name, RunCandidateRow.idx)
    )
