"""The Pareto search against brute force, intervals and exact KV bytes."""

from itertools import pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.planning.kv_bytes import KVPages
from quantwatch_kernels.planning.pareto import (
    Point,
    dominates,
    epsilon_front,
    fronts,
    measured_point,
    median_interval,
    surely_beaten,
)

# Few different values, so that ties and equal vectors are common.
VECTORS = st.lists(st.tuples(*[st.integers(-3, 3).map(float)] * 3), max_size=25)
PAGES = KVPages(layers=30, kv_heads=3, head_dim=64)


def brute_force_fronts(vectors: list[tuple[float, ...]]) -> list[int]:
    """Peel: compare every pair, take what nothing beats, go on with the rest."""
    ranks, left, rank = [-1] * len(vectors), set(range(len(vectors))), 0
    while left:
        best = {
            i
            for i in left
            if not any(
                all(x >= y for x, y in zip(vectors[j], vectors[i], strict=True))
                and vectors[j] != vectors[i]
                for j in left
            )
        }
        for i in best:
            ranks[i] = rank
        left, rank = left - best, rank + 1
    return ranks


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(VECTORS)
def test_fronts_are_those_of_brute_force(vectors: list[tuple[float, ...]]) -> None:
    assert fronts(vectors) == brute_force_fronts(vectors)


@settings(max_examples=80, deadline=None)
@given(VECTORS, st.sampled_from([0.0, 0.1, 0.5]))
def test_epsilon_front_covers_everything(vectors: list[tuple[float, ...]], epsilon: float) -> None:
    """Catches a subset off the front, one that leaves a point uncovered, and a superfluous tie."""
    kept, ranks = epsilon_front(vectors, epsilon), fronts(vectors)
    assert all(ranks[i] == 0 for i in kept)
    assert len({vectors[i] for i in kept}) == len(kept)
    for point in vectors:
        slack = [x - epsilon * abs(x) for x in point]
        assert any(all(a >= b for a, b in zip(vectors[i], slack, strict=True)) for i in kept)


@pytest.mark.parametrize(
    ("name", "vectors", "expected"),
    [
        ("equal in two, worse in memory", [(9.0, -1.0, -4.0), (9.0, -1.0, -5.0)], [0, 1]),
        ("equal in all: both stay", [(9.0, -1.0), (9.0, -1.0)], [0, 0]),
        ("a trade", [(9.0, -2.0), (8.0, -1.0)], [0, 0]),
        ("a chain", [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], [2, 1, 0]),
        ("none", [], []),
    ],
)
def test_ties(name: str, vectors: list[tuple[float, ...]], expected: list[int]) -> None:
    """Catches dominated points that are kept because something is equal."""
    assert fronts(vectors) == expected


def test_dominance_is_a_strict_order() -> None:
    assert dominates((1.0, 2.0), (1.0, 1.0))
    assert not dominates((1.0, 2.0), (1.0, 2.0))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        dominates((1.0,), (1.0, 2.0))


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (20, 6), (51, 19)])
def test_interval_is_exact(n: int, k: int) -> None:
    """Catches an end too far in: the coverage by the binomial, summed here, and the next one's."""
    interval = median_interval([float(value) for value in range(n, 0, -1)])
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.value == (n + 1) / 2
    covered, next_in = (1 - 2 * sum(comb(n, i) for i in range(end)) / 2**n for end in (k, k + 1))
    assert covered >= 0.95 > next_in


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_repeats(count: int) -> None:
    """Catches a single run that passes for a measurement."""
    with pytest.raises(ValueError, match=f"{count} repeats"):
        median_interval([1.0] * count)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_latency(bad: float) -> None:
    with pytest.raises(ValueError, match="positive seconds"):
        median_interval([1.0] * 9 + [bad])


