"""Paired tests against independent computations, degenerate cases, and the laws they keep."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quantwatch.baselines.paired import RESAMPLES, PromptSums, Resampler, compare
from quantwatch.baselines.rolling import averaged
from quantwatch.baselines.series import compare_candidate
from quantwatch.baselines.student import quantile, two_sided
from quantwatch.domain import Comparison, Scope
from quantwatch.metrics.statistics import PromptValues, clustered_se, partials

SCOPE = Scope("layers.0")
Values = Sequence[NDArray[np.float64]]


def sums(values: Values) -> PromptSums:
    """Per-token values of every prompt, one scope."""
    return PromptSums.over((SCOPE,), [np.stack([partials(v[None, :]) for v in values])])


def pair(now: Values, before: Values, floor: float = 0.0, runs: str = "ab") -> Comparison:
    floors = {("rel_error", str(SCOPE)): floor}
    (found,) = compare("rel_error", sums(now), sums(before), floors, Resampler(*runs))
    return found


def draw(seed: int, num_prompts: int = 40, shift: float = 0.0) -> tuple[Values, Values]:
    """Two runs on prompts of unequal length that differ by noise and a shift."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, num_prompts)
    before = [rng.lognormal(0, 1, n) for n in lengths]
    return [v + shift + 0.1 * rng.standard_normal(len(v)) for v in before], before


def test_difference_and_p_follow_the_definition() -> None:
    """Catches means of prompt means, unpaired errors, and n for n − 1."""
    now, before = draw(1)
    found = pair(now, before)
    everything = np.concatenate(now), np.concatenate(before)
    difference = everything[0].mean() - everything[1].mean()
    assert found.difference == pytest.approx(difference, rel=1e-9)
    assert (found.value, found.baseline) == pytest.approx([v.mean() for v in everything])
    changes = [PromptValues(i, a - b, np.arange(len(a))) for i, (a, b) in enumerate(zip(now, before, strict=True))]  # fmt: skip
    se = clustered_se(changes, float(difference), len(everything[0]))
    assert se is not None
    assert found.p == pytest.approx(two_sided(np.array([difference / se]), 39)[0], rel=1e-9)


def test_p_of_equally_long_prompts_is_the_textbooks() -> None:
    """Catches a clustered error that isn't the paired t test's (scipy.stats.ttest_rel)."""
    now = [np.array([v]) for v in (5.1, 4.8, 6.0, 5.5, 5.9, 6.3, 5.2, 4.9, 5.8, 6.1, 5.0, 5.7)]
    then = [np.array([v]) for v in (4.9, 4.9, 5.6, 5.2, 6.0, 5.9, 5.1, 4.7, 5.9, 5.8, 4.8, 5.4)]
    d = np.concatenate(now) - np.concatenate(then)
    t = d.mean() / (d.std(ddof=1) / math.sqrt(12))
    assert pair(now, then).p == pytest.approx(two_sided(np.array([t]), 11)[0], rel=1e-12)
    assert pair(now, then).p == pytest.approx(0.007722281922549017, rel=1e-9)


def test_the_interval_is_an_independent_bootstrap() -> None:
    """Catches resampled tokens instead of prompts, and a mean of means in each resample."""
    now, before = draw(2, num_prompts=25, shift=0.03)
    found = pair(now, before)
    rng = np.random.default_rng(99)
    changes = [a - b for a, b in zip(now, before, strict=True)]
    drawn = []
    for _ in range(5_000):
        chosen = rng.integers(0, 25, 25)
        drawn.append(sum(changes[i].sum() for i in chosen) / sum(len(changes[i]) for i in chosen))
    tail = NormalDist().cdf(-math.sqrt(25 / 24) * quantile(0.95, 24))
    low, high = np.quantile(drawn, (tail, 1 - tail))
    width = high - low
    assert found.low == pytest.approx(low, abs=0.06 * width)
    assert found.high == pytest.approx(high, abs=0.06 * width)


@pytest.mark.parametrize("num_prompts", [10, 16, 64])
def test_intervals_hold_the_truth_as_often_as_they_say(num_prompts: int) -> None:
    """Catches the plain percentile bootstrap, which is too narrow for few prompts."""
    rng = np.random.default_rng(num_prompts)
    noise = rng.standard_normal((num_prompts, 1000))
    scopes = tuple(Scope(f"layers.{i}") for i in range(1000))
    ones = np.ones_like(noise)
    before, now = PromptSums(scopes, ones, 0 * ones), PromptSums(scopes, ones, noise + 0.3)
    found = list(compare("rel_error", now, before, {}, Resampler("a", "b")))
    held = np.mean([each.low <= 0.3 <= each.high for each in found])
    assert 0.93 < held < 0.97


