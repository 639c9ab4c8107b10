"""A run judged again: what its earlier judgement counted is taken back before it counts anew. Pure.

A night must not count twice. What was told stays told: an alert that fired is ended as any other.
"""

from dataclasses import replace

from quantwatch.alerts.episodes import close, step
from quantwatch.alerts.states import AlertState, Policy, Reason, RunRef, State, Step
from quantwatch.alerts.windows import num_breaches, without_newest
from quantwatch.domain import RuleOutcome


def step_again(
    before: AlertState,
    earlier: str,
    outcome: RuleOutcome,
    run: RunRef,
    policy: Policy,
    *,
    baseline_moved: bool = False,
) -> Step:
    """Return what the newest run makes of an alert that it moved before, by another outcome.

    `earlier` is that outcome. The same one under the same rule moves nothing, apart from a severity
    that rises while it fires. An edited rule, or another baseline, begins anew and takes nothing
    back.
    """
    if before.rule_sha != outcome.rule_sha or baseline_moved:
        return step(before, outcome, run, policy, baseline_moved=baseline_moved)
    if earlier == outcome.outcome:
        still = before.state is State.FIRING and earlier == "breach"
        return step(before, outcome, run, policy) if still else Step(before)
    bare = without(before, earlier, outcome.enter_window)
    unfounded = bare.state is State.PENDING and not bare.num_breaches
    if unfounded and outcome.outcome != "breach":
        return close(before, Reason.RECOVERED)
    return step(bare, outcome, run, policy)


def without(after: AlertState, outcome: str, enter_window: int | None) -> AlertState:
    """Return an open alert without what the last run's outcome has counted.

    What it ended or began (an episode, a recovery that a breach broke off) is not brought back.
    """
    if outcome == "missing":
        return replace(after, num_missing=max(0, after.num_missing - 1))
    if after.state is State.PENDING and outcome != "undecided":
        return _pending_without(after, outcome, enter_window)
    if after.state is State.RECOVERING and outcome == "clear":
        num_clear = max(0, after.num_clear - 1)
        state = State.RECOVERING if num_clear else State.FIRING
        return replace(after, state=state, num_clear=num_clear)
    return after


def _pending_without(after: AlertState, outcome: str, enter_window: int | None) -> AlertState:
    bare = replace(after, awaits=None)
    if enter_window is not None:
        window = without_newest(after.window)
        return replace(bare, window=window, num_breaches=num_breaches(window, enter_window))
    if outcome == "breach":
        return replace(bare, num_breaches=max(0, after.num_breaches - 1))
    return bare
