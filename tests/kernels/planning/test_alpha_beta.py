"""Latency and bandwidth from samples: the exact line, whatever a few samples say."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.planning.alpha_beta import (
    GB,
    GIB,
    AlphaBeta,
    Transfer,
    fit_alpha_beta,
)

SIZES = [2**power for power in range(10, 31, 2)]


def cost(samples: list[Transfer], alpha: float, beta: float) -> float:
    return sum(abs(s.seconds - alpha - beta * s.num_bytes) / s.seconds for s in samples)


@pytest.mark.parametrize("outliers", [0, 3])
def test_a_line_is_found_through_outliers(outliers: int) -> None:
    """Catches least squares (the largest copy decides) and means (a hiccup decides)."""
    line = AlphaBeta(12e-6, 1 / (12.89 * GB))
    samples = [Transfer(size, line.seconds(size)) for size in SIZES]
    for index in range(outliers):
        late = samples[3 * index]
        samples[3 * index] = Transfer(late.num_bytes, 10 * late.seconds)
    found = fit_alpha_beta(samples)
    assert found.alpha_s == pytest.approx(12e-6, rel=1e-9)
    assert found.bytes_per_s == pytest.approx(12.89 * GB, rel=1e-9)
    mean_rate = sum(s.num_bytes / s.seconds for s in samples) / len(samples)
    assert mean_rate < 0.7 * found.bytes_per_s


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_no_other_line_is_nearer(seed: int, count: int) -> None:
    """Catches a fit that isn't the minimum: random lines and steps around it are never nearer."""
    rng = random.Random(seed)
    samples = [
        Transfer(2.0**power, rng.uniform(1e-6, 1e-3)) for power in rng.sample(range(30), count)
    ]
    found = fit_alpha_beta(samples)
    least = cost(samples, found.alpha_s, found.beta_s_per_byte)
    assert found.residual == pytest.approx(least / count)
    for _ in range(200):
        alpha = rng.choice([0.0, found.alpha_s * rng.uniform(0.9, 1.1), rng.uniform(0, 1e-3)])
        beta = rng.choice(
            [0.0, found.beta_s_per_byte * rng.uniform(0.9, 1.1), 10 ** rng.uniform(-14, -5)]
        )
        assert cost(samples, alpha, beta) >= least * (1 - 1e-9)


def test_neither_is_ever_negative() -> None:
    """Catches a negative latency where small copies came from a cache."""
    found = fit_alpha_beta([Transfer(1000, 1e-6), Transfer(2000, 4e-6)])
    assert found.alpha_s >= 0
    assert found.beta_s_per_byte > 0
    flat = fit_alpha_beta([Transfer(1000, 2e-6), Transfer(2000, 1e-6)])
    assert flat.beta_s_per_byte == 0
    assert flat.bytes_per_s == math.inf


def test_steps_divide_out() -> None:
    """Catches the latency of one step where a collective pays it six times."""
    line = AlphaBeta(5e-6, 1e-10)
    samples = [
        Transfer(n, line.seconds(n, steps), steps) for n in (1e3, 1e6, 1e9) for steps in (1, 6)
    ]
    found = fit_alpha_beta(samples)
    assert found.alpha_s == pytest.approx(5e-6)
    assert found.beta_s_per_byte == pytest.approx(1e-10)


def test_gb_is_not_gib() -> None:
    """Catches one taken for the other: 7.4 %."""
    assert pytest.approx(1.0737, abs=1e-4) == GIB / GB


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "two sizes"),
        ([Transfer(8, 1.0), Transfer(8, 2.0)], "two sizes"),
        ([Transfer(8, 0.0), Transfer(9, 1.0)], "seconds > 0"),
        ([Transfer(-8, 1.0), Transfer(9, 1.0)], "bytes ≥ 0"),
        ([Transfer(8, math.nan), Transfer(9, 1.0)], "nan"),
        ([Transfer(8, 1.0, 0), Transfer(9, 1.0)], "steps ≥ 1"),
    ],
)
def test_bad_samples(samples: list[Transfer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_alpha_beta(samples)


@pytest.mark.parametrize("pair", [(-1e-6, 1e-9), (1e-6, math.inf), (math.nan, 0.0)])
def test_bad_links(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        AlphaBeta(*pair)
