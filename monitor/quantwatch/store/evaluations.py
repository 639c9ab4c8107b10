"""Which rule was judged on which run: once, whoever asks again."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.domain import RuleOutcome
from quantwatch.store import lookups
from quantwatch.store.tables import RuleEvaluationRow


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One rule's outcome in one run. `value` is None unless `value_kind` is finite."""

    run_id: str
    outcome: str
    value: float | None
    value_kind: str
    threshold: float | None
    evaluated_at: datetime


def note_evaluation(
    session: Session, alert_id: int, run_id: str, outcome: RuleOutcome, moment: datetime
) -> bool:
    """Write a rule's outcome in a run; return False when it was judged before."""
    row = {
        "alert_id": alert_id,
        "run_id": run_id,
        "outcome": outcome.outcome,
        "value": outcome.value,
        "value_kind": outcome.value_kind,
        "threshold": outcome.threshold,
        "evaluated_at": moment,
    }
    insert = lookups.insert_new(session, RuleEvaluationRow).values(**row)
    return session.execute(insert.returning(RuleEvaluationRow.run_id)).first() is not None


def list_evaluations(session: Session, alert_id: int, limit: int = 100) -> list[Evaluation]:
    """Return how a rule was judged lately, newest first."""
    rows = session.scalars(
        select(RuleEvaluationRow)
        .where(RuleEvaluationRow.alert_id == alert_id)
        .order_by(RuleEvaluationRow.evaluated_at.desc(), RuleEvaluationRow.run_id.desc())
        .limit(limit)
    )
    names = Evaluation.__slots__
    return [Evaluation(**{name: getattr(row, name) for name in names}) for row in rows]