def test_kv_bytes_of_smollm2() -> None:
    """bfloat16: 2 · 30 layers · 3 heads · 64 · 2 bytes = 23,040 a token, in whole pages of 16."""
    assert PAGES.num_bytes(1, 16) == 16 * 23_040
    assert PAGES.num_bytes(1, 17) == 32 * 23_040
    assert PAGES.num_bytes(4, 512) == 4 * 512 * 23_040


def test_kv_bytes_count_scales_zeros_and_alignment() -> None:
    """int4 with 16-bit scales and 4-bit zeros: 1536 + 96→128 + 24→64 bytes a page, plane by plane."""
    int4 = KVPages(30, 3, 64, bits=4, scale_bits=16, zero_bits=4)
    assert int4.page_bytes() == 2 * 30 * (1536 + 128 + 64)
    exact = KVPages(30, 3, 64, bits=4, scale_bits=16, zero_bits=4, alignment=1)
    assert exact.page_bytes() == 2 * 30 * (1536 + 96 + 24)
    assert KVPages(1, 1, 3, bits=3, page_tokens=1, alignment=1).page_bytes() == 2 * 2


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9))
def test_kv_bytes_waste_less_than_a_page(length: int, batch: int) -> None:
    per_token = PAGES.page_bytes() // 16
    waste = PAGES.num_bytes(batch, length) - batch * length * per_token
    assert 0 <= waste < batch * PAGES.page_bytes()


def test_throughput_and_latency_share_their_interval() -> None:
    """Catches ends swapped: the slowest run is the lowest throughput."""
    point = measured_point((4, 100), [0.1, 0.2, 0.2, 0.2, 0.2, 0.4], 4, PAGES)
    assert point.throughput == pytest.approx((10, 20, 40))
    assert point.latency_s == pytest.approx((0.1, 0.2, 0.4))
    assert point.gains(end="good") == pytest.approx((40, -0.1, -point.kv_bytes))
    assert point.gains(end="bad", length_counts=True) == pytest.approx(
        (10, -0.4, -point.kv_bytes, 100)
    )


def _point(batch: int, seconds: float, noise: float) -> Point:
    repeats = [seconds * (1 + noise * step / 5) for step in (-5, -2, -1, 1, 2, 5)]
    return measured_point((batch, 64), repeats, 4, PAGES)


def test_only_beyond_noise_is_sure() -> None:
    """Catches a winner called within the repeats' spread."""
    near = [_point(1, 1.0, 0.1), _point(1, 1.05, 0.1)]
    assert fronts([p.gains() for p in near]) == [0, 1]
    assert surely_beaten(near) == [False, False]
    far = [_point(1, 1.0, 0.1), _point(1, 1.5, 0.1)]
    assert surely_beaten(far) == [False, True]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.5, 2), st.floats(0, 0.3)), max_size=8))
def test_what_is_surely_beaten_is_on_no_front(drawn: list[tuple[int, float, float]]) -> None:
    points = [_point(*each) for each in drawn]
    ranks = fronts([p.gains() for p in points])
    assert all(
        rank > 0 for rank, beaten in zip(ranks, surely_beaten(points), strict=True) if beaten
    )


def test_length_as_a_goal_keeps_longer_contexts() -> None:
    points = [measured_point((1, n), [0.1 * n] * 6, 1, PAGES) for n in (16, 32, 64)]
    assert fronts([p.gains() for p in points]) == [0, 1, 2]
    assert fronts([p.gains(length_counts=True) for p in points]) == [0, 0, 0]
    lengths = [
        points[i].length for i in epsilon_front([p.gains(length_counts=True) for p in points], 0.4)
    ]
    assert all(a < b for a, b in pairwise(lengths))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "layers"),
        ({"bits": 1}, "2 … 32"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"zero_bits": -1}, "0 or more"),
    ],
)
def test_bad_pages(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVPages(**{"layers": 1, "kv_heads": 1, "head_dim": 8, **changes})


def test_bad_shapes_and_epsilon() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured_point((0, 4), [1.0] * 6, 1, PAGES)
    with pytest.raises(ValueError, match="epsilon"):
        epsilon_front([(1.0,)], 1.0)
