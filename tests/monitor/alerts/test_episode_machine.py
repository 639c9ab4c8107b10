"""The alert state machine as a table, and laws that hold whatever the runs say."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quantwatch.alerts.episodes import (
    AlertState,
    Effect,
    Policy,
    Reason,
    RunRef,
    State,
    Step,
    close,
    step,
    unconfirmed,
)
from quantwatch.alerts.peaks import Peak, worst_of
from quantwatch.domain import RuleOutcome, Severity

B, X, C, U, M = "breach", "between", "clear", "undecided", "missing"
OPENED, CONFIRM, FIRED = Effect.OPENED, Effect.CONFIRM, Effect.FIRED
ESCALATED, RECOVERING = Effect.ESCALATED, Effect.RECOVERING
RESOLVED, DROPPED = Effect.RESOLVED, Effect.DROPPED
INACTIVE, PENDING, FIRING, RECOVERS = State.INACTIVE, State.PENDING, State.FIRING, State.RECOVERING
PLAIN = Policy(confirm=False, missing_runs=2)
WARNING, CRITICAL = Severity.WARNING, Severity.CRITICAL


def outcome(what: str, **fields: Any) -> RuleOutcome:
    given_: dict[str, Any] = {
        "rule": "r", "candidate": "c", "rule_sha": "v1", "severity": CRITICAL, "outcome": what,
        "enter_runs": 1, "leave_runs": 2, "scope": None, "value": 0.2, "value_kind": "finite",
        "threshold": 0.1, "words": "",
    }  # fmt: skip
    return RuleOutcome(**(given_ | fields))


def at(state: State, **fields: Any) -> AlertState:
    severity = None if state is INACTIVE else CRITICAL
    return AlertState(state, **({"severity": severity, "rule_sha": "v1"} | fields))


class Row(NamedTuple):
    before: AlertState
    what: RuleOutcome
    after: AlertState
    effects: tuple[Effect, ...]
    reason: Reason | None = None


QUIET = at(INACTIVE)
TWO = {"enter_runs": 2}
MOFN = {"enter_runs": 2, "enter_window": 3}
ONCE = {"leave_runs": 1}
TABLE = {
    "inactive, clear: nothing": Row(QUIET, outcome(C), QUIET, ()),
    "inactive, between: nothing": Row(QUIET, outcome(X), QUIET, ()),
    "inactive, undecided: nothing": Row(QUIET, outcome(U), QUIET, ()),
    "inactive, missing: nothing": Row(QUIET, outcome(M), QUIET, ()),
    "inactive, breach: fires": Row(QUIET, outcome(B), at(FIRING), (OPENED, FIRED)),
    "inactive, first of two: pends": Row(
        QUIET, outcome(B, **TWO), at(PENDING, num_breaches=1), (OPENED,)
    ),
    "pending, second of two: fires": Row(
        at(PENDING, num_breaches=1), outcome(B, **TWO), at(FIRING), (FIRED,)
    ),
    "pending, second of three: pends": Row(
        at(PENDING, num_breaches=1), outcome(B, enter_runs=3), at(PENDING, num_breaches=2), ()
    ),
    "pending, clear: dropped": Row(
        at(PENDING, num_breaches=1), outcome(C, **TWO), QUIET, (DROPPED,), Reason.RECOVERED
    ),
    "pending, between: dropped": Row(
        at(PENDING, num_breaches=1), outcome(X, **TWO), QUIET, (DROPPED,), Reason.RECOVERED
    ),
    "pending, undecided: kept as it was": Row(
        at(PENDING, num_breaches=1, num_missing=1), outcome(U, **TWO),
        at(PENDING, num_breaches=1, num_missing=1), (),
    ),
    "pending, tested and not established: kept as it was": Row(
        at(PENDING, num_breaches=1), outcome(U, was_tested=True, **TWO),
        at(PENDING, num_breaches=1), (),
    ),
    "pending, missing once: kept": Row(
        at(PENDING, num_breaches=1), outcome(M, **TWO), at(PENDING, num_breaches=1, num_missing=1), ()
    ),
    "pending, missing twice: dropped": Row(
        at(PENDING, num_breaches=1, num_missing=1), outcome(M, **TWO), QUIET, (DROPPED,),
        Reason.SERIES_MISSING,
    ),
    "inactive, first of two of three: pends": Row(
        QUIET, outcome(B, **MOFN), at(PENDING, num_breaches=1, window=0b1), (OPENED,)
    ),
    "pending, the next run is clear: one of three": Row(
        at(PENDING, num_breaches=1, window=0b1), outcome(C, **MOFN),
        at(PENDING, num_breaches=1, window=0b10), (),
    ),
    "pending, the next run is between: one of three, seen again": Row(
        at(PENDING, num_breaches=1, window=0b1, num_missing=1), outcome(X, **MOFN),
        at(PENDING, num_breaches=1, window=0b10), (),
    ),
    "pending, second of two of three: fires": Row(
        at(PENDING, num_breaches=1, window=0b10), outcome(B, **MOFN), at(FIRING), (FIRED,)
    ),
    "pending, no breach among the last three: dropped": Row(
        at(PENDING, num_breaches=1, window=0b100), outcome(C, **MOFN), QUIET, (DROPPED,),
        Reason.RECOVERED,
    ),
    "pending by two of three, undecided: kept as it was": Row(
        at(PENDING, num_breaches=1, window=0b10), outcome(U, **MOFN),
        at(PENDING, num_breaches=1, window=0b10), (),
    ),
    "pending by two of three, missing: kept, no run of the three": Row(
        at(PENDING, num_breaches=1, window=0b10), outcome(M, **MOFN),
        at(PENDING, num_breaches=1, window=0b10, num_missing=1), (),
    ),
    "pending by two of three, missing twice: dropped": Row(
        at(PENDING, num_breaches=1, window=0b10, num_missing=1), outcome(M, **MOFN), QUIET,
        (DROPPED,), Reason.SERIES_MISSING,
    ),
    "firing by two of three, breach: fires on": Row(
        at(FIRING), outcome(B, **MOFN), at(FIRING), ()
    ),
    "firing, breach: fires on": Row(at(FIRING), outcome(B), at(FIRING), ()),
    "firing, between: fires on": Row(at(FIRING), outcome(X), at(FIRING), ()),
    "firing, undecided: kept as it was": Row(
        at(FIRING, num_missing=1), outcome(U), at(FIRING, num_missing=1), ()
    ),
    "firing, undecided and critical now: no escalation": Row(
        at(FIRING, severity=WARNING), outcome(U), at(FIRING, severity=WARNING), ()
    ),
    "firing, clear of two: recovers": Row(
        at(FIRING), outcome(C), at(RECOVERS, num_clear=1), (RECOVERING,)
    ),
    "firing, clear of one: resolved": Row(
        at(FIRING), outcome(C, **ONCE), QUIET, (RESOLVED,), Reason.RECOVERED
    ),
    "firing, missing once: kept": Row(at(FIRING), outcome(M), at(FIRING, num_missing=1), ()),
    "firing, missing twice: resolved": Row(
        at(FIRING, num_missing=1), outcome(M), QUIET, (RESOLVED,), Reason.SERIES_MISSING
    ),
    "firing, seen again: missing forgotten": Row(
        at(FIRING, num_missing=1), outcome(X), at(FIRING), ()
    ),
    "recovering, breach: fires on, silently": Row(
        at(RECOVERS, num_clear=1), outcome(B), at(FIRING), ()
    ),
    "recovering, between: counts from the start": Row(
        at(RECOVERS, num_clear=1), outcome(X), at(FIRING), ()
    ),
    "recovering, undecided: kept as it was": Row(
        at(RECOVERS, num_clear=1), outcome(U), at(RECOVERS, num_clear=1), ()
    ),
    "recovering, clear: resolved": Row(
        at(RECOVERS, num_clear=1), outcome(C), QUIET, (RESOLVED,), Reason.RECOVERED
    ),
    "recovering, clear of three: recovers on": Row(
        at(RECOVERS, num_clear=1), outcome(C, leave_runs=3), at(RECOVERS, num_clear=2), ()
    ),
    "recovering, missing: kept": Row(
        at(RECOVERS, num_clear=1), outcome(M), at(RECOVERS, num_clear=1, num_missing=1), ()
    ),
    "recovering, missing twice: resolved": Row(
        at(RECOVERS, num_clear=1, num_missing=1), outcome(M), QUIET, (RESOLVED,),
        Reason.SERIES_MISSING,
    ),
    "severity rises: escalated": Row(
        at(FIRING, severity=WARNING), outcome(B), at(FIRING), (ESCALATED,)
    ),
    "severity rises without a breach: nothing": Row(
        at(FIRING, severity=WARNING), outcome(X), at(FIRING, severity=WARNING), ()
    ),
    "severity falls: nothing": Row(at(FIRING), outcome(B, severity=WARNING), at(FIRING), ()),
    "pending, rule edited, breach: anew": Row(
        at(PENDING, num_breaches=2), outcome(B, rule_sha="v2", enter_runs=3),
        at(PENDING, num_breaches=1, rule_sha="v2"), (DROPPED, OPENED), Reason.RULE_CHANGED,
    ),
    "firing, rule edited, breach: anew": Row(
        at(FIRING), outcome(B, rule_sha="v2"), at(FIRING, rule_sha="v2"),
        (RESOLVED, OPENED, FIRED), Reason.RULE_CHANGED,
    ),
    "recovering, rule edited, clear: closed": Row(
        at(RECOVERS, num_clear=1), outcome(C, rule_sha="v2"), at(INACTIVE, rule_sha="v2"),
        (RESOLVED,), Reason.RULE_CHANGED,
    ),
    "firing, rule edited, undecided: closed": Row(
        at(FIRING), outcome(U, rule_sha="v2"), at(INACTIVE, rule_sha="v2"),
        (RESOLVED,), Reason.RULE_CHANGED,
    ),
    "inactive, rule edited: remembered": Row(
        QUIET, outcome(C, rule_sha="v2"), at(INACTIVE, rule_sha="v2"), ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_every_transition(row: Row) -> None:
    """Catches a transition that tells twice, never, or forgets what it counted (B18, B19, B22)."""
    assert step(row.before, row.what, RunRef("n"), PLAIN) == Step(
        row.after, row.effects, row.reason
    )


def test_the_table_has_every_state_with_every_outcome() -> None:
    """Catches a transition that nobody thought of."""
    seen = {(row.before.state, row.what.outcome) for row in TABLE.values()}
    assert seen == {(state, what) for state in State for what in (B, X, C, U, M)}


def play(outcomes: list[RuleOutcome], policy: Policy = PLAIN) -> list[Effect]:
    state = AlertState()
    effects: list[Effect] = []
    for number, what in enumerate(outcomes):
        moved = step(state, what, RunRef(f"run{number}"), policy)
        state = moved.state
        effects += moved.effects
    return effects


def test_oscillation_around_the_threshold_is_one_firing_and_one_resolved() -> None:
    """Catches an alert that flaps (B18): enter 0.1, leave 0.08, values around both."""
    values = [0.098, 0.103, 0.099, 0.102, 0.097, 0.101, 0.081, 0.079, 0.099, 0.1001, 0.07, 0.07]
    what = [B if value > 0.1 else C if value < 0.08 else X for value in values]
    effects = play([outcome(w) for w in what])
    assert [e for e in effects if e in (FIRED, RESOLVED)] == [FIRED, RESOLVED]


def test_breach_ok_breach_ok_with_three_runs_fires_nothing() -> None:
    """Catches a counter that is not reset (B19)."""
    assert FIRED not in play([outcome(w, enter_runs=3) for w in (B, X, B, C, B, B, X)])


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([B, X, C, U, M]), max_size=60),
    st.integers(1, 4).flatmap(lambda m: st.tuples(st.just(m), st.integers(m, 6))),
)
def test_m_of_n_is_what_a_list_says(what: list[str], m_of_n: tuple[int, int]) -> None:
    """Catches a window that forgets too early or too late, against a list of all judged runs."""
    m, n = m_of_n
    policy, state = Policy(confirm=False, missing_runs=99), AlertState()
    judged: list[bool] = []
    for number, said in enumerate(what):
        told = outcome(said, enter_runs=m, enter_window=n, leave_runs=1)
        was_told = state.state.is_told
        moved = step(state, told, RunRef(f"run{number}"), policy)
        state = moved.state
        if said in (U, M):
            assert moved.effects == ()
        elif was_told:
            # What was counted is used up by the episode: the next one counts anew.
            judged = [] if RESOLVED in moved.effects else judged
        else:
            judged.append(said == B)
            fires = judged[-1] and sum(judged[-n:]) >= m
            assert (FIRED in moved.effects) == fires
            assert (state.state is PENDING) == (not fires and any(judged[-n:]))
            assert state.num_breaches == (0 if fires else sum(judged[-n:]))
            judged = [] if fires or not any(judged[-n:]) else judged


@given(st.lists(st.sampled_from([B, X, C, U, M]), max_size=40), st.integers(1, 5))
def test_k_of_k_fires_with_k_in_a_row(what: list[str], k: int) -> None:
    """Catches a count that is off by one: both ways to say it fire at the same runs."""
    policy = Policy(confirm=False, missing_runs=99)
    fired = []
    for fields in ({"enter_runs": k}, {"enter_runs": k, "enter_window": k}):
        state, runs = AlertState(), []
        for number, said in enumerate(what):
            moved = step(state, outcome(said, **fields), RunRef(f"run{number}"), policy)
            state = moved.state
            runs += [number] if FIRED in moved.effects else []
        fired.append(runs)
    assert fired[0] == fired[1]


def test_two_of_five_fires_where_two_in_a_row_do_not() -> None:
    """Catches a regression of every other night that no rule in a row ever sees."""
    other_nights = [B, C, B, C, B]
    assert FIRED not in play([outcome(w, **TWO) for w in other_nights])
    assert FIRED in play([outcome(w, enter_runs=2, enter_window=5) for w in other_nights])


def test_a_closed_baseline_counts_anew() -> None:
    """Catches an alert that goes on against a baseline that nobody compares with any more."""
    moved = step(at(FIRING), outcome(B), RunRef("n"), PLAIN, baseline_moved=True)
    assert (moved.effects, moved.reason) == ((RESOLVED, OPENED, FIRED), Reason.BASELINE_MOVED)
    quiet = step(QUIET, outcome(C), RunRef("n"), PLAIN, baseline_moved=True)
    assert quiet == Step(QUIET)


CONFIRMING = Policy(confirm=True, missing_runs=2)
WAITING = at(PENDING, num_breaches=1, awaits="n")
CONFIRMATIONS = {
    "a critical breach asks": (QUIET, outcome(B), RunRef("n"), WAITING, (OPENED, CONFIRM)),
    "a warning does not": (
        QUIET, outcome(B, severity=WARNING), RunRef("n"), at(FIRING, severity=WARNING),
        (OPENED, FIRED),
    ),
    "a warning that may be chance does": (
        QUIET, outcome(B, severity=WARNING, may_be_chance=True), RunRef("n"),
        at(PENDING, severity=WARNING, num_breaches=1, awaits="n"), (OPENED, CONFIRM),
    ),
    "nor does a rule of two runs": (
        at(PENDING, num_breaches=1), outcome(B, **TWO), RunRef("n"), at(FIRING), (FIRED,),
    ),
    "one of one is the default: it asks": (
        QUIET, outcome(B, enter_window=1), RunRef("n"), replace(WAITING, window=1),
        (OPENED, CONFIRM),
    ),
    "one of one: the next night confirms": (
        replace(WAITING, window=1), outcome(B, enter_window=1), RunRef("n2"), at(FIRING), (FIRED,),
    ),
    "one of five: the confirmation denies": (
        replace(WAITING, window=1), outcome(C, enter_window=5), RunRef("k", "n"), QUIET, (DROPPED,),
    ),
    "nor does a rule of two of five": (
        at(PENDING, num_breaches=1, window=0b10), outcome(B, enter_runs=2, enter_window=5),
        RunRef("n"), at(FIRING), (FIRED,),
    ),
    "the confirmation fires": (WAITING, outcome(B), RunRef("k", "n"), at(FIRING), (FIRED,)),
    "the confirmation denies": (WAITING, outcome(X), RunRef("k", "n"), QUIET, (DROPPED,)),
    "the confirmation sees nothing": (WAITING, outcome(M), RunRef("k", "n"), WAITING, ()),
    "the confirmation lost a prompt": (WAITING, outcome(U), RunRef("k", "n"), WAITING, ()),
    "the confirmation's test denies": (
        WAITING, outcome(U, was_tested=True), RunRef("k", "n"), QUIET, (DROPPED,),
    ),
    "the next night can't tell": (WAITING, outcome(U), RunRef("n2"), WAITING, ()),
    "the next night's test alone doesn't deny": (
        WAITING, outcome(U, was_tested=True), RunRef("n2"), WAITING, (),
    ),
    "the next night confirms as well": (WAITING, outcome(B), RunRef("n2"), at(FIRING), (FIRED,)),
    "the next night denies": (WAITING, outcome(C), RunRef("n2"), QUIET, (DROPPED,)),
    "of another run": (WAITING, outcome(B), RunRef("k", "other"), WAITING, ()),
    "a confirmation opens nothing": (QUIET, outcome(B), RunRef("k", "n"), QUIET, ()),
    "a confirmation ends nothing": (at(FIRING), outcome(C), RunRef("k", "n"), at(FIRING), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIRMATIONS.values(), ids=CONFIRMATIONS.keys())
def test_confirmation(case: tuple[AlertState, RuleOutcome, RunRef, AlertState, Any]) -> None:
    """Catches a page on one bad measurement, and a night that counts twice."""
    before, what, run, after, effects = case
    moved = step(before, what, run, CONFIRMING)
    assert (moved.state, moved.effects) == (after, effects)


def test_a_confirmation_that_can_not_answer_does_not_lose_the_alert() -> None:
    """Catches an alert that waits forever for a run that failed."""
    assert unconfirmed(WAITING) == Step(at(FIRING), (FIRED,))
    assert unconfirmed(at(FIRING)) == Step(at(FIRING))


PEAKS = [
    ([0.2, 0.3, 0.25], 1, (0.3, "finite")),
    ([0.08, 0.09, 0.07], 1, (0.09, "finite")),
    ([0.8, 0.7, 0.75], -1, (0.7, "finite")),
    ([0.2, None, 0.3], 1, (None, "nan")),
]
SIDES = ["up", "up, at other limits", "down", "nan"]


@pytest.mark.parametrize(("values", "direction", "peak"), PEAKS, ids=SIDES)
def test_the_peak_is_the_worst_value(
    values: list[float | None], direction: int, peak: tuple[float | None, str]
) -> None:
    """Catches a peak that is the best value where higher is better, or a number that hides NaN."""
    worst = Peak()
    for value in values:
        kind = "nan" if value is None else "finite"
        what = outcome(B, value=value, value_kind=kind, direction=direction)
        worst = worst_of(worst, what)
    assert (worst.value, worst.kind) == peak


COUNTS: list[dict[str, Any]] = [
    {"enter_runs": 1, "leave_runs": 1},
    {"enter_runs": 1, "leave_runs": 2},
    {"enter_runs": 3, "leave_runs": 3},
    {"enter_runs": 2, "leave_runs": 2, "enter_window": 3},
]
"""Ways to count; another one is another rule."""


class Laws(RuleBasedStateMachine):
    """Any sequence of runs, edits, confirmations and people."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.run, self.open, self.fired = AlertState(), 0, False, False
        self.fields: dict[str, Any] = COUNTS[0]

    def take(self, moved: Step) -> None:
        for effect in moved.effects:
            if effect is OPENED:
                assert not self.open
                self.open, self.fired = True, False
            elif effect is FIRED:
                assert self.open
                assert not self.fired
                self.fired = True
            elif effect in (ESCALATED, RECOVERING):
                assert self.fired
            elif effect is RESOLVED:
                assert self.fired
                self.open = self.fired = False
            elif effect is DROPPED:
                assert self.open
                assert not self.fired
                self.open = False
        assert (moved.reason is None) == (not {RESOLVED, DROPPED} & set(moved.effects))
        self.state = moved.state

    @rule(
        what=st.sampled_from([B, X, C, U, M]), counts=st.sampled_from(COUNTS),
        severity=st.sampled_from(list(Severity)), confirm=st.booleans(), moved=st.booleans(),
    )  # fmt: skip
    def a_run(
        self, what: str, counts: dict[str, Any], severity: Severity, confirm: bool, moved: bool
    ) -> None:
        self.run += 1
        self.fields = {**counts, "rule_sha": str(counts)}
        said = outcome(what, severity=severity, **self.fields)
        policy = Policy(confirm, 2)
        self.take(step(self.state, said, RunRef(str(self.run)), policy, baseline_moved=moved))

    @rule(what=st.sampled_from([B, X, C, U, M]), offset=st.integers(0, 2), tested=st.booleans())
    def a_confirmation(self, what: str, offset: int, tested: bool) -> None:
        run = RunRef("k", str(self.run - offset))
        said = outcome(what, was_tested=tested and what == U, **self.fields)
        self.take(step(self.state, said, run, CONFIRMING))

    @rule(reason=st.sampled_from([Reason.MANUAL, Reason.RULE_DELETED]))
    def somebody_closes(self, reason: Reason) -> None:
        self.take(close(self.state, reason))

    @rule()
    def no_answer(self) -> None:
        self.take(unconfirmed(self.state))

    @invariant()
    def told_if_and_only_if_fired(self) -> None:
        assert (self.state.state is not INACTIVE) == self.open
        assert self.state.state.is_told == self.fired
        assert (self.state.severity is None) == (not self.open)
        assert self.state.awaits is None or self.state.state is PENDING
        assert (self.state.num_breaches > 0) == (self.state.state is PENDING)
        assert self.state.window == 0 or self.state.state is PENDING


TestLaws = Laws.TestCase
TestLaws.settings = settings(max_examples=150, stateful_step_count=30)


@given(st.lists(st.sampled_from([B, X, C]), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_missing_runs_change_no_decision(what: list[str], enter: int, leave: int) -> None:
    """Catches a run without the series that counts or resets: one between each two runs."""
    said = [outcome(w, enter_runs=enter, leave_runs=leave) for w in what]
    holes = [one for w in said for one in (w, outcome(M))]
    assert play(holes) == play(said)


runs_said = st.lists(st.sampled_from([B, X, C, U, M]), max_size=40)


@example([B, U, B], 2, 1, False)
@example([B, C, U, C], 1, 2, False)
@given(runs_said, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_what_is_undecided_neither_counts_nor_resets(
    what: list[str], enter: int, leave: int, confirm: bool
) -> None:
    """Catches a dropped prompt that is a pass: runs that can't tell are as if they had not been."""
    policy = Policy(confirm, 2)
    said = [outcome(w, enter_runs=enter, leave_runs=leave) for w in what]
    assert play(said, policy) == play([one for one in said if one.outcome != U], policy)
