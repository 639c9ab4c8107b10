"""The alert state machine: one rule's outcome in one run moves one alert. Pure.

    inactive → pending → firing → recovering → inactive

Only succeeded runs are outcomes at all: a run without a verdict neither counts nor resets, and nor
does one from which nothing can be told (`undecided`). A breach of a rule that fires on its first
run is confirmed before anybody is told when it is critical, or when it rests on a statistical test:
the alert waits as pending until another run breaches as well, or until it is known that the
confirmation run can't tell (`unconfirmed`): an unconfirmed alert is better than a lost one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from quantwatch.domain import RuleOutcome, Severity


class State(StrEnum):
    """Where an alert is."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RECOVERING = "recovering"

    @property
    def is_told(self) -> bool:
        """Whether somebody was to be told: the episode has fired and is not resolved."""
        return self in (State.FIRING, State.RECOVERING)


class Effect(StrEnum):
    """What happened to an alert, in the order of `Step.effects`."""

    OPENED = "opened"
    """An episode begins, nobody is told yet."""
    CONFIRM = "confirm"
    """A confirmation run is to be queued."""
    FIRED = "fired"
    ESCALATED = "escalated"
    RECOVERING = "recovering"
    RESOLVED = "resolved"
    DROPPED = "dropped"
    """An episode that never fired ends; nobody is told."""


class Reason(StrEnum):
    """Why an episode ended."""

    RECOVERED = "recovered"
    RULE_CHANGED = "rule_changed"
    RULE_DELETED = "rule_deleted"
    SERIES_MISSING = "series_missing"
    BASELINE_MOVED = "baseline_moved"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class AlertState:
    """Everything that an alert remembers between runs."""

    state: State = State.INACTIVE
    severity: Severity | None = None
    """The highest of the open episode."""
    num_breaches: int = 0
    """Runs in a row that breached, while pending."""
    num_clear: int = 0
    """Runs in a row beyond the leave threshold, while recovering."""
    num_missing: int = 0
    """Runs in a row without the series, while open."""
    rule_sha: str | None = None
    awaits: str | None = None
    """The run whose confirmation it waits for."""


@dataclass(frozen=True, slots=True)
class RunRef:
    """The run that an outcome is of."""

    run_id: str
    confirms: str | None = None
    """The run that this one was queued to confirm."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the check's `alerting` section says of all its rules."""

    confirm: bool = True
    missing_runs: int = 2


@dataclass(frozen=True, slots=True)
class Step:
    """An alert's next state and what happened on the way. `reason` is of a closed episode."""

    state: AlertState
    effects: tuple[Effect, ...] = ()
    reason: Reason | None = None


def step(
    before: AlertState,
    outcome: RuleOutcome,
    run: RunRef,
    policy: Policy,
    *,
    baseline_moved: bool = False,
) -> Step:
    """Return what a rule's outcome in a succeeded run makes of an alert.

    A confirmation run answers one question: it moves the alerts that wait for it and no other, so
    that a night never counts twice. An episode of an edited rule, or of another baseline, is closed
    before the outcome is looked at.
    """
    if run.confirms is not None and before.awaits != run.confirms:
        return Step(before)
    ended = _outdated(before, outcome, baseline_moved)
    if ended is None:
        return _MOVES[before.state](
            replace(before, rule_sha=outcome.rule_sha), outcome, run, policy
        )
    closed = close(before, ended)
    fresh = AlertState(rule_sha=outcome.rule_sha)
    anew = _MOVES[State.INACTIVE](fresh, outcome, run, policy)
    return Step(anew.state, (*closed.effects, *anew.effects), closed.reason)


def close(before: AlertState, reason: Reason) -> Step:
    """Return how an alert ends for a reason that lies outside of its values."""
    if before.state is State.INACTIVE:
        return Step(before)
    effect = Effect.RESOLVED if before.state.is_told else Effect.DROPPED
    return Step(AlertState(rule_sha=before.rule_sha), (effect,), reason)