def test_p_is_uniform_when_nothing_changed() -> None:
    """Catches a test that is too eager far out, where 200 series are decided."""
    rng = np.random.default_rng(7)
    noise = rng.standard_normal((64, 8_000))
    scopes = tuple(Scope(f"layers.{i}") for i in range(8_000))
    n = np.broadcast_to(rng.integers(16, 65, (64, 1)).astype(float), noise.shape)
    before, now = PromptSums(scopes, n, 0 * noise), PromptSums(scopes, n, noise * np.sqrt(n))
    p = np.array([each.p for each in _without_interval(now, before)])
    for level in (0.5, 0.05, 0.01, 0.001):
        assert np.mean(p <= level) == pytest.approx(level, abs=4 * math.sqrt(level / 8_000))


def _without_interval(now: PromptSums, before: PromptSums) -> list[Comparison]:
    """A few resamples are enough where only p is looked at."""

    class Quick(Resampler):
        def counts(self, num_prompts: int) -> NDArray[np.float64]:
            return np.ones((2, num_prompts))

    return list(compare("rel_error", now, before, {}, Quick("a", "b")))


def test_the_same_runs_give_the_same_bits_and_others_do_not() -> None:
    """Catches a verdict that changes when it is computed again."""
    now, before = draw(3)
    assert pair(now, before, runs="xy") == pair(now, before, runs="xy")
    assert pair(now, before, runs="xy").low != pair(now, before, runs="xz").low
    assert Resampler("x").counts(12).sum(1).tolist() == [12.0] * RESAMPLES


# Degenerate cases


def test_equal_runs_are_exactly_equal() -> None:
    """Catches rounding called a change: deterministic models give 0, [0, 0] and p = 1."""
    _, before = draw(4)
    found = pair(before, before, floor=1e-6)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_a_constant_change_is_clear_but_not_beyond_the_noise_floor() -> None:
    """Catches zero variance that makes every change infinite (future-agi#2636)."""
    before = [np.full(4, 1.0) for _ in range(20)]
    now = [v + 1e-6 for v in before]
    assert pair(now, before).p < 1e-12
    assert 0 < pair(now, before).low <= pair(now, before).high
    floored = pair(now, before, floor=1e-5)
    assert floored.p > 0.5
    assert floored.low < 0 < floored.high


@pytest.mark.parametrize("num_prompts", [1, 2, 9])
def test_few_prompts_have_a_range_and_no_q(num_prompts: int) -> None:
    """Catches an interval, or a p, from the spread of nine numbers."""
    now, before = draw(5, num_prompts, shift=0.5)
    found = pair(now, before, floor=0.01)
    means = [float((a - b).mean()) for a, b in zip(now, before, strict=True)]
    assert not found.is_enough
    assert (found.low, found.high) == pytest.approx((min(means) - 0.01, max(means) + 0.01))
    assert (found.p, found.q) == (1, None)


def test_a_prompt_that_one_run_lost_is_named() -> None:
    """Catches a dropped prompt that passes: the mean over the others says nothing of it."""
    now, before = draw(6, 12)
    gone = [*now[:3], np.empty(0), *now[4:]]
    for found in (pair(gone, before), pair(before, gone)):
        assert (found.lost, found.num_prompts) == ((3,), 11)
    nan = [*now[:5], np.where(np.arange(len(now[5])) == 0, np.nan, now[5]), *now[6:]]
    assert pair(nan, before).lost == (5,)


def test_prompts_that_neither_run_measured_are_not_lost() -> None:
    """Catches sampled metrics (isolated errors) called incomplete."""
    now, before = draw(8, 14)
    found = pair([*now, np.empty(0)], [*before, np.empty(0)])
    assert (found.lost, found.num_prompts) == ((), 14)


def test_no_prompt_at_all() -> None:
    """Catches a mean of nothing."""
    nothing = [np.empty(0)] * 3
    found = pair(nothing, nothing)
    assert (found.num_prompts, found.is_enough, found.p) == (0, False, 1)


def test_other_prompts_are_no_pairs() -> None:
    """Catches prompts paired with those of another suite."""
    now, before = draw(9, 12)
    with pytest.raises(ValueError, match="12 prompts against 11"):
        pair(now, before[:-1])


def test_scopes_are_matched_by_name() -> None:
    """Catches layer 1 compared with layer 2 when a tap is missing in one of the runs."""
    n = np.ones((12, 2))
    now = PromptSums((Scope("b"), Scope("a")), n, n * [2, 1])
    before = PromptSums((Scope("a"), Scope("c")), n, n * [1, 3])
    (found,) = compare("rel_error", now, before, {}, Resampler("x"))
    assert (found.scope, found.difference) == ("a", 0)


# Laws

runs = st.integers(0, 10_000)


@given(runs, st.floats(-5, 5), st.floats(0.01, 100))
@settings(max_examples=10)
def test_shifting_and_scaling_both_runs_moves_the_interval_along(
    seed: int, shift: float, scale: float
) -> None:
    """Catches a test that depends on the level or the unit: d → scale·d, p stays."""
    now, before = draw(seed, 15)
    plain = pair(now, before)
    moved = pair([scale * (v + shift) for v in now], [scale * (v + shift) for v in before])
    assert moved.low == pytest.approx(scale * plain.low, rel=1e-6, abs=1e-9 * scale)
    assert moved.high == pytest.approx(scale * plain.high, rel=1e-6, abs=1e-9 * scale)
    assert moved.p == pytest.approx(plain.p, rel=1e-5)


