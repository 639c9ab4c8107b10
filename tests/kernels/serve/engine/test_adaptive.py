"""The batch size controller: a state machine, and no oscillation under a constant load."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch_kernels.serve.engine.adaptive import AdaptiveBatch, AdaptiveRule, StepReport

RULE = AdaptiveRule(0.1, 64, patience=2, dwell=1)
Curve = Callable[[int], float]


def run(
    batch: AdaptiveBatch, seconds: Curve, steps: int, free: Curve = lambda _: 1.0, waiting: int = 5
) -> list[int]:
    """As many run as may, and others wait."""
    return [
        batch.observe(StepReport(seconds(batch.limit), free(batch.limit), batch.limit, waiting))
        for _ in range(steps)
    ]


def linear(n: int) -> float:
    return 0.005 * n


def distinct(limits: list[int]) -> list[int]:
    return [one for one, before in zip(limits, [0, *limits], strict=False) if one != before]


def test_doubles_then_bisects_and_stays() -> None:
    """5 ms each, 100 ms at most: 16 has room (80 ms is the edge), 32 is bad, then 24 is bad, 20 stays."""
    batch = AdaptiveBatch(RULE)
    limits = run(batch, lambda n: 0.0049 * n, 200)
    assert distinct(limits) == [1, 2, 4, 8, 16, 32, 16, 24, 16, 20]
    assert len(set(limits[60:])) == 1


def test_grows_only_while_somebody_waits() -> None:
    batch = AdaptiveBatch(RULE)
    run(batch, linear, 50, waiting=0)
    assert batch.limit == 1


def test_grows_only_when_the_number_is_used() -> None:
    """Two of four running say nothing good of four."""
    batch = AdaptiveBatch(RULE, limit=4)
    for _ in range(40):
        batch.observe(StepReport(0.01, 1.0, 2, 1))
    assert (batch.limit, batch.good) == (4, 0)


def test_one_slow_step_is_none() -> None:
    batch = AdaptiveBatch(AdaptiveRule(0.1, 64, patience=3, dwell=0), limit=8)
    for seconds in (0.09, 9.0, 0.09) * 5:
        batch.observe(StepReport(seconds, 1.0, 8, 5))
    assert batch.limit == 8


def test_little_memory_shrinks_however_fast_it_is() -> None:
    batch = AdaptiveBatch(RULE, limit=8)
    run(batch, lambda _: 0.001, 2, free=lambda _: 0.04)
    assert (batch.limit, batch.ceiling) == (4, 8)


@pytest.mark.parametrize(
    ("seconds", "free"), [(0.09, 1.0), (0.01, 0.1)], ids=["latency in the band", "memory between"]
)
def test_between_the_thresholds_nothing_changes(seconds: float, free: float) -> None:
    batch = AdaptiveBatch(RULE, limit=8)
    run(batch, lambda _: seconds, 100, free=lambda _: free)
    assert (batch.limit, batch.changes) == (8, 0)


def test_steps_right_after_a_change_do_not_count() -> None:
    batch = AdaptiveBatch(AdaptiveRule(0.1, 64, patience=1, dwell=3))
    limits = run(batch, lambda _: 0.001, 9)
    assert limits == [2, 2, 2, 2, 4, 4, 4, 4, 8]


def test_those_who_still_run_do_not_count() -> None:
    """The number fell from 8 to 4 and eight run on: that is no reason to fall again."""
    batch = AdaptiveBatch(RULE, limit=8)
    run(batch, lambda _: 0.2, 2)
    for _ in range(50):
        batch.observe(StepReport(0.2, 1.0, 8, 5))
    assert (batch.limit, batch.ceiling) == (4, 8)


def test_a_lighter_load_is_noticed() -> None:
    """Texts became shorter: what was measured before takes a third, the ceiling is forgotten."""
    batch = AdaptiveBatch(RULE)
    run(batch, linear, 200)
    before = batch.limit
    run(batch, lambda n: linear(n) / 3, 200)
    assert before <= 20
    assert 40 < batch.limit <= 60


def test_a_heavier_load_is_noticed() -> None:
    batch = AdaptiveBatch(RULE)
    run(batch, linear, 200)
    run(batch, lambda n: 4 * linear(n), 200)
    assert 1 <= batch.limit <= 5


def test_a_load_that_was_heavy_for_a_while_leaves_nothing_behind() -> None:
    """Catches a ceiling from a heavy hour that outlives it."""
    batch = AdaptiveBatch(RULE)
    run(batch, linear, 200)
    before = batch.limit
    run(batch, lambda n: 4 * linear(n), 200)
    run(batch, linear, 300)
    assert batch.limit >= before * 3 // 4


def test_never_below_one() -> None:
    batch = AdaptiveBatch(RULE, limit=3)
    run(batch, lambda _: 9.0, 100)
    assert batch.limit == 1
    assert batch.changes == 1


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ({"target_s": 0.0}, "target_s must be above 0"),
        ({"target_s": math.nan}, "target_s must be above 0"),
        ({"most": 0}, "most at least 1"),
        ({"band": 0.0}, "band and drift"),
        ({"low_free": 0.2, "high_free": 0.2}, "low_free < high_free"),
        ({"patience": 0}, "patience is at least 1"),
    ],
    ids=str,
)
def test_bad_rules(given_: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AdaptiveRule(**{"target_s": 0.1, "most": 8, **given_})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "report", [(math.nan, 1.0), (-1.0, 1.0), (0.1, 1.1), (0.1, math.nan)], ids=str
)
def test_bad_reports(report: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="leaves a share free"):
        AdaptiveBatch(RULE).observe(StepReport(*report, 1, 1))


@given(
    curve=st.tuples(st.floats(0, 0.2), st.floats(0, 0.05), st.floats(1, 2)),
    page=st.floats(0, 0.2), most=st.integers(1, 256), start=st.integers(1, 256),
    noise=st.lists(st.floats(-0.09, 0.09), min_size=7, max_size=7),
)  # fmt: skip
def test_a_constant_load_ends_in_one_number(
    curve: tuple[float, float, float], page: float, most: int, start: int, noise: list[float]
) -> None:
    """No oscillation: with a latency and a memory that grow with the number and noise below the
    hysteresis, the number changes at most a few times per halving, and then never again."""
    fixed, each, power = curve
    batch = AdaptiveBatch(AdaptiveRule(0.1, most, patience=3, dwell=1), limit=min(start, most))
    for step in range(600):
        n = batch.limit
        seconds = (fixed + each * n**power) * (1 + noise[step % 7])
        assert 1 <= batch.observe(StepReport(seconds, max(0.0, 1 - page * n), n, 9)) <= most
        if step == 300:
            settled = batch.changes
    assert batch.changes == settled
    assert batch.changes <= 2 * math.log2(256) + 4


@given(each=st.floats(0.0005, 0.05), most=st.integers(1, 128))
def test_what_it_settles_on_is_good_and_not_far_from_the_best(each: float, most: int) -> None:
    """The target is kept, and twice as many would break the band, or aren't allowed."""
    batch = AdaptiveBatch(AdaptiveRule(0.1, most, patience=1, dwell=0))
    run(batch, lambda n: each * n, 200)
    assert each * batch.limit <= 0.1
    assert batch.limit == most or each * 2 * batch.limit > 0.08