def unconfirmed(before: AlertState) -> Step:
    """Fire an alert whose confirmation run ended without an answer (failed, cancelled, skipped)."""
    if before.awaits is None:
        return Step(before)
    return Step(_fired(before), (Effect.FIRED,))


def _outdated(before: AlertState, outcome: RuleOutcome, baseline_moved: bool) -> Reason | None:
    if before.state is State.INACTIVE:
        return None
    if before.rule_sha != outcome.rule_sha:
        return Reason.RULE_CHANGED
    return Reason.BASELINE_MOVED if baseline_moved else None


def _rise(before: AlertState, outcome: RuleOutcome, run: RunRef, policy: Policy) -> Step:
    """Move an alert of which nobody was told."""
    if outcome.outcome == "missing":
        return _vanish(before, policy)
    if outcome.outcome == "undecided" and not (run.confirms and outcome.was_tested):
        return Step(before)
    if outcome.outcome != "breach":
        # Of what is undecided, only a confirmation run that could have confirmed and did not.
        return close(before, Reason.RECOVERED)
    opened = (Effect.OPENED,) if before.state is State.INACTIVE else ()
    pending = AlertState(
        State.PENDING,
        _higher(before.severity, outcome.severity),
        num_breaches=before.num_breaches + 1,
        rule_sha=outcome.rule_sha,
    )
    if pending.num_breaches < outcome.enter_runs:
        return Step(pending, opened)
    if _wants_confirmation(pending, outcome, run, policy):
        return Step(replace(pending, awaits=run.run_id), (*opened, Effect.CONFIRM))
    return Step(_fired(pending), (*opened, Effect.FIRED))


def _wants_confirmation(
    pending: AlertState, outcome: RuleOutcome, run: RunRef, policy: Policy
) -> bool:
    """Say whether this run stands alone: nothing before it breached, and it confirms nothing."""
    alone = pending.num_breaches == 1 and outcome.enter_runs == 1 and run.confirms is None
    doubtful = outcome.severity is Severity.CRITICAL or outcome.may_be_chance
    return policy.confirm and alone and doubtful


def _vanish(before: AlertState, policy: Policy) -> Step:
    """Keep an alert whose series is missing, until it is missing for too long."""
    if before.state is State.INACTIVE or before.awaits is not None:
        return Step(before)
    num_missing = before.num_missing + 1
    if num_missing >= policy.missing_runs:
        return close(before, Reason.SERIES_MISSING)
    return Step(replace(before, num_missing=num_missing))


def _fall(before: AlertState, outcome: RuleOutcome, _run: RunRef, policy: Policy) -> Step:
    """Move an alert that fires or recovers. A falling severity changes nothing."""
    if outcome.outcome == "missing":
        return _vanish(before, policy)
    if outcome.outcome == "undecided":
        return Step(before)
    if outcome.outcome == "clear":
        return _clear(before, outcome)
    firing = replace(before, state=State.FIRING, num_clear=0, num_missing=0)
    if outcome.outcome == "between":
        return Step(firing)
    severity = _higher(before.severity, outcome.severity)
    risen = (Effect.ESCALATED,) if severity is not before.severity else ()
    return Step(replace(firing, severity=severity), risen)


def _clear(before: AlertState, outcome: RuleOutcome) -> Step:
    num_clear = before.num_clear + 1
    if num_clear >= outcome.leave_runs:
        return close(before, Reason.RECOVERED)
    began = (Effect.RECOVERING,) if before.state is State.FIRING else ()
    state = replace(before, state=State.RECOVERING, num_clear=num_clear, num_missing=0)
    return Step(state, began)


def _fired(pending: AlertState) -> AlertState:
    return AlertState(State.FIRING, pending.severity, rule_sha=pending.rule_sha)


def _higher(known: Severity | None, new: Severity) -> Severity:
    return Severity.CRITICAL if Severity.CRITICAL in (known, new) else new


_MOVES: dict[State, Callable[[AlertState, RuleOutcome, RunRef, Policy], Step]] = {
    State.INACTIVE: _rise,
    State.PENDING: _rise,
    State.FIRING: _fall,
    State.RECOVERING: _fall,
}
