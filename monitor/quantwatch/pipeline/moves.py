"""A step of the state machine as rows: the alert moved, its episode opened, kept or closed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from quantwatch.alerts.episodes import AlertState, Effect, Reason, State, Step
from quantwatch.alerts.grouping import Change
from quantwatch.alerts.peaks import Peak, worst_of
from quantwatch.domain import Json, RuleOutcome, Severity
from quantwatch.store import episodes
from quantwatch.store.episodes import Episode, StoredAlert
from quantwatch.telemetry import new_run_id

_TOLD = {Effect.FIRED: Change.FIRED, Effect.ESCALATED: Change.ESCALATED}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a step was taken on. Without a run it was taken by the watch, or by a person."""

    moment: datetime
    outcome: RuleOutcome | None = None
    evidence: Json | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """Something about an alert that is to be told."""

    alert: StoredAlert
    episode: Episode
    change: Change


def state_of(alert: StoredAlert) -> AlertState:
    """Return what an alert remembers."""
    return AlertState(
        State(alert.state),
        None if alert.severity is None else Severity(alert.severity),
        alert.num_breaches,
        alert.num_clear,
        alert.num_missing,
        alert.rule_sha,
        alert.breach_window,
        alert.awaits_run_id,
    )


def apply(session: Session, alert: StoredAlert, step: Step, facts: Facts) -> list[Changed]:
    """Write a step; return what is to be told of it.

    Nothing is written, and nothing told, when somebody else moved the alert meanwhile.
    """
    opened = _new(alert, step, facts) if Effect.OPENED in step.effects else None
    still_open = step.state.state is not State.INACTIVE
    current = (opened or alert.episode) if still_open else None
    if current is None and not step.effects and step.state == state_of(alert):
        return []
    values = _values(step.state, None if current is None else current.id, facts)
    if not episodes.move(session, alert, values):
        return []
    told = _close(session, alert, step, facts)
    if current is None:
        return told
    current = _continued(current, step, facts)
    if opened is None:
        episodes.save_episode(session, current)
    else:
        episodes.add_episode(session, current)
    changes = [_TOLD[effect] for effect in step.effects if effect in _TOLD]
    return told + [Changed(alert, current, change) for change in changes]


def _values(state: AlertState, episode_id: str | None, facts: Facts) -> dict[str, Any]:
    ran = {} if facts.run_id is None else {"last_run_id": facts.run_id}
    return {
        "state": state.state.value,
        "severity": None if state.severity is None else state.severity.value,
        "num_breaches": state.num_breaches,
        "breach_window": state.window,
        "num_clear": state.num_clear,
        "num_missing": state.num_missing,
        "rule_sha": state.rule_sha,
        "awaits_run_id": state.awaits,
        "episode_id": episode_id,
        "changed_at": facts.moment,
        **ran,
    }


def _close(session: Session, alert: StoredAlert, step: Step, facts: Facts) -> list[Changed]:
    """Close the episode that was open, if the step ends one."""
    if step.reason is None or alert.episode is None:
        return []
    counted = _counted(alert.episode, facts) if _is_of_values(step.reason) else alert.episode
    ended = replace(
        counted,
        resolved_at=facts.moment,
        resolve_reason=step.reason.value,
        evidence={**counted.evidence, "now": _now(facts)},
    )
    episodes.save_episode(session, ended)
    was_told = Effect.RESOLVED in step.effects
    return [Changed(alert, ended, Change.RESOLVED)] if was_told else []


def _is_of_values(reason: Reason) -> bool:
    """Whether the run that closed an episode was still a run of it."""
    return reason in (Reason.RECOVERED, Reason.SERIES_MISSING)


def _now(facts: Facts) -> Mapping[str, Any] | None:
    if facts.outcome is None:
        return None
    return {
        "value": facts.outcome.value,
        "value_kind": facts.outcome.value_kind,
        "run": facts.run_id,
    }


def _new(alert: StoredAlert, step: Step, facts: Facts) -> Episode:
    severity = step.state.severity or Severity.WARNING
    return Episode(
        id=new_run_id(),
        alert_id=alert.id,
        severity=severity.value,
        opened_at=facts.moment,
        fired_at=None,
        resolved_at=None,
        resolve_reason=None,
        first_run_id=facts.run_id,
        last_run_id=None,
        num_runs=0,
        peak_value=None,
        peak_kind="missing",
        told=(),
        muted_at=None,
        reminded_at=None,
        acked_at=None,
        acked_by=None,
        ack_comment=None,
        evidence={},
    )


def _continued(episode: Episode, step: Step, facts: Facts) -> Episode:
    """Return an open episode after a run, or after a decision without one."""
    counted = _counted(episode, facts)
    fired = facts.moment if Effect.FIRED in step.effects else counted.fired_at
    severity = step.state.severity.value if step.state.severity else counted.severity
    evidence = counted.evidence if facts.evidence is None else _merged(counted, facts.evidence)
    return replace(counted, fired_at=fired, severity=severity, evidence=evidence)


def _merged(episode: Episode, evidence: Json) -> Json:
    """Return the evidence of the newest breach; how the first one was confirmed stays."""
    confirmation = evidence.get("confirmation") or episode.evidence.get("confirmation")
    return {**evidence, "confirmation": confirmation}


def _counted(episode: Episode, facts: Facts) -> Episode:
    outcome = facts.outcome
    if outcome is None:
        return episode
    peak = worst_of(Peak(episode.peak_value, episode.peak_kind), outcome)
    # A run that is judged again is still one run.
    ran = facts.run_id is not None and facts.run_id != episode.last_run_id
    return replace(
        episode,
        num_runs=episode.num_runs + ran,
        last_run_id=facts.run_id or episode.last_run_id,
        peak_value=peak.value,
        peak_kind=peak.kind,
    )
