"""A run that is judged again counts once: what it counted before is taken back."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from quantwatch.alerts.episodes import (
    AlertState,
    Effect,
    Policy,
    Reason,
    RunRef,
    State,
    Step,
    step,
)
from quantwatch.alerts.recounting import step_again
from quantwatch.domain import RuleOutcome, Severity

B, X, C, U, M = "breach", "between", "clear", "undecided", "missing"
PLAIN, RUN = Policy(confirm=False, missing_runs=2), RunRef("n")
QUIET = AlertState(rule_sha="v1")


def outcome(what: str, **fields: Any) -> RuleOutcome:
    given_: dict[str, Any] = {
        "rule": "r", "candidate": "c", "rule_sha": "v1", "severity": Severity.CRITICAL,
        "outcome": what, "enter_runs": 1, "leave_runs": 2, "scope": None, "value": 0.2,
        "value_kind": "finite", "threshold": 0.1, "words": "",
    }  # fmt: skip
    return RuleOutcome(**(given_ | fields))


def at(state: State, **fields: Any) -> AlertState:
    return AlertState(state, **({"severity": Severity.CRITICAL, "rule_sha": "v1"} | fields))


class Row(NamedTuple):
    before: AlertState
    earlier: str
    now: RuleOutcome
    after: AlertState
    effects: tuple[Effect, ...] = ()
    reason: Reason | None = None


TWO = {"enter_runs": 2}
MOFN = {"enter_runs": 2, "enter_window": 3}
PENDING, FIRING, RECOVERING = State.PENDING, State.FIRING, State.RECOVERING
TABLE = {
    "the same breach of two counts once": Row(
        at(PENDING, num_breaches=1), B, outcome(B, **TWO), at(PENDING, num_breaches=1)
    ),
    "a breach that was none: dropped": Row(
        at(PENDING, num_breaches=1), B, outcome(C, **TWO), QUIET, (Effect.DROPPED,),
        Reason.RECOVERED,
    ),
    "a breach of which nothing can be told: dropped": Row(
        at(PENDING, num_breaches=1), B, outcome(U, **TWO), QUIET, (Effect.DROPPED,),
        Reason.RECOVERED,
    ),
    "the second breach of three of which nothing can be told: the first stays": Row(
        at(PENDING, num_breaches=2), B, outcome(U, enter_runs=3), at(PENDING, num_breaches=1)
    ),
    "a clear run of two that breached: fires": Row(
        at(PENDING, num_breaches=1, window=0b10), C, outcome(B, **MOFN), at(FIRING),
        (Effect.FIRED,),
    ),
    "the only breach of three was none: dropped": Row(
        at(PENDING, num_breaches=1, window=0b1), B, outcome(C, **MOFN), QUIET, (Effect.DROPPED,),
        Reason.RECOVERED,
    ),
    "a breach of three of four was none: the one before stays": Row(
        at(PENDING, num_breaches=2, window=0b11), B, outcome(C, enter_runs=3, enter_window=4),
        at(PENDING, num_breaches=1, window=0b10),
    ),
    "the same clear run counts once": Row(
        at(RECOVERING, num_clear=1), C, outcome(C, leave_runs=2), at(RECOVERING, num_clear=1)
    ),
    "a clear run that was between: fires on": Row(
        at(RECOVERING, num_clear=1), C, outcome(X), at(FIRING)
    ),
    "a clear run of which nothing can be told: fires on": Row(
        at(RECOVERING, num_clear=1), C, outcome(U), at(FIRING)
    ),
    "missing counts once": Row(at(FIRING, num_missing=1), M, outcome(M), at(FIRING, num_missing=1)),
    "missing that was between: seen": Row(at(FIRING, num_missing=1), M, outcome(X), at(FIRING)),
    "nothing was known, and it breaches: fires": Row(
        QUIET, U, outcome(B), at(FIRING), (Effect.OPENED, Effect.FIRED)
    ),
    "the same breach of what was closed by hand: stays closed": Row(QUIET, B, outcome(B), QUIET),
    "a breach that fired and was none: recovers": Row(
        at(FIRING), B, outcome(C), at(RECOVERING, num_clear=1), (Effect.RECOVERING,)
    ),
    "the same breach under another rule: anew": Row(
        at(FIRING), B, outcome(B, rule_sha="v2"), at(FIRING, rule_sha="v2"),
        (Effect.RESOLVED, Effect.OPENED, Effect.FIRED), Reason.RULE_CHANGED,
    ),
    "the same breach, now critical: escalates": Row(
        at(FIRING, severity=Severity.WARNING), B, outcome(B), at(FIRING), (Effect.ESCALATED,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_every_correction(row: Row) -> None:
    """Catches a night that counts twice, and one that can't be corrected."""
    found = step_again(row.before, row.earlier, row.now, RUN, PLAIN)
    assert found == Step(row.after, row.effects, row.reason)


