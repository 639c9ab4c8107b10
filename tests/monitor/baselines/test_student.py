"""Student's t against printed tables, a numeric integral, and the laws it has to keep."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.baselines.student import quantile, two_sided

TABLE = [
    # degrees of freedom, level, t: printed tables, and scipy 1.17's t.ppf to the last digit
    (1, 0.95, 12.706204736432095),
    (4, 0.95, 2.7764451051977987),
    (9, 0.95, 2.2621571627409915),
    (9, 0.99, 3.2498355440153697),
    (30, 0.95, 2.0422724563012373),
    (127, 0.95, 1.9788195347028539),
    (1000, 0.95, 1.9623390808264078),
]


@pytest.mark.parametrize(("freedom", "level", "t"), TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int, level: float, t: float) -> None:
    """Catches one-sided quantiles taken for two-sided ones, and n for n − 1."""
    assert quantile(level, freedom) == pytest.approx(t, rel=1e-7)
    assert two_sided(np.array([t]), freedom)[0] == pytest.approx(1 - level, rel=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 9, 15, 64, 500])
@pytest.mark.parametrize("t", [0.1, 1.0, 3.0, 6.0, 12.0])
def test_tails_equal_the_integral_of_the_density(freedom: int, t: float) -> None:
    """Catches a series that loses its digits far out, where false discoveries are decided."""
    # With x = √ν·tan θ the density is cos(θ)^(ν − 1), up to its constant: Simpson's rule.
    steps = 200_000
    angle = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, steps + 1)
    weights = np.ones_like(angle)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    values = np.clip(np.cos(angle), 0, None) ** (freedom - 1)
    integral = float((weights * values).sum()) * (angle[1] - angle[0]) / 3
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    expected = 2 * integral * scale / math.sqrt(math.pi)
    assert two_sided(np.array([t]), freedom)[0] == pytest.approx(expected, rel=1e-8)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 2000))
def test_a_larger_t_is_never_likelier(one: float, other: float, freedom: int) -> None:
    """Catches the two halves of the continued fraction that don't meet, and p outside [0, 1]."""
    small, large = two_sided(np.array(sorted((one, other))), freedom)
    assert 0 <= large <= small * (1 + 1e-12)
    assert small <= 1


def test_no_difference_has_p_1() -> None:
    """Catches 0/0 at t = 0."""
    assert two_sided(np.zeros(2), 9).tolist() == [1.0, 1.0]
