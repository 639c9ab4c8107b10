"""The minimum detectable effect: its arithmetic, and whether nights find it as often as it says."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch.alerts.changes import Finding, weigh
from quantwatch.baselines.decision import established
from quantwatch.baselines.paired import PromptSums, Resampler, compare
from quantwatch.baselines.power import POWER, fixed_effort, paired_effort
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Comparison, Scope

# Student's t from tables: (freedom, one-sided 97.5 %, 95 %, 80 %, 99.95 %).
T_TABLE = [
    (9, 2.262157, 1.833113, 0.883404, 4.780913),
    (30, 2.042272, 1.697261, 0.853767, 3.645959),
]


@pytest.mark.parametrize(("freedom", "t975", "t95", "t80", "t9995"), T_TABLE, ids=["G=10", "G=31"])
def test_the_formula(freedom: int, t975: float, t95: float, t80: float, t9995: float) -> None:
    """Catches a two-sided quantile in place of a one-sided one, and G degrees of freedom."""
    alone = paired_effort(0.5, 0.1, freedom + 1)
    assert t95 < t975  # alone among itself, the interval asks for more
    assert alone.limit == pytest.approx(0.5 + t975 * 0.1, rel=1e-6)
    assert alone.change == pytest.approx(0.5 + (t975 + t80) * 0.1, rel=1e-6)
    # One among a hundred at 5 %: 0.05 % one-sided, measured from 0 and not from what is allowed.
    many = paired_effort(0.01, 0.1, freedom + 1, num_judged=100)
    assert many.limit == pytest.approx(t9995 * 0.1, rel=1e-6)
    assert many.change == pytest.approx((t9995 + t80) * 0.1, rel=1e-6)


def test_a_fixed_limit() -> None:
    """Catches a breached limit that takes a negative change, and noise that makes it easier."""
    assert fixed_effort(0.15, 0.0) == 0.15
    assert fixed_effort(0.15, 0.01) == pytest.approx(0.15 + 0.8416212 * 0.01, rel=1e-6)
    assert fixed_effort(-3.0, 0.01) == 0.0


@pytest.mark.parametrize(
    "given_",
    [
        {"num_prompts": 1}, {"num_judged": 0}, {"se": -1.0}, {"se": math.nan}, {"allowed": -1e-9},
        {"rate": 0.0}, {"rate": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_bad_input(given_: dict[str, float]) -> None:
    """Catches a number that comes of nothing."""
    with pytest.raises(ValueError, match="allowed"):
        paired_effort(**{"allowed": 0.1, "se": 0.1, "num_prompts": 20, **given_})  # type: ignore[arg-type]


numbers = st.floats(1e-6, 10)


@settings(max_examples=20)
@given(numbers, numbers, st.sampled_from([10, 24, 500]), st.sampled_from([1, 30, 300]))
def test_laws(allowed: float, se: float, num_prompts: int, num_judged: int) -> None:
    """Catches an effort that falls with noise or with company, and one below the limit."""
    effort = paired_effort(allowed, se, num_prompts, num_judged)
    assert allowed < effort.limit < effort.change
    assert paired_effort(allowed, 2 * se, num_prompts, num_judged).change > effort.change
    assert paired_effort(allowed, se, num_prompts, num_judged + 100).change >= effort.change
    scaled = paired_effort(8 * allowed, 8 * se, num_prompts, num_judged).change
    assert scaled == pytest.approx(8 * effort.change, rel=1e-9)


NIGHTS, PROMPTS, JUDGED = 500, 24, 30
RULE = RuleConfig(name="r", metric="isolated_error", kind="baseline", scope="*", min_effect=0.01)


def nights(change: float, spread: float, seed: int) -> list[Comparison]:
    """Simulate as many nights as there are columns: the same prompts, noise of its own each."""
    draws = np.random.default_rng(seed)
    tokens = draws.integers(10, 60, size=PROMPTS)[:, None]
    n = np.broadcast_to(tokens, (PROMPTS, NIGHTS)).astype(np.float64)
    before = draws.normal(1.0, 0.3, size=(PROMPTS, NIGHTS))
    moved = change + spread * draws.standard_normal((PROMPTS, NIGHTS))
    scopes = tuple(Scope(f"layers.{night}") for night in range(NIGHTS))
    sides = PromptSums(scopes, n, n * (before + moved)), PromptSums(scopes, n, n * before)
    return list(compare("isolated_error", *sides, {}, Resampler("a", "b")))


def share_found(found: list[Comparison]) -> float:
    """Decide each night among 29 series that have not changed, as a run does."""
    breaches = 0
    for each in found:
        same = replace(each, value=each.baseline, p=1.0)
        family = {("c", "m", f"s{i}"): same for i in range(JUDGED - 1)}
        decided = established({**family, ("c", "m", "it"): each})["c", "m", "it"]
        breaches += weigh(RULE, decided, {}).finding is Finding.BREACH
    return breaches / len(found)


@pytest.mark.parametrize("spread", [0.002, 0.02, 0.2], ids=["allowed decides", "both", "noise"])
def test_so_many_nights_find_it(spread: float) -> None:
    """Catches an effect that is said to be found in 80 % of nights and is found in 50 %.

    Within 2.8 standard errors of 500 draws, with what a bootstrap's percentiles differ from t.
    """
    quiet = nights(0.0, spread, seed=1)
    assert share_found(quiet) <= 0.01
    se = math.sqrt(np.mean([each.se**2 for each in quiet]))
    effort = paired_effort(RULE.min_effect or 0.0, se, PROMPTS, JUDGED)
    assert share_found(nights(effort.change, spread, seed=2)) == pytest.approx(POWER, abs=0.05)
    assert share_found(nights(effort.limit, spread, seed=3)) == pytest.approx(0.5, abs=0.06)
    assert share_found(nights(1.5 * effort.change, spread, seed=4)) > 0.88


def test_equal_prompts_have_an_error_to_reckon_with() -> None:
    """Catches a night that changed nothing and so would have found the smallest change."""
    n = np.full((12, 1), 9.0)
    scopes = (Scope("model"),)
    sums = PromptSums(scopes, n, n * 0.25)
    (same,) = compare("logit_kl", sums, sums, {("logit_kl", "model"): 0.06}, Resampler("a"))
    assert (same.low, same.high, same.p, same.handicap) == (0.0, 0.0, 1.0, 0.0)
    assert same.se == pytest.approx(0.06 / math.sqrt(12))
