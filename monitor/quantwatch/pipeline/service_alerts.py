"""Alerts about the check itself: no success in time, failures in a row, a canary not found."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from quantwatch.alerts.blindness import CANARY, blindness
from quantwatch.alerts.dead_man import DEAD_MAN, believed, dead_man, overdue_slot
from quantwatch.alerts.episodes import Policy, Reason, RunRef, State, close, step
from quantwatch.alerts.health import HEALTH, health
from quantwatch.config.durations import seconds
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RuleOutcome
from quantwatch.pipeline import evidence
from quantwatch.pipeline.moves import Changed, Facts, apply, state_of
from quantwatch.store import canaries, episodes, watched
from quantwatch.store.episodes import StoredAlert
from quantwatch.store.watched import Watched

_POLICY = Policy(confirm=False)
_NO_RUN = RunRef("")


def judge_service(
    session: Session, check: Watched, settings: CheckConfig, moment: datetime
) -> list[Changed]:
    """Move the dead-man, the health and the canary alert; return what is to be told."""
    rules = (DEAD_MAN, HEALTH, *(() if settings.canary is None else (CANARY,)))
    found = episodes.find_alerts(session, check.id, [("", rule) for rule in rules])
    changes: list[Changed] = []
    if settings.schedule is None:
        changes += _no_longer_wanted(session, found["", DEAD_MAN], moment)
    if settings.canary is None:
        for alert in episodes.open_alerts(session, check.id):
            if (alert.candidate, alert.rule) == ("", CANARY):
                changes += _no_longer_wanted(session, alert, moment)
    for outcome in _outcomes(session, check, settings, moment):
        changes += _move(session, found["", outcome.rule], outcome, moment)
    return changes


def _outcomes(
    session: Session, check: Watched, settings: CheckConfig, moment: datetime
) -> Iterator[RuleOutcome]:
    if settings.schedule is not None and check.paused_at is None:
        grace = timedelta(seconds=seconds(settings.schedule.grace))
        slots = watched.expected_slots(session, check.id, moment - grace)
        success = believed(check.last_success_at, grace, moment)
        slot = overdue_slot(slots, success, grace, moment)
        yield dead_man(slot, success, grace, moment)
    flown = None if settings.canary is None else canaries.last_measured(session, check.id)
    if flown is not None:
        yield blindness(flown.canary, flown.run_id)
    trouble = watched.last_trouble(session, check.id) if check.unhealthy_runs else ""
    yield health(
        check.unhealthy_runs,
        settings.alerting.unhealthy_runs,
        trouble,
        quarantined=check.quarantined_at is not None,
    )


def _move(
    session: Session, alert: StoredAlert, outcome: RuleOutcome, moment: datetime
) -> list[Changed]:
    if outcome.outcome == "breach" and State(alert.state).is_told:
        return []
    breach = outcome.outcome == "breach"
    kept = evidence.of_service(alert.check, outcome) if breach else None
    moved = step(state_of(alert), outcome, _NO_RUN, _POLICY)
    return apply(session, alert, moved, Facts(moment, outcome, kept))


def _no_longer_wanted(session: Session, alert: StoredAlert, moment: datetime) -> list[Changed]:
    return apply(session, alert, close(state_of(alert), Reason.RULE_DELETED), Facts(moment))
