"""False-discovery control against its definition, and what a confirmation run has to show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.baselines.decision import CONFIRMED, LEANING, established, since_good
from quantwatch.baselines.discovery import FALSE_DISCOVERIES, adjusted, discoveries
from quantwatch.domain import Comparison, Scope

probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=60)


def change(difference: float, p: float, num_prompts: int = 64, **fields: object) -> Comparison:
    return Comparison(
        "rel_error", Scope("layers.0"), num_prompts, 1 + difference, 1.0, -1.0, 1.0, p, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_published_example() -> None:
    """Catches a wrong step: Benjamini and Hochberg 1995, §4, rejects the first 4 of 15 at 5 %."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    q = adjusted(p)
    assert [value <= 0.05 for value in q] == [True] * 4 + [False] * 11
    assert q[:2] == pytest.approx([0.0015, 0.003])


@given(probabilities, st.floats(0.001, 0.5))
def test_q_rejects_what_the_definition_rejects(p: list[float], rate: float) -> None:
    """Catches ties, and a step-down taken for a step-up."""
    ordered = sorted(p)
    last = max((i for i, v in enumerate(ordered, 1) if v * len(p) / i <= rate), default=0)
    limit = ordered[last - 1] if last else -1.0
    assert [q <= rate for q in adjusted(p)] == [value <= limit for value in p]


@given(probabilities, st.randoms(use_true_random=False))
def test_q_does_not_depend_on_the_order(p: list[float], random: object) -> None:
    """Catches q handed to another series than its own."""
    order = list(range(len(p)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = adjusted([p[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(p))] == pytest.approx(adjusted(p))


def test_nothing_judged_nothing_found() -> None:
    """Catches a division by the empty family."""
    assert adjusted([]) == []
    assert established({}) == {}


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_increases_and_decreases_are_found_alike(changes: list[tuple[float, float]]) -> None:
    """Catches N26: one direction found more often than the other on the very same noise."""
    family = [change(d, p) for d, p in changes]
    mirrored = [change(-d, p) for d, p in changes]
    one_way = [(q, c.difference == 0) for q, c in zip(discoveries(family), family, strict=True)]
    other = [(q, c.difference == 0) for q, c in zip(discoveries(mirrored), mirrored, strict=True)]
    assert one_way == other


def decide(*family: Comparison, alone: tuple[Comparison, ...] | None = None) -> list[int]:
    keys = [("c", "rel_error", str(number)) for number in range(len(family))]
    own = None if alone is None else dict(zip(keys, alone, strict=True))
    return [
        each.established for each in established(dict(zip(keys, family, strict=True)), own).values()
    ]


def test_one_clear_series_among_many() -> None:
    """Catches p judged as if nothing else had been looked at."""
    noise = [change(0.1, 0.2)] * 199
    assert decide(change(0.1, 2e-4), *noise) == [1] + [0] * 199
    assert decide(change(-0.1, 2e-4), *noise) == [-1] + [0] * 199
    assert decide(change(0.1, 8e-4), *noise) == [0] * 200
    assert decide(change(0.1, 8e-4)) == [1]


def test_many_small_changes_help_each_other() -> None:
    """Catches Bonferroni, which would miss ten layers that all got a little worse."""
    family = [change(0.1, 3e-3)] * 20 + [change(0.1, 0.5)] * 180
    assert decide(*family) == [1] * 20 + [0] * 180


LEFT_OUT = {
    "few": change(0.1, 1e-9, 9),
    "lost": change(0.1, 1e-9, lost=(3,)),
    "no p": change(float("nan"), float("nan")),
}


@pytest.mark.parametrize("left_out", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_can_not_be_tested_takes_no_part(left_out: Comparison) -> None:
    """Catches a change that is established on nine prompts, or on those that are left, and one
    p that is no number and takes every other series with it.
    """
    assert decide(left_out, change(0.1, 1e-9)) == [0, 1]


CONFIRMATIONS = [
    ("both clear", change(0.1, 1e-6), change(0.1, 0.01), 1),
    ("only the first run was unlucky", change(0.1, 1e-6), change(0.02, 0.5), 0),
    ("the second goes the other way", change(0.1, 1e-6), change(-0.2, 0.01), 0),
    ("together not clear enough", change(0.1, 0.03), change(0.1, 0.01), 0),
    ("not measured again", change(0.1, 1e-6), None, 0),
]


@pytest.mark.parametrize(
    ("pooled", "own", "expected"),
    [row[1:] for row in CONFIRMATIONS],
    ids=[row[0] for row in CONFIRMATIONS],
)
def test_a_confirmation_run_has_to_show_it_too(
    pooled: Comparison, own: Comparison | None, expected: int
) -> None:
    """Catches a freak measurement that confirms itself through the mean of both runs."""
    key = ("c", "rel_error", "layers.0")
    alone = {} if own is None else {key: own}
    assert established({key: pooled}, alone)[key].established == expected


def test_a_confirmation_is_stricter_than_a_first_look() -> None:
    """Catches a second look that only repeats the baseline's own bad luck."""
    assert CONFIRMED < FALSE_DISCOVERIES
    assert decide(change(0.1, 0.03)) == [1]
    assert decide(change(0.1, 0.03), alone=(change(0.1, 0.03),)) == [0]


SINCE: dict[str, tuple[Comparison, bool, dict[str, int]]] = {
    "a rise": (change(0.1, 2 * LEANING), False, {"layers.0": 1}),
    "a fall": (change(-0.1, 1e-9), False, {"layers.0": -1}),
    "not clear": (change(0.1, 2 * LEANING + 1e-6), False, {"layers.0": 0}),
    "pooled, a rise": (change(0.1, 2 * CONFIRMED), True, {"layers.0": 1}),
    "pooled, not clear": (change(0.1, 2 * CONFIRMED + 1e-6), True, {"layers.0": 0}),
    "equal": (change(0.0, 1.0), False, {"layers.0": 0}),
    **{name: (each, False, {}) for name, each in LEFT_OUT.items()},
}


@pytest.mark.parametrize(("found", "pooled", "expected"), SINCE.values(), ids=SINCE)
def test_what_has_changed_since_it_was_last_found_good(
    found: Comparison, pooled: bool, expected: dict[str, int]
) -> None:
    """Catches an alert that stays closed because nothing can be told, and two-sided halves."""
    decided = since_good([found], pooled=pooled)
    assert {scope: each.established for scope, each in decided.items()} == expected


def test_false_discoveries_stay_below_the_rate() -> None:
    """Catches control that is off by a factor: 5 % of what is called changed may be chance."""
    rng = np.random.default_rng(5)
    shares = []
    for _ in range(400):
        p = rng.random(200)
        p[:20] = 2 * rng.random(20) * 1e-3
        found = [q <= FALSE_DISCOVERIES for q in adjusted(p.tolist())]
        shares.append(sum(found[20:]) / max(sum(found), 1))
    assert np.mean(shares) < 0.055
