"""What no run does for the alerts: silence that ends, reminders, a check that is silent itself."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

from pydantic import ValidationError
from sqlalchemy.orm import Session

from quantwatch.alerts.episodes import Reason, close, unconfirmed
from quantwatch.alerts.grouping import Change
from quantwatch.alerts.health import HEALTH
from quantwatch.alerts.overrides import rules_for
from quantwatch.config.durations import seconds
from quantwatch.config.rules import OWN_RULES
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import Json, RunStatus
from quantwatch.errors import ConfigError, QuantwatchError, UserError
from quantwatch.pipeline.moves import Changed, Facts, apply, state_of
from quantwatch.pipeline.service_alerts import judge_service
from quantwatch.pipeline.telling import Desk, desk, tell
from quantwatch.store import audit, confirmations, episodes, watched
from quantwatch.store.episodes import Episode, StoredAlert
from quantwatch.store.session import Database

_GRACE = "6h"
"""How long a confirmation run is waited for where no schedule says it."""


def watch(db: Database, config: Config) -> int:
    """Look after every check once: dead-man, health, deleted rules, silences, reminders.

    To be called every minute by any number of processes; return the number of messages. One check
    that can't be looked after does not keep others from it: the first error is raised at the end.
    """
    with db.reader() as session:
        names = watched.checks_to_watch(session)
    told, errors = 0, []
    for name in names:
        try:
            with db.writer() as session:
                told += _watch_check(session, name, config)
        except QuantwatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return told


def note_trouble(session: Session, check: str, settings: CheckConfig, service: Config) -> None:
    """Move the health alert at once, in the transaction that ends a failed run."""
    known = watched.hold_check(session, check)
    if known is None:
        return
    at = desk(session, check, settings, service)
    tell(session, at, judge_service(session, known, settings, at.moment))


def close_alert(db: Database, alert_id: int, actor: str, comment: str, config: Config) -> None:
    """Close an alert by hand; audited. Raises UserError when there is none or it is closed."""
    with db.writer() as session:
        name = episodes.get_alert(session, alert_id).check
        known = watched.hold_check(session, name)
        assert known is not None
        alert = episodes.get_alert(session, alert_id)
        if alert.episode is None:
            raise UserError(f"alert {alert_id} is {alert.state}; there is nothing to close")
        at = desk(session, name, settings_of(name, known.config, config), config)
        tell(session, at, _end(session, at, [alert], Reason.MANUAL))
        before = {"state": alert.state, "episode": alert.episode.id}
        audit.note(session, actor, "close", f"alert {alert_id}", before, {"comment": comment})


def _watch_check(session: Session, name: str, config: Config) -> int:
    known = watched.hold_check(session, name)
    if known is None:
        return 0
    settings = settings_of(name, known.config, config)
    at = desk(session, name, settings, config)
    found = episodes.open_alerts(session, known.id)
    if known.removed_at is not None:
        return tell(session, at, _end(session, at, found, Reason.RULE_DELETED))
    if settings is None:
        # Somebody else's, with whose configuration nobody has put it into service yet.
        return 0
    changes = _end(session, at, _deleted(found, settings), Reason.RULE_DELETED)
    changes += _fire_unconfirmed(session, at, settings, found)
    changes += judge_service(session, known, settings, at.moment)
    told = tell(session, at, changes)
    current = episodes.open_alerts(session, known.id)
    told += tell(session, at, list(_heard_again(session, at, current)))
    return told + tell(session, at, list(_reminders(at, settings, current)))


def settings_of(name: str, applied: Json | None, config: Config) -> CheckConfig | None:
    """Return a check as this process knows it, else as it was applied; None if neither."""
    if name in config.checks:
        return config.checks[name]
    if applied is None:
        return None
    try:
        return CheckConfig.model_validate(applied)
    except ValidationError as error:
        raise ConfigError(f"check {name}, as it was applied, is not valid: {error}") from None


def _end(
    session: Session, at: Desk, alerts: Iterable[StoredAlert], reason: Reason
) -> list[Changed]:
    ended = partial(close, reason=reason)
    return [
        changed
        for alert in alerts
        for changed in apply(session, alert, ended(state_of(alert)), Facts(at.moment))
    ]


def _deleted(alerts: Iterable[StoredAlert], settings: CheckConfig) -> list[StoredAlert]:
    """Return the alerts of rules and candidates that the configuration doesn't have any more."""
    rules = {
        candidate.name: {*OWN_RULES, *(rule.name for rule in rules_for(settings, candidate))}
        for candidate in settings.candidates
    }
    return [
        alert
        for alert in alerts
        if alert.candidate and alert.rule not in rules.get(alert.candidate, ())
    ]


