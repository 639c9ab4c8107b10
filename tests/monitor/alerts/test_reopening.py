"""When an alert that has ended opens again: against what, and what is said of it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quantwatch.alerts.reopening import (
    good_runs,
    last_good,
    to_closed,
    told_scopes,
    weigh_reopening,
)
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, Comparison, Ended, Judged, RuleOutcome, Scope, Severity

A, B = Scope("layers.3"), Scope("layers.7")
RULE = RuleConfig(name="r", metric="rel_error", scope="layers.*", kind="baseline", min_effect=0.01)
FALLS = RuleConfig(name="r", metric="top1_agreement", kind="baseline", min_effect=0.01)


def hour(number: float) -> datetime:
    return datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=number)


def history(*said: str) -> list[Judged]:
    """One run an hour: `breach A`, `clear`, … ; `confirms breach A` is a confirmation run."""
    return [_judged(number, *words.split()) for number, words in enumerate(said)]


def _judged(number: int, *words: str) -> Judged:
    confirms = words[0] == "confirms"
    outcome, *scopes = words[1:] if confirms else words
    places = frozenset({"A": A, "B": B}[name] for name in scopes)
    return Judged(f"r{number}", outcome, hour(number), confirms, places)


def ended(opened: int, fired: int, resolved: float, *, by_hand: bool) -> Ended:
    return Ended(hour(opened), hour(fired), hour(resolved), by_hand)


LAST_GOOD: dict[str, tuple[Ended, list[Judged], str]] = {
    "recovered: the clear runs that resolved it": (
        ended(0, 1, 4, by_hand=False),
        history("breach A", "confirms breach A", "breach A", "clear", "clear", "clear"),
        "r3 r4",
    ),
    "recovered: what was undecided in between counts for neither": (
        ended(0, 1, 4, by_hand=False),
        history("breach A", "confirms breach A", "clear", "undecided", "clear"),
        "r2 r4",
    ),
    "recovered: clear runs before the last breach are none": (
        ended(0, 1, 5, by_hand=False),
        history("breach A", "confirms breach A", "clear", "breach A", "clear", "clear"),
        "r4 r5",
    ),
    "recovered: fixed, however many good runs follow": (
        ended(0, 1, 3, by_hand=False),
        history("breach A", "confirms breach A", "clear", "clear", "clear", "breach B", "clear"),
        "r2 r3",
    ),
    "recovered, and its runs are deleted": (ended(0, 1, 3, by_hand=False), history(), ""),
    "by hand: what was there, both of the night": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "confirms breach A", "breach A", "breach A"),
        "r0 r1",
    ),
    "by hand: one good run is not enough": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "confirms breach A", "clear", "breach A", "clear", "missing"),
        "r0 r1",
    ),
    "by hand: the first good runs in a row": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "breach A", "clear", "breach A", "clear", "clear", "clear", "clear"),
        "r4 r5",
    ),
    "by hand: good here, whatever breaches elsewhere": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "breach A", "breach B", "undecided", "breach A"),
        "r2 r3",
    ),
    "by hand: a confirmation run is the same night": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "breach A", "breach B", "confirms breach B", "breach A B"),
        "r0 r1",
    ),
    "by hand: a run without the series is no good run": (
        ended(0, 1, 1.5, by_hand=True),
        history("breach A", "breach A", "clear", "missing", "clear"),
        "r2 r4",
    ),
}


@pytest.mark.parametrize(
    ("episode", "judged", "expected"), LAST_GOOD.values(), ids=LAST_GOOD.keys()
)
def test_what_was_last_found_good(episode: Ended, judged: list[Judged], expected: str) -> None:
    """Catches an anchor that creeps, one that is a fault, and a night that counts twice."""
    assert last_good(A, episode, judged, leave_runs=2) == tuple(expected.split())


@pytest.mark.parametrize(
    ("episode", "expected"),
    [
        pytest.param(ended(0, 1, 3, by_hand=True), {A, B}, id="from the run that fired on"),
        pytest.param(ended(0, 2, 2.5, by_hand=True), {B}, id="not what was not confirmed"),
        pytest.param(ended(0, 4, 5, by_hand=True), {A, B}, id="fired by the watch: all of it"),
        pytest.param(ended(5, 6, 7, by_hand=True), set(), id="nothing known"),
    ],
)
def test_what_an_episode_told_of(episode: Ended, expected: set[Scope]) -> None:
    """Catches a scope that nobody heard of, and whose first alert is held back."""
    judged = history("breach A", "breach A B", "breach B", "clear")
    assert told_scopes(episode, judged) == expected


def test_the_newest_episode_of_a_scope_counts() -> None:
    """Catches two unlucky series that open each other's alert in turn."""
    judged = history("breach A", "breach A", "breach B", "breach B", "breach A", "breach A")
    one, two, three = (ended(n, n + 1, n + 1.5, by_hand=True) for n in (0, 2, 4))
    assert good_runs([two, one], judged[:4], 2) == {A: ("r2", "r3"), B: ("r2", "r3")}
    assert good_runs([three, two, one], judged, 9) == {A: ("r4", "r5"), B: ("r2", "r3")}


