"""The best of many runs is lucky: by how much, and what a rule makes of it."""

import math

import numpy as np
import pytest

from quantwatch.alerts.changes import Finding, weigh
from quantwatch.baselines.decision import Key, established
from quantwatch.baselines.paired import Matrix, PromptSums, Resampler, compare
from quantwatch.baselines.series import compare_candidate
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Comparison, Scope

MODEL = Scope("model")
RULE = RuleConfig(name="kl", metric="logit_kl", kind="baseline", min_effect=1e-12)
KEY: Key = ("c", "logit_kl", MODEL)
NUM_PROMPTS = 24


def measure(rng: np.random.Generator) -> Matrix:
    """One token per prompt of a run in which nothing has changed."""
    values = 1 + rng.standard_normal(NUM_PROMPTS)
    return np.stack([np.ones_like(values), values, values**2, values], -1)[:, None]


def mean(run: Matrix) -> float:
    return float(run[..., 1].mean())


def against(best: Matrix, chosen_from: int, *now: Matrix, name: str = "") -> Comparison:
    ours, theirs = PromptSums.over((MODEL,), now), PromptSums.over((MODEL,), [best])
    (found,) = compare("logit_kl", ours, theirs, {}, Resampler(name), chosen_from)
    return found


@pytest.mark.parametrize("pooled", [1, 2], ids=["a night", "with its confirmation"])
@pytest.mark.parametrize("count", [2, 20, 60])
def test_the_handicap_is_how_lucky_the_best_is(count: int, pooled: int) -> None:
    """Catches the minimum of many noisy runs tested as if it were any run, and luck that is
    mistaken by √2, or by the number of runs that are pooled.
    """
    rng = np.random.default_rng(count)
    found = []
    for _ in range(200):
        best = min((measure(rng) for _ in range(count)), key=mean)
        found.append(against(best, count, *(measure(rng) for _ in range(pooled))))
    differences = [each.difference for each in found]
    error = float(np.std(differences)) / math.sqrt(len(found))
    assert np.mean(differences) == pytest.approx(
        np.mean([each.handicap for each in found]), abs=4 * error
    )


def test_what_was_not_chosen_has_no_handicap() -> None:
    """Catches a pinned or rolling baseline that forgives too much."""
    rng = np.random.default_rng(0)
    assert against(measure(rng), 1, measure(rng)).handicap == 0
    same = measure(rng)
    assert against(same, 60, same).handicap == 0


def test_a_derived_number_has_its_handicap_in_its_own_unit() -> None:
    """Catches a perplexity ratio that is forgiven nats."""
    rng = np.random.default_rng(1)
    now, best = measure(rng), measure(rng)
    found = compare_candidate(
        ["nll_difference", "ppl_ratio"], lambda _: ((MODEL,), [now]), lambda _: ((MODEL,), [best]),
        {}, Resampler("x"), 30,
    )  # fmt: skip
    nats, ratio = found["nll_difference", MODEL], found["ppl_ratio", MODEL]
    assert ratio.handicap == pytest.approx(ratio.baseline * math.expm1(nats.handicap))


def false_alerts(seed: int, *, knows: bool, nights: int = 60) -> int:
    """Return how many nights are confirmed as worse than the best so far; nothing ever changes."""
    rng = np.random.default_rng(seed)
    runs, fired = [measure(rng)], 0
    for night in range(nights):
        best, count = min(runs, key=mean), len(runs) if knows else 1
        first, name = measure(rng), f"{seed}-{night}"
        runs.append(first)
        alone = against(best, count, first, name=name)
        if not is_worse(established({KEY: alone})[KEY]):
            continue
        runs.append(second := measure(rng))
        own = {KEY: against(best, count, second, name=name)}
        both = against(best, count, second, first, name=name)
        fired += is_worse(established({KEY: both}, own)[KEY])
    return fired


def is_worse(comparison: Comparison) -> bool:
    return weigh(RULE, comparison, {}).finding is Finding.BREACH


@pytest.mark.slow
def test_nights_like_all_others_are_quiet_against_the_best_of_them() -> None:
    """Catches the winner's curse: several false alerts in 60 nights of one series."""
    assert max(false_alerts(seed, knows=True) for seed in range(5)) <= 1
    assert np.mean([false_alerts(seed, knows=False) for seed in range(3)]) > 2
