"""Statistics against formulas written down a second time, with other tools."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch.domain import MODEL, Measurement
from quantwatch.metrics.statistics import PromptValues, partials, summarize

NAN, INF = math.nan, math.inf


def parts_of(*prompts: list[float]) -> list[PromptValues]:
    return [
        PromptValues(i, np.array(values, dtype=np.float64), np.arange(10, 10 + len(values)))
        for i, values in enumerate(prompts)
    ]


def summary(*prompts: list[float], worst: str = "max") -> Measurement:
    return summarize("logit_kl", MODEL, parts_of(*prompts), worst=worst, method="all positions")  # type: ignore[arg-type]


def interpolated(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics, by hand."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


finite = st.floats(-1e3, 1e3, allow_nan=False)
prompts = st.lists(st.lists(finite, min_size=1, max_size=8), min_size=2, max_size=6)


@settings(max_examples=60)
@given(prompts)
def test_every_statistic_equals_its_definition(values: list[list[float]]) -> None:
    """Catches a wrong divisor, a wrong interpolation, or a mean of means instead of a mean."""
    row = summary(*values)
    flat = [x for prompt in values for x in prompt]
    mean = statistics.fmean(flat)
    residuals = [math.fsum(x - mean for x in prompt) for prompt in values]
    groups = len(values)
    se = math.sqrt(groups / (groups - 1) * math.fsum(r * r for r in residuals)) / len(flat)

    assert row.n == len(flat)
    assert row.mean == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert row.std == pytest.approx(statistics.stdev(flat), rel=1e-9, abs=1e-12)
    assert row.se == pytest.approx(se, rel=1e-9, abs=1e-10)
    assert row.p50 == pytest.approx(interpolated(flat, 0.5), rel=1e-12, abs=1e-12)
    assert row.p999 == pytest.approx(interpolated(flat, 0.999), rel=1e-12, abs=1e-12)
    assert (row.min, row.max) == (min(flat), max(flat))


@pytest.mark.parametrize(
    ("values", "worst", "place"),
    [
        pytest.param(([1.0, 5.0], [3.0]), "max", (0, 11), id="largest"),
        pytest.param(([1.0, 5.0], [0.5]), "min", (1, 10), id="smallest-where-higher-is-better"),
        pytest.param(([1.0, 5.0], [2.0, NAN]), "max", (1, 11), id="nan-before-any-number"),
        pytest.param(([1.0, INF], [2.0, NAN]), "max", (0, 11), id="first-non-finite"),
        pytest.param(([INF, 40.0], [INF]), "min", (0, 11), id="good-infinity-is-no-trouble"),
        pytest.param(([4.0, 4.0], [4.0]), "max", (0, 10), id="first-of-equals"),
    ],
)
def test_where_names_the_worst_value(
    values: tuple[list[float], ...], worst: str, place: tuple[int, int]
) -> None:
    """Catches `max([nan, 1])` orderings and a location that ignores prompt order."""
    row = summary(*values, worst=worst)
    assert (row.max_prompt, row.max_position) == place


def test_one_bad_token_does_not_poison_the_others() -> None:
    """Catches a NaN that spreads into the mean, or that is dropped without a count."""
    row = summary([1.0, NAN, 3.0], [INF, -INF, 5.0])
    assert (row.n, row.n_nan, row.n_posinf, row.n_neginf) == (6, 1, 1, 1)
    assert row.num_nonfinite == 3
    assert row.mean == 3.0
    assert row.max == 5.0


def test_statistics_are_null_only_when_nothing_finite_is_left() -> None:
    """Catches a 0 that stands for 'not measurable'."""
    row = summary([NAN], [INF])
    assert row.mean is row.std is row.se is row.p50 is row.max is row.min is None


@pytest.mark.parametrize("values", [([1.0, 2.0, 3.0],), ([1.0], [NAN])], ids=["one", "one-finite"])
def test_one_prompt_has_no_clustered_error(values: tuple[list[float], ...]) -> None:
    """Catches inspect_ai's 0.0 for too little data."""
    assert summary(*values).se is None


def test_equal_values_have_exactly_no_spread() -> None:
    """Catches rounding noise on bit-equal models."""
    row = summary([0.0] * 7, [0.0] * 3)
    assert (row.mean, row.std, row.se, row.max) == (0.0, 0.0, 0.0, 0.0)


def test_partials_skip_non_finite_values() -> None:
    """Catches paired tests fed with NaN sums."""
    rows = partials(np.array([[1.0, NAN, 3.0], [NAN, NAN, INF]]))
    np.testing.assert_array_equal(rows[0], [2, 4, 10, 3])
    np.testing.assert_array_equal(rows[1], [0, 0, 0, NAN])
