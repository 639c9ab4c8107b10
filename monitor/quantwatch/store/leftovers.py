"""What retention deletes besides results: old records of the service, unused names."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from quantwatch.store.among import among
from quantwatch.store.pruning import PROMPT_KINDS, TOKEN_KINDS, Condition, Going, Task
from quantwatch.store.rollup import Limits
from quantwatch.store.tables import (
    AlertScopeRow,
    AuditRow,
    BlockRow,
    ComponentRow,
    DeliveryRow,
    EnvironmentRow,
    EpisodeRow,
    EventRow,
    FailedTaskRow,
    KernelBatchRow,
    MeasurementRow,
    NoiseFloorRow,
    RunAttemptRow,
    RunCandidateRow,
    RunRow,
    ScopeListRow,
    ScopeRow,
    SilenceRow,
    SuiteRow,
    TriggerRow,
    VariantRow,
    VocabularyRow,
)


def log_tasks(session: Session, limits: Limits, now: datetime) -> Iterator[Task]:
    """Yield old attempts, told events, records and expired keys; episodes stay as long as runs."""
    old, ancient = now - limits.logs, now - limits.runs
    yield Task("logs", RunAttemptRow, RunAttemptRow.ended_at < old)
    yield Task("logs", EventRow, _told_before(session, old))
    yield Task("logs", FailedTaskRow, FailedTaskRow.last_at < old)
    yield Task("logs", AuditRow, (AuditRow.at < old) & AuditRow.action.not_like("baseline.%"))
    yield Task("logs", AuditRow, AuditRow.at < ancient)  # who pinned what, as long as runs stay
    yield Task("logs", SilenceRow, SilenceRow.ends_at < old)
    yield Task("logs", ComponentRow, ComponentRow.seen_at < old)
    yield Task("logs", TriggerRow, TriggerRow.expires_at < now)
    yield Task("logs", EpisodeRow, EpisodeRow.resolved_at < ancient)


def orphan_tasks(session: Session, going: Going) -> Iterator[Task]:
    """Yield names and digests that nothing refers to once `going` is gone."""
    runs = among(session, RunRow.id, going.runs)
    candidates = among(session, RunCandidateRow.run_id, going.runs)
    suites = exists().where(RunRow.suite_id == SuiteRow.id, ~runs)
    used = or_(
        exists().where(RunRow.reference_variant_id == VariantRow.id, ~runs),
        exists().where(RunCandidateRow.variant_id == VariantRow.id, ~candidates),
    )
    environments = or_(
        exists().where(RunRow.environment_id == EnvironmentRow.id, ~runs),
        exists().where(KernelBatchRow.environment_id == EnvironmentRow.id),
    )
    readable = exists().where(VariantRow.tokenizer_sha == VocabularyRow.tokenizer_sha, used)
    yield Task("orphans", SuiteRow, ~suites, alone=True)
    yield Task("orphans", VocabularyRow, ~readable, alone=True)
    yield Task("orphans", VariantRow, ~used, alone=True)
    yield Task("orphans", EnvironmentRow, ~environments, alone=True)
    yield Task("orphans", ScopeListRow, _unused_lists(session, going), alone=True)
    yield Task("orphans", ScopeRow, _unused_scopes(session, going), alone=True)


def _told_before(session: Session, old: datetime) -> Condition:
    """Events that are told to everybody, and that no open episode may still need: whether somebody
    was told of a firing decides whether they are told of its end."""
    open_since = session.scalar(
        select(func.min(EpisodeRow.opened_at)).where(EpisodeRow.resolved_at.is_(None))
    )
    mine = or_(DeliveryRow.event_id == EventRow.id, DeliveryRow.digest_id == EventRow.id)
    pending = exists().where(mine, or_(DeliveryRow.ended_at.is_(None), DeliveryRow.ended_at >= old))
    before = old if open_since is None else min(old, open_since)
    return (EventRow.occurred_at < before) & ~pending


def _unused_lists(session: Session, going: Going) -> Condition:
    stays = select(BlockRow.scope_list_id).where(
        _stays(session, BlockRow.run_candidate_id, going.runs),
        ~(BlockRow.kind.in_(TOKEN_KINDS) & _of(session, BlockRow.run_candidate_id, going.tokens)),
        ~(BlockRow.kind.in_(PROMPT_KINDS) & _of(session, BlockRow.run_candidate_id, going.prompts)),
    )
    return ScopeListRow.id.not_in(stays)


def _unused_scopes(session: Session, going: Going) -> Condition:
    model = ScopeRow.name == "model"
    thinned = (*going.layers, *going.runs)
    measured = select(MeasurementRow.scope_id).where(
        _stays(session, MeasurementRow.run_candidate_id, thinned)
    )
    floors = select(NoiseFloorRow.scope_id).where(~among(session, NoiseFloorRow.run_id, thinned))
    evidence = select(AlertScopeRow.scope_id).where(
        ~among(session, AlertScopeRow.run_id, going.runs)
    )
    return ~model & _in_none(ScopeRow.id, measured, floors, evidence)


def _in_none(column: InstrumentedAttribute[int], *queries: Any) -> Condition:
    conditions: list[ColumnElement[bool]] = [column.not_in(query) for query in queries]
    first, *others = conditions
    for other in others:
        first &= other
    return first


def _of(session: Session, candidate_id: Any, runs: tuple[str, ...]) -> Condition:
    owners = select(RunCandidateRow.id).where(among(session, RunCandidateRow.run_id, runs))
    found: Condition = candidate_id.in_(owners)
    return found


def _stays(session: Session, candidate_id: Any, runs: tuple[str, ...]) -> Condition:
    return ~_of(session, candidate_id, runs)