@given(runs, st.floats(-2, 2))
@settings(max_examples=10)
def test_a_shift_of_one_run_shifts_the_interval(seed: int, shift: float) -> None:
    """Catches a bootstrap around 0 instead of around the difference."""
    now, before = draw(seed, 15)
    plain, moved = pair(now, before), pair([v + shift for v in now], before)
    assert moved.low == pytest.approx(plain.low + shift, abs=1e-9)
    assert moved.high == pytest.approx(plain.high + shift, abs=1e-9)


@given(runs)
@settings(max_examples=10)
def test_exchanging_the_runs_mirrors_everything(seed: int) -> None:
    """Catches N26: better and worse judged by different measures."""
    now, before = draw(seed, 15)
    one, other = pair(now, before), pair(before, now)
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low), rel=0.1, abs=0.02)
    assert other.difference == pytest.approx(-one.difference)
    assert other.p == pytest.approx(one.p, rel=1e-9)


@given(runs, st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_the_order_of_prompts_means_nothing(seed: int, random: Any) -> None:
    """Catches prompts paired by place instead of by index, and weights that stay behind."""
    now, before = draw(seed, 20)
    order = list(range(20))
    random.shuffle(order)
    plain, shuffled = pair(now, before), pair([now[i] for i in order], [before[i] for i in order])
    assert shuffled.p == pytest.approx(plain.p, rel=1e-9)
    assert shuffled.difference == pytest.approx(plain.difference)
    assert shuffled.low == pytest.approx(plain.low, rel=0.2, abs=0.02)


# Several runs, and derived numbers


def block(values: Values) -> NDArray[np.float64]:
    return np.stack([partials(v[None, :]) for v in values])


def test_a_rolling_baseline_is_the_mean_of_its_runs() -> None:
    """Catches sums of seven runs against the sum of one."""
    now, before = draw(10, 20)
    other = [v + 0.2 for v in before]
    rolling = PromptSums.over((SCOPE,), [block(before), block(other)])
    (found,) = compare("rel_error", sums(now), rolling, {}, Resampler("a"))
    assert found.baseline == pytest.approx(np.concatenate(before).mean() + 0.1)
    assert found.lost == ()


def evidence(values: Values) -> Any:
    return lambda _: ((SCOPE,), [block(values)])


def test_derived_numbers_are_compared_in_their_own_unit() -> None:
    """Catches nats called a perplexity ratio, and a mean of squares called its root."""
    now, before = draw(11, 20)
    found = compare_candidate(
        ("ppl_ratio", "rms_delta_p", "rel_error"), evidence(now), evidence(before), {}, Resampler("a")
    )  # fmt: skip
    mean = [float(np.concatenate(v).mean()) for v in (now, before)]
    square = [float(np.square(np.concatenate(v)).mean()) for v in (now, before)]
    ratio, rms = found["ppl_ratio", SCOPE], found["rms_delta_p", SCOPE]
    assert (ratio.value, ratio.baseline) == pytest.approx([math.exp(m) for m in mean])
    assert (rms.value, rms.baseline) == pytest.approx([math.sqrt(s) for s in square])
    plain = found["rel_error", SCOPE]
    assert ratio.low == pytest.approx(math.exp(mean[1] + plain.low) - math.exp(mean[1]))
    assert ratio.p == plain.p
    assert ratio.low <= ratio.difference <= ratio.high
    assert rms.low <= rms.difference <= rms.high


def test_what_one_run_did_not_measure_is_not_compared() -> None:
    """Catches a crash on a metric that is new, or whose blocks retention has dropped."""
    now, _ = draw(12, 12)
    assert compare_candidate(["rel_error"], evidence(now), lambda _: None, {}, Resampler()) == {}


def test_averaged_runs(run: Any, row: Any) -> None:
    """Catches the newest run shown as the rolling baseline, and NaN that spoils a mean."""

    def of(run_id: str, kl: float | None, **bad: int) -> Any:
        made = run(run_id=run_id)
        rows = (row("logit_kl", "model", kl, **bad), *made.candidates[0].measurements[1:])
        return replace(made, candidates=(replace(made.candidates[0], measurements=rows),))

    mean = averaged([of("3", 0.3), of("2", 0.1), of("1", 0.9, n_nan=4)])
    kl = mean.candidates[0].measurements[0]
    assert (mean.run_id, kl.n) == ("3", 10)
    assert kl.mean == pytest.approx(0.2)
    broken = averaged([of("3", 0.3, n_nan=1), of("2", 0.1)]).candidates[0].measurements[0]
    assert (broken.mean, broken.n_nan) == (0.3, 1)
