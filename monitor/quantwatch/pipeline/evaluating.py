"""`quantwatch alerts evaluate`: a stored run judged for its alerts, on request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import RunResult
from quantwatch.errors import UserError
from quantwatch.pipeline import telling
from quantwatch.pipeline.rejudging import lost_sums, rejudge, rules_of_today
from quantwatch.pipeline.run_alerts import Again, RunAlerts
from quantwatch.pipeline.watching import settings_of
from quantwatch.store import audit, confirmations, evaluations, runs, watched
from quantwatch.store.applied import applied_checks

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from quantwatch.store.session import Database


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of it."""

    stored: RunResult
    """The run as it ended: its verdict never changes."""
    version: int
    """Of the newest judgement."""
    judged: RunResult | None = None
    """None when it was judged before, and nobody insisted."""
    moved: bool = False
    why_not: str | None = None
    """Why no alert moves."""
    notes: tuple[str, ...] = ()


def evaluate_run(
    database: "Database", run_id: str, config: Config, actor: str, *, force: bool
) -> Evaluation:
    """Judge a succeeded run under today's rules and move its check's alerts, in one transaction.

    A run that was judged before is left alone unless `force`, which writes another version. Only a
    check's newest verdict moves alerts, and what its judgement before has counted does not count
    twice; any other run is recorded. Raises UserError when there is nothing to judge, ConfigError
    on rules that don't fit.
    """
    run = runs.get_result(database, run_id)
    with database.reader() as session:
        version = evaluations.last_version(session, run_id)
        applied = applied_checks(session).get(run.check)
    if version and not force:
        return Evaluation(run, version)
    today = settings_of(run.check, None if applied is None else applied.config, config)
    if today is None:
        raise UserError(f"check {run.check} of run {run_id} is not in the configuration any more")
    judged = rejudge(database, run, today)
    notes = _notes(database, judged, today)
    with database.writer() as session:
        known = watched.hold_check(session, run.check)
        assert known is not None
        # Somebody may have judged it meanwhile.
        version = evaluations.last_version(session, run_id)
        if version and not force:
            return Evaluation(run, version)
        why_not = _why_not(session, known.id, run_id)
        again = Again(version + 1, why_not is None, evaluations.last_outcomes(session, run_id))
        _move(session, known.id, (run, judged), (today, config), again)
        told = {"eval_version": version + 1, "verdict": judged.verdict, "moved": why_not is None}
        audit.note(session, actor, "evaluate", f"run {run_id}", {"eval_version": version}, told)
    return Evaluation(run, version + 1, judged, why_not is None, why_not, notes)


def _move(
    session: "Session",
    check_id: int,
    found: tuple[RunResult, RunResult],
    settings: tuple[CheckConfig, Config],
    again: Again,
) -> None:
    """Write the judgement, and what it makes of the alerts if it may move them."""
    (run, judged), (today, config) = found, settings
    at = telling.desk(session, run.check, today, config)
    alerts = RunAlerts(session, check_id, judged, today, at, again)
    telling.tell(session, at, alerts.move())
    if alerts.wants_confirmation:
        # The same measurement once more, to be judged by the rules that asked for it.
        rules = rules_of_today(run, today).model_dump(mode="json")
        confirmations.queue_confirmation(session, run.run_id, rules)


def _notes(database: "Database", judged: RunResult, today: CheckConfig) -> tuple[str, ...]:
    if judged.baseline_run_id is None:
        return ()
    lost = lost_sums(database, judged, rules_of_today(judged, today))
    return tuple(
        f"{name}: its prompt sums are gone (retention.prompts), so means were compared"
        for name in lost
    )


def _why_not(session: "Session", check_id: int, run_id: str) -> str | None:
    newest = evaluations.newest_verdict(session, check_id)
    confirms = confirmations.origin(session, run_id).confirms
    if newest is None or newest in (run_id, confirms):
        return None
    return f"run {newest} of this check is newer, and only the newest verdict moves alerts"
