"""Which rule was judged on which run: once, and again when somebody insists."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from quantwatch.domain import RuleOutcome, RunStatus
from quantwatch.store import lookups
from quantwatch.store.confirmations import TRIGGER
from quantwatch.store.tables import RuleEvaluationRow, RunRow


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One rule's outcome in one run. `value` is None unless `value_kind` is finite."""

    run_id: str
    eval_version: int
    outcome: str
    value: float | None
    value_kind: str
    threshold: float | None
    evaluated_at: datetime


def note_evaluation(
    session: Session,
    alert_id: int,
    run_id: str,
    outcome: RuleOutcome,
    moment: datetime,
    version: int = 1,
) -> bool:
    """Write a rule's outcome in a run; return False when this version was judged before."""
    row = {
        "alert_id": alert_id,
        "run_id": run_id,
        "eval_version": version,
        "outcome": outcome.outcome,
        "value": outcome.value,
        "value_kind": outcome.value_kind,
        "threshold": outcome.threshold,
        "evaluated_at": moment,
    }
    insert = lookups.insert_new(session, RuleEvaluationRow).values(**row)
    return session.execute(insert.returning(RuleEvaluationRow.run_id)).first() is not None


def last_version(session: Session, run_id: str) -> int:
    """Return the version of a run's newest judgement, 0 when it was never judged."""
    newest = select(func.max(RuleEvaluationRow.eval_version))
    return session.scalar(newest.where(RuleEvaluationRow.run_id == run_id)) or 0


def last_outcomes(session: Session, run_id: str) -> dict[int, str]:
    """Return the newest outcome of each rule that was judged on a run, by alert."""
    rows = session.execute(
        select(RuleEvaluationRow.alert_id, RuleEvaluationRow.outcome)
        .where(RuleEvaluationRow.run_id == run_id)
        .order_by(RuleEvaluationRow.eval_version)
    )
    return {row.alert_id: row.outcome for row in rows}


def newest_verdict(session: Session, check_id: int) -> str | None:
    """Return a check's newest succeeded run; those that only confirm another are none."""
    return session.scalar(
        select(RunRow.id)
        .where(
            RunRow.check_id == check_id,
            RunRow.status == RunStatus.SUCCEEDED.value,
            RunRow.trigger.is_distinct_from(TRIGGER),
        )
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(1)
    )


def list_evaluations(session: Session, alert_id: int, limit: int = 100) -> list[Evaluation]:
    """Return how a rule was judged lately, newest first."""
    rows = session.scalars(
        select(RuleEvaluationRow)
        .where(RuleEvaluationRow.alert_id == alert_id)
        .order_by(
            RuleEvaluationRow.evaluated_at.desc(),
            RuleEvaluationRow.run_id.desc(),
            RuleEvaluationRow.eval_version.desc(),
        )
        .limit(limit)
    )
    names = Evaluation.__slots__
    return [Evaluation(**{name: getattr(row, name) for name in names}) for row in rows]