def _fire_unconfirmed(
    session: Session, at: Desk, settings: CheckConfig, alerts: Iterable[StoredAlert]
) -> list[Changed]:
    """Fire what waits for a confirmation run that gives no answer: nothing is lost."""
    changes: list[Changed] = []
    for alert in alerts:
        if alert.awaits_run_id is None or alert.episode is None:
            continue
        why = _no_answer(session, at, settings, alert.awaits_run_id, alert.episode)
        if why is None:
            continue
        kept = {**alert.episode.evidence, "confirmation": f"not confirmed: {why}"}
        moved = unconfirmed(state_of(alert))
        changes += apply(session, alert, moved, Facts(at.moment, evidence=kept))
    return changes


def _no_answer(
    session: Session, at: Desk, settings: CheckConfig, awaited: str, episode: Episode
) -> str | None:
    """Return why a confirmation run gives no answer, None while it still may."""
    ended = confirmations.answer(session, awaited)
    if ended == RunStatus.SUCCEEDED:
        return "nothing can be told from the confirmation run"
    if ended is not None:
        return f"the confirmation run is {ended}"
    grace = _GRACE if settings.schedule is None else settings.schedule.grace
    late = at.moment - episode.opened_at >= timedelta(seconds=seconds(grace))
    return f"no confirmation run has ended within {grace}" if late else None


def _heard_again(session: Session, at: Desk, alerts: Iterable[StoredAlert]) -> Iterator[Changed]:
    """Yield what still fires when its silence ends; note when one begins."""
    for alert in alerts:
        episode = alert.episode
        if episode is None or episode.fired_at is None:
            continue
        muted = at.is_muted(alert, episode)
        if muted and episode.muted_at is None:
            episodes.save_episode(session, replace(episode, muted_at=at.moment))
        elif not muted and episode.muted_at is not None:
            yield Changed(alert, episode, Change.SILENCE_EXPIRED)


def _reminders(at: Desk, settings: CheckConfig, alerts: list[StoredAlert]) -> Iterator[Changed]:
    """Yield what is told again: all that fires of a group, when the oldest word is old enough.

    While the check is unhealthy only that is repeated: its metric alerts are as they were.
    """
    if settings.alerting.reminder is None:
        return
    pause = timedelta(seconds=seconds(settings.alerting.reminder))
    unhealthy = any(alert.rule == HEALTH and not alert.candidate for alert in alerts)
    heard = [
        alert for alert in alerts if _is_heard(at, alert) and not (alert.candidate and unhealthy)
    ]
    due = {
        alert.candidate
        for alert in heard
        if alert.episode
        and alert.episode.reminded_at
        and at.moment - alert.episode.reminded_at >= pause
    }
    for alert in heard:
        if alert.candidate in due and alert.episode:
            yield Changed(alert, alert.episode, Change.REMINDER)


def _is_heard(at: Desk, alert: StoredAlert) -> bool:
    """Say whether somebody was told, nobody looks after it, and nothing keeps it silent."""
    episode = alert.episode
    if episode is None or not episode.told or episode.acked_at is not None:
        return False
    return episode.muted_at is None and not at.is_muted(alert, episode)
