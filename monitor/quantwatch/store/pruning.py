"""What retention deletes, one condition per table: counted in a dry run, deleted in batches."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, exists, select, union
from sqlalchemy.orm import Session

from quantwatch.domain import MODEL, RunStatus, Verdict
from quantwatch.store.among import among
from quantwatch.store.rollup import Kept, Limits, StoredRun, kept
from quantwatch.store.tables import (
    Base,
    BaselinePinRow,
    BlockRow,
    CheckRow,
    EpisodeRow,
    LatestRunRow,
    MeasurementRow,
    NoiseFloorRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
)

Condition = ColumnElement[bool]

TOKEN_KINDS = ("per_token", "topk")
PROMPT_KINDS = ("per_prompt",)


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of one table that go. `alone`: only while no run is being written (names, digests)."""

    tier: str
    table: type[Base]
    condition: Condition
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Going:
    """The runs that lose a tier which they have, oldest first."""

    tokens: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


def find_going(session: Session, limits: Limits, now: datetime) -> Going:
    """Return what the limits say is no longer kept."""
    stored = _stored_runs(session)
    keeps = _kept(session, stored, limits, now)
    with_tokens, with_prompts = (
        _with_blocks(session, TOKEN_KINDS),
        _with_blocks(session, PROMPT_KINDS),
    )
    old = [run.id for run in stored]
    thinned = [run for run in old if run not in keeps.layers]
    return Going(
        tokens=tuple(run for run in old if run in with_tokens - keeps.tokens),
        prompts=tuple(run for run in old if run in with_prompts - keeps.prompts),
        layers=_with_layers(session, thinned) if thinned else (),
        runs=tuple(run for run in old if run not in keeps.runs),
    )


def tier_tasks(session: Session, going: Going) -> Iterator[Task]:
    """Yield what the runs lose: matrices, statistics, then the runs with all they still have."""
    yield Task("token matrices", BlockRow, _blocks(session, going.tokens, TOKEN_KINDS))
    yield Task("prompt sums", BlockRow, _blocks(session, going.prompts, PROMPT_KINDS))
    thinned = _of_runs(session, RunRow.id, going.layers)
    candidates = select(RunCandidateRow.id).where(
        _of_runs(session, RunCandidateRow.run_id, going.layers)
    )
    layers = MeasurementRow.run_candidate_id.in_(candidates) & _not_model(MeasurementRow)
    yield Task("layer statistics", MeasurementRow, layers)
    floors = NoiseFloorRow.run_id.in_(select(RunRow.id).where(thinned)) & _not_model(NoiseFloorRow)
    yield Task("layer statistics", NoiseFloorRow, floors)
    yield Task("runs", RunRow, _of_runs(session, RunRow.id, going.runs))


def held_runs() -> Select[Any]:
    """Select the runs that keep everything, whatever their age: baselines, open episodes."""
    is_open = EpisodeRow.resolved_at.is_(None)
    first, last = EpisodeRow.first_run_id, EpisodeRow.last_run_id
    everything = union(
        select(BaselinePinRow.run_id),
        select(first).where(is_open, first.is_not(None)),
        select(last).where(is_open, last.is_not(None)),
    ).subquery()
    return select(everything.c[0])


def _kept(session: Session, stored: list[StoredRun], limits: Limits, now: datetime) -> Kept:
    held = set(session.scalars(held_runs()))
    pointers = session.execute(select(LatestRunRow.run_id, LatestRunRow.succeeded_run_id))
    newest = {run for pair in pointers for run in pair if run is not None}
    return kept(stored, limits, now, held=held, newest=newest, windows=_windows(session))


def _windows(session: Session) -> dict[int, int]:
    """Return the length of each rolling baseline, by check."""
    configs = session.execute(
        select(CheckRow.id, CheckRow.config).where(CheckRow.config.is_not(None))
    )
    baselines = ((check_id, (config or {}).get("baseline", {})) for check_id, config in configs)
    return {
        check_id: baseline["window"]
        for check_id, baseline in baselines
        if baseline.get("kind") == "rolling"
    }


def _stored_runs(session: Session) -> list[StoredRun]:
    """Return every run, oldest first."""
    columns = (
        *(RunRow.id, RunRow.check_id, RunRow.started_at, RunRow.status, RunRow.verdict),
        *(RunRow.num_alerts, RunRow.baseline_run_id, RunRow.kept_until),
    )
    return [
        StoredRun(
            id=row.id,
            check_id=row.check_id,
            started_at=row.started_at,
            ended=RunStatus(row.status).is_ended,
            succeeded=row.status == RunStatus.SUCCEEDED.value,
            flagged=row.num_alerts > 0 or row.verdict == Verdict.REGRESSION.value,
            baseline_run_id=row.baseline_run_id,
            kept_until=row.kept_until,
        )
        for row in session.execute(select(*columns).order_by(RunRow.started_at, RunRow.id))
    ]


def _with_blocks(session: Session, kinds: tuple[str, ...]) -> set[str]:
    """Return the runs that have any block of these kinds."""
    owners = select(BlockRow.run_candidate_id).where(BlockRow.kind.in_(kinds)).distinct()
    runs = select(RunCandidateRow.run_id).where(RunCandidateRow.id.in_(owners)).distinct()
    return set(session.scalars(runs))


def _with_layers(session: Session, runs: list[str]) -> tuple[str, ...]:
    """Return those of the runs that have statistics elsewhere than at the whole model."""
    measured = exists().where(
        MeasurementRow.run_candidate_id == RunCandidateRow.id, _not_model(MeasurementRow)
    )
    candidates = select(RunCandidateRow.run_id).where(
        among(session, RunCandidateRow.run_id, runs), measured
    )
    floors = select(NoiseFloorRow.run_id).where(
        among(session, NoiseFloorRow.run_id, runs), _not_model(NoiseFloorRow)
    )
    found = set(session.scalars(candidates.distinct())) | set(session.scalars(floors.distinct()))
    return tuple(run for run in runs if run in found)


def _blocks(session: Session, runs: Collection[str], kinds: tuple[str, ...]) -> Condition:
    owners = select(RunCandidateRow.id).where(_of_runs(session, RunCandidateRow.run_id, runs))
    return BlockRow.run_candidate_id.in_(owners) & BlockRow.kind.in_(kinds)


def _of_runs(session: Session, column: Any, runs: Collection[str]) -> Condition:
    """One of the runs, unless it was pinned or became evidence since they were listed."""
    still: Condition = column.not_in(held_runs())
    return among(session, column, runs) & still


def _not_model(table: type[MeasurementRow] | type[NoiseFloorRow]) -> Condition:
    model = select(ScopeRow.id).where(ScopeRow.name == MODEL)
    return table.scope_id.not_in(model)