def alert(scope: Scope, value: float | None = 0.2, **fields: Any) -> Alert:
    given: dict[str, Any] = {
        "rule": "r", "candidate": "c", "metric": "rel_error", "statistic": "mean", "scope": scope,
        "value": value, "value_kind": "nan" if value is None else "finite", "threshold": 0.1,
        "severity": Severity.WARNING, "words": f"{scope} is bad",
    }  # fmt: skip
    return Alert(**(given | fields))


def breach(scope: Scope = A, value: float | None = 0.2) -> RuleOutcome:
    return RuleOutcome(
        rule="r", candidate="c", rule_sha="v1", severity=Severity.WARNING, outcome="breach",
        enter_runs=1, leave_runs=2, scope=scope, value=value, value_kind="finite", threshold=0.1,
        words=f"{scope} is bad", may_be_chance=True,
    )  # fmt: skip


def since(scope: Scope, established: int, value: float = 0.2) -> dict[Scope, Comparison]:
    found = Comparison(
        "rel_error", scope, 64, value, 0.15, -0.1, 0.1, 0.01, established=established
    )
    return {scope: found}


WEIGHED: dict[str, tuple[RuleConfig, list[Alert], dict[Scope, Comparison], bool, Scope, str]] = {
    "nothing became worse": (
        RULE, [alert(A)], since(A, 0), False, A,
        "layers.3 is bad; an alert on it has ended, and it is not clearly worse since: "
        "0.05 above what was last found good",
    ),
    "it became better": (RULE, [alert(A)], since(A, -1, 0.1), False, A, "0.05 below"),
    "it became worse": (
        RULE, [alert(A)], since(A, 1), True, A,
        "layers.3 is bad; 0.05 above what was last found good",
    ),
    "worse is lower": (FALLS, [alert(A)], since(A, -1, 0.1), True, A, "0.05 below what was"),
    "better is higher": (FALLS, [alert(A)], since(A, 1), False, A, "not clearly worse"),
    "a scope nobody was told of": (RULE, [alert(A)], since(B, 0), True, A, "layers.3 is bad"),
    "told of what is new, not of the worst": (
        RULE, [alert(A, 0.9), alert(B)], since(A, 0), True, B, "layers.7 is bad",
    ),
    "a value that is not finite is no chance": (
        RULE, [alert(A, None)], since(A, 0), True, A, "layers.3 is bad",
    ),
    "the other scope is not decided": (
        RULE, [alert(A), alert(B, None, value_kind="inconclusive")], since(A, 0), False, A,
        "not clearly worse since",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "alerts", "known", "opens", "scope", "words"), WEIGHED.values(), ids=WEIGHED.keys()
)
def test_what_opens_an_alert_again(
    rule: RuleConfig,
    alerts: list[Alert],
    known: dict[Scope, Comparison],
    opens: bool,
    scope: Scope,
    words: str,
) -> None:
    """Catches an alert that is told again unchanged, and one that is never told again."""
    found, said = weigh_reopening(rule, breach(), alerts, known)
    assert (found.outcome, found.opens, found.scope) == ("breach", opens, scope)
    assert words in found.words
    assert found.words in [each.words for each in said]
    assert [each.scope for each in said] == [each.scope for each in alerts]


def test_a_breach_that_opens_nothing_is_none_to_a_closed_alert() -> None:
    """Catches a confirmation run that confirms what has not changed."""
    assert to_closed(breach()) == breach()
    assert to_closed(replace(breach(), opens=False)).outcome == "between"