def test_a_breach_that_waits_is_confirmed_by_nobody_else() -> None:
    """Catches an alert that waits for a confirmation of what did not breach."""
    waits = at(PENDING, num_breaches=1, awaits="n")
    confirming = Policy(confirm=True, missing_runs=2)
    assert step_again(waits, B, outcome(B), RUN, confirming) == Step(waits)
    denied = step_again(waits, B, outcome(C), RUN, confirming)
    assert (denied.state, denied.effects) == (QUIET, (Effect.DROPPED,))


def test_another_baseline_takes_nothing_back() -> None:
    """Catches an episode that goes on against a baseline that nobody compares with any more."""
    found = step_again(at(FIRING), B, outcome(C), RUN, PLAIN, baseline_moved=True)
    assert (found.effects, found.reason) == ((Effect.RESOLVED,), Reason.BASELINE_MOVED)


said = st.sampled_from([B, X, C, U])
IRREVERSIBLE = {Effect.FIRED, Effect.RESOLVED, Effect.DROPPED}


def counted(state: AlertState, n: int | None) -> AlertState:
    """Without the run before the last n, which was kept to take one back and is used up by it."""
    return state if n is None else replace(state, window=state.window & ((1 << n) - 1))


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(said, max_size=30), st.tuples(said, said), st.integers(2, 4),
    st.sampled_from([None, 4, 6, 30]), st.lists(said, max_size=8),
)  # fmt: skip
@example([B, B, B, X, B], (B, U), 4, 4, [B, B])
def test_judged_again_is_as_if_it_had_been_judged_so_first(
    nights: list[str], said_of_it: tuple[str, str], enter: int, window: int | None, later: list[str]
) -> None:
    """Catches counts that drift with each correction, whatever other nights said before and after.

    What a first judgement ended, fired or broke off is not undone, so those are left out.
    """
    first, second = said_of_it
    fields = {"enter_runs": enter, "enter_window": window, "leave_runs": 3}
    state = AlertState()
    for number, what in enumerate(nights):
        state = step(state, outcome(what, **fields), RunRef(f"run{number}"), PLAIN).state
    once = step(state, outcome(first, **fields), RUN, PLAIN)
    assume(not IRREVERSIBLE & set(once.effects))
    assume((state.state, once.state.state) != (RECOVERING, FIRING))
    again = step_again(once.state, first, outcome(second, **fields), RUN, PLAIN)
    expected = step(state, outcome(second, **fields), RUN, PLAIN)
    assert counted(again.state, window) == counted(expected.state, window)
    ours, theirs = again.state, expected.state
    for number, what in enumerate(later):
        run = RunRef(f"later{number}")
        mine, other = (step(s, outcome(what, **fields), run, PLAIN) for s in (ours, theirs))
        assert mine.effects == other.effects
        ours, theirs = mine.state, other.state
        assert counted(ours, window) == counted(theirs, window)
