"""The alert state machine: one rule's outcome in one run moves one alert. Pure.

    inactive → pending → firing → recovering → inactive

Only succeeded runs are outcomes at all: a run without a verdict neither counts nor resets, and nor
does one from which nothing can be told (`undecided`). A breach of a rule that fires on its first
run is confirmed before anybody is told when it is critical, or when it rests on a statistical test:
the alert waits as pending until another run breaches as well, or until it is known that the
confirmation run can't tell (`unconfirmed`): an unconfirmed alert is better than a lost one.
"""

from collections.abc import Callable
from dataclasses import replace

from quantwatch.alerts.states import AlertState, Effect, Policy, Reason, RunRef, State, Step
from quantwatch.alerts.windows import num_breaches, pushed
from quantwatch.domain import RuleOutcome, Severity

__all__ = [
    "AlertState",
    "Effect",
    "Policy",
    "Reason",
    "RunRef",
    "State",
    "Step",
    "close",
    "step",
    "unconfirmed",
]


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
        return _abate(before, outcome)
    opened = (Effect.OPENED,) if before.state is State.INACTIVE else ()
    count, window = _count(before, outcome)
    pending = AlertState(
        State.PENDING,
        _higher(before.severity, outcome.severity),
        num_breaches=count,
        rule_sha=outcome.rule_sha,
        window=window,
    )
    if count < outcome.enter_runs:
        return Step(pending, opened)
    if _wants_confirmation(before, outcome, run, policy):
        return Step(replace(pending, awaits=run.run_id), (*opened, Effect.CONFIRM))
    return Step(_fired(pending), (*opened, Effect.FIRED))


def _count(before: AlertState, outcome: RuleOutcome) -> tuple[int, int]:
    """Return how many breaches count once this one is added, and in which of the last runs."""
    if outcome.enter_window is None:
        return before.num_breaches + 1, 0
    window = pushed(before.window, outcome.enter_window, breached=True)
    return num_breaches(window, outcome.enter_window), window


def _abate(before: AlertState, outcome: RuleOutcome) -> Step:
    """Drop what does not breach; m of n waits until no run that counts breached any more."""
    if before.awaits is not None or outcome.enter_window is None:
        return close(before, Reason.RECOVERED)
    window = pushed(before.window, outcome.enter_window, breached=False)
    count = num_breaches(window, outcome.enter_window)
    if not count:
        return close(before, Reason.RECOVERED)
    return Step(replace(before, window=window, num_breaches=count, num_missing=0))


def _wants_confirmation(
    before: AlertState, outcome: RuleOutcome, run: RunRef, policy: Policy
) -> bool:
    """Say whether this run stands alone: nothing before it breached, and it confirms nothing."""
    alone = before.awaits is None and outcome.enter_runs == 1 and run.confirms is None
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
