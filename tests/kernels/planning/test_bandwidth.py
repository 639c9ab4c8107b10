"""Bottleneck: above 82 % of the measured peak in five consecutive samples, and nothing else."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.planning.bandwidth import (
    Rule,
    Sample,
    bottlenecks,
    measured_peak,
    utilisation,
)

PEAK = 1000.0


def row(shares: list[float], times: list[float] | None = None) -> list[Sample]:
    times = [float(i) for i in range(len(shares))] if times is None else times
    return [Sample(at, share * PEAK, 1.0) for at, share in zip(times, shares, strict=True)]


@pytest.mark.parametrize(
    ("name", "shares", "expected"),
    [
        ("four", [0.9] * 4, []),
        ("five", [0.9] * 5, [(0, 4)]),
        ("exactly 82 % is not above", [0.82] * 9, []),
        ("just above", [0.8201] * 5, [(0, 4)]),
        ("broken by one", [0.9] * 4 + [0.8] + [0.9] * 4, []),
        ("two of them", [0.9] * 5 + [0.1] + [0.9] * 6, [(0, 4), (6, 11)]),
        ("a mean above isn't enough", [1.0, 0.7] * 6, []),
        ("at the end", [0.1, 0.1, *[0.9] * 5], [(2, 6)]),
        ("none", [], []),
    ],
)
def test_rows(name: str, shares: list[float], expected: list[tuple[int, int]]) -> None:
    assert [(e.first, e.last) for e in bottlenecks(row(shares), PEAK)] == expected


def test_a_pause_ends_a_row() -> None:
    """Catches samples of yesterday that count as consecutive."""
    times = [0.0, 1.0, 2.0, 50.0, 51.0, 52.0, 53.0]
    assert bottlenecks(row([0.9] * 7, times), PEAK) == []
    (episode,) = bottlenecks(row([0.9] * 8, [*times, 54.0]), PEAK)
    assert (episode.first, episode.last, episode.samples) == (3, 7, 5)


def test_what_is_told() -> None:
    (episode,) = bottlenecks(row([0.1, 0.85, 0.9, 0.95, 1.0, 0.9, 0.2]), PEAK)
    assert episode.mean == pytest.approx(0.92)
    assert episode.highest == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.5, 0.82, 0.83, 1.0]), max_size=30), st.integers(1, 6))
def test_rows_are_those_of_grouping(shares: list[float], samples: int) -> None:
    """The independent way: runs of equal answers to "above?"."""
    expected, at = [], 0
    for above, members in groupby(share * PEAK / 1.0 / PEAK > 0.82 for share in shares):
        length = len(list(members))
        if above and length >= samples:
            expected.append((at, at + length - 1))
        at += length
    found = bottlenecks(row(shares), PEAK, Rule(samples=samples))
    assert [(e.first, e.last) for e in found] == expected


def test_the_peak_is_a_median_of_one_size() -> None:
    """Catches a lucky copy and a mean over small ones."""
    small = [(1e3, 1e-5)] * 5
    large = [(1e9, 0.1), (1e9, 0.1), (1e9, 0.125), (1e9, 0.001)]
    assert measured_peak(small + large) == pytest.approx(1e10)
    assert measured_peak([*small, (1e9, 1e-3)]) == pytest.approx(1e8)


@pytest.mark.parametrize("copies", [[], [(1e9, 0.1)] * 2, [(1e9, 0.1), (2e9, 0.1), (3e9, 0.1)]])
def test_no_peak(copies: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="three copies"):
        measured_peak(copies)


@pytest.mark.parametrize(
    ("samples", "peak", "words"),
    [
        (row([1.2]), PEAK, "sample 0 moves 120%"),
        ([Sample(0.0, float("nan"), 1.0)], PEAK, "sample 0"),
        ([Sample(0.0, 1.0, 0.0)], PEAK, "sample 0"),
        (row([0.5, 0.5], [1.0, 1.0]), PEAK, "not later"),
        (row([0.5]), 0.0, "peak must be positive"),
        (row([0.5]), float("inf"), "peak must be positive"),
    ],
)
def test_bad_input(samples: list[Sample], peak: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        utilisation(samples, peak)


@pytest.mark.parametrize("rule", [{"above": 0.0}, {"above": 1.0}, {"samples": 0}])
def test_bad_rules(rule: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 … 1"):
        Rule(**rule)  # type: ignore[arg-type]


def test_bad_copies() -> None:
    with pytest.raises(ValueError, match="positive bytes"):
        measured_peak([(1e9, 0.0)] * 3)
