"""KL by position: every position in one range, means and errors against a plain computation."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.domain import (
    MODEL,
    Observation,
    PositionRange,
    Prompt,
    Scope,
    Suite,
    TokenMatrix,
    ranges_of,
)
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.by_position import by_position, edges
from quantwatch.metrics.statistics import PromptValues


def part(prompt: int, values: list[float], first: int = 0) -> PromptValues:
    return PromptValues(prompt, np.array(values), np.arange(first, first + len(values)))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [0, 16]),
        (16, [0, 16]),
        (17, [0, 16, 32]),
        (8192, [0, *(16 << k for k in range(10))]),
        (32768, [0, *(16 << k for k in range(12))]),
    ],
)
def test_ranges_double(length: int, expected: list[int]) -> None:
    """Catches a last range that a length on the edge doubles for nothing, or one that is missing."""
    assert edges(length) == expected


@given(st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=90), min_size=1, max_size=4))
def test_every_position_is_in_one_range(prompts: list[list[float]]) -> None:
    """Catches tokens at an edge that are lost or counted twice."""
    found = list(by_position("logit_kl", [part(n, v) for n, v in enumerate(prompts)]))
    everything = [value for values in prompts for value in values]
    assert sum(each.n for each in found) == len(everything)
    total = math.fsum(each.n * (each.mean or 0.0) for each in found)
    assert total == pytest.approx(math.fsum(everything), rel=1e-12, abs=1e-12)
    assert all(a.last + 1 == b.first for a, b in pairwise(found))


def test_mean_and_error_of_a_range() -> None:
    """Catches errors as if tokens of one prompt were independent, or prompts that don't reach."""
    long, short = [1.0] * 16 + [2.0, 4.0], [3.0] * 16
    first, second = by_position("logit_kl", [part(0, long), part(1, short)])
    assert first.se == pytest.approx(1.0)  # r = ±16: √(2 · (16² + 16²)) ÷ 32
    assert first == PositionRange("logit_kl", 0, 15, 32, 0, 2.0, first.se)
    assert second == PositionRange("logit_kl", 16, 31, 2, 0, 3.0, None)


def test_nonfinite_values_are_counted_and_left_out() -> None:
    """Catches a NaN that spoils its range, and one that vanishes."""
    (found,) = by_position("logit_kl", [part(0, [1.0, math.nan, 3.0, math.inf])])
    assert (found.n, found.num_nonfinite, found.mean) == (4, 2, 2.0)
    (none,) = by_position("logit_kl", [part(0, [math.nan])])
    assert (none.n, none.num_nonfinite, none.mean, none.se) == (1, 1, None, None)
    assert list(by_position("logit_kl", [])) == []


def test_scored_positions_may_begin_late() -> None:
    """Catches positions counted from the first scored one: ranges without any are left out."""
    (found,) = by_position("logit_kl", [part(0, [5.0, 7.0], first=40)])
    assert (found.first, found.last, found.mean) == (32, 63, 6.0)


def test_the_sink_tells_output_and_lens(tmp_path: Path) -> None:
    """Catches worst positions in a mean, and layers that are added instead of averaged."""
    layers = (Scope("layers.0"), Scope("layers.1"))
    suite = Suite("s", "h", (Prompt(0, "c", "t", tuple(range(20)), (), score_start=4),))
    kl = TokenMatrix("logit_kl", (MODEL,), np.arange(16.0)[None])
    lens = TokenMatrix("lens_kl", layers, np.array([[1.0, 2.0], [3.0, 6.0]]), np.array([4, 19]))
    worst = TokenMatrix("lens_kl", layers, np.full((2, 1), 99.0), np.array([7]), "extra")
    with Aggregator(suite, tmp_path) as sink:
        sink.observe(Observation("c", 0, (kl, lens, worst)))
        found = list(sink.by_position("c"))
        assert list(sink.by_position("another")) == []
    assert [(r.metric, r.first, r.n, r.mean) for r in found] == [
        ("logit_kl", 0, 12, 5.5),
        ("logit_kl", 16, 4, 13.5),
        ("lens_kl", 0, 1, 2.0),
        ("lens_kl", 16, 1, 4.0),
    ]


def test_runs_from_before_have_none() -> None:
    """Catches a page that fails on an old run."""
    assert ranges_of({}, "c") == ()
    assert ranges_of({"by_position": {"other": []}}, "c") == ()
