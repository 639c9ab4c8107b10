"""What became of a rule in earlier runs, and which of its episodes ended on which baseline."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import UNDECIDED, Ended, Judged, Scope
from quantwatch.store.confirmations import TRIGGER
from quantwatch.store.tables import (
    AlertRow,
    AlertScopeRow,
    CheckRow,
    EpisodeRow,
    RuleEvaluationRow,
    RunRow,
    ScopeRow,
)

MANUAL = "manual"
GOOD = ("recovered", MANUAL)
"""Reasons that end an episode on what was measured, or on what somebody says of it."""
_NEWEST = 50
"""Episodes that are looked at: more of one alert on one baseline is nobody's to compare."""


def alert_id(session: Session, check: str, candidate: str, rule: str) -> int | None:
    """Return the id of a rule's alert, None when it was never judged."""
    query = (
        select(AlertRow.id)
        .join(CheckRow, CheckRow.id == AlertRow.check_id)
        .where(CheckRow.name == check, AlertRow.candidate == candidate, AlertRow.rule == rule)
    )
    return session.scalar(query)


def ended_episodes(
    session: Session, alert: int, *, baseline: str, rule_sha: str, before: datetime
) -> list[Ended]:
    """Return the episodes that fired and ended on the same baseline and rule, newest first.

    Nothing that ended after an instant, and no episode that doesn't say by which rule.
    """
    query = (
        select(EpisodeRow)
        .where(
            EpisodeRow.alert_id == alert,
            EpisodeRow.fired_at.is_not(None),
            EpisodeRow.resolved_at <= before,
            EpisodeRow.resolve_reason.in_(GOOD),
        )
        .order_by(EpisodeRow.opened_at.desc(), EpisodeRow.id.desc())
        .limit(_NEWEST)
    )
    return [
        Ended(row.opened_at, row.fired_at, row.resolved_at, row.resolve_reason == MANUAL)
        for row in session.scalars(query)
        if (row.evidence.get("baseline"), row.evidence.get("rule_sha")) == (baseline, rule_sha)
        and row.fired_at is not None
        and row.resolved_at is not None
    ]


def judged_since(
    session: Session, alert: int, since: datetime, *, apart_from: Sequence[str | None] = ()
) -> list[Judged]:
    """Return how a rule was judged from an instant on, oldest first, without some runs."""
    known = [run_id for run_id in apart_from if run_id is not None]
    query = (
        select(RuleEvaluationRow, RunRow.trigger)
        .join(RunRow, RunRow.id == RuleEvaluationRow.run_id)
        .where(
            RuleEvaluationRow.alert_id == alert,
            RuleEvaluationRow.evaluated_at >= since,
            # The judgement that ended the run: of a later one no scopes are kept.
            RuleEvaluationRow.eval_version == 1,
            RuleEvaluationRow.run_id.not_in(known),
        )
        .order_by(RuleEvaluationRow.evaluated_at, RuleEvaluationRow.run_id)
    )
    breached = _breached(session, alert, since)
    return [
        Judged(
            row.run_id,
            row.outcome,
            row.evaluated_at,
            trigger == TRIGGER,
            frozenset(breached.get(row.run_id, ())),
        )
        for row, trigger in session.execute(query)
    ]


def _breached(session: Session, alert: int, since: datetime) -> dict[str, set[Scope]]:
    query = (
        select(AlertScopeRow.run_id, ScopeRow.name)
        .join(ScopeRow, ScopeRow.id == AlertScopeRow.scope_id)
        .join(
            RuleEvaluationRow,
            (RuleEvaluationRow.run_id == AlertScopeRow.run_id)
            & (RuleEvaluationRow.alert_id == AlertScopeRow.alert_id),
        )
        .where(
            AlertScopeRow.alert_id == alert,
            AlertScopeRow.value_kind.not_in(UNDECIDED),
            RuleEvaluationRow.evaluated_at >= since,
        )
    )
    found: dict[str, set[Scope]] = defaultdict(set)
    for run_id, scope in session.execute(query):
        found[run_id].add(Scope(scope))
    return found
