"""Which batch × length to serve: throughput against latency against KV memory, with intervals.

A sample is the latency of one call (a decode step, or a prefill) at a batch and a context length.
Repeats give a median and an exact interval for it from order statistics: [x₍ₖ₎, x₍ₙ₊₁₋ₖ₎] covers
the median with probability 1 − 2·P(Bin(n, ½) < k), whatever the noise's shape. Six repeats are the
fewest that reach 95 %; a single run is refused. KV bytes are counted (`kv_bytes`), not estimated.

a dominates b if it is nowhere worse and somewhere better; equal vectors don't dominate each other
and stay together. Fronts are built by a sequential search in lexicographic order, where no later
point can dominate an earlier one. `certain` uses the intervals: b is beaten beyond noise if a's
bad end is not worse than b's good end, everywhere, and better somewhere. Repeats of one session
only: what differs from day to day is not in the interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, isfinite
from statistics import median
from typing import NamedTuple

from quantwatch_kernels.planning.kv_bytes import KVPages

__all__ = ["Interval", "Point", "dominates", "epsilon_front", "fronts", "measured_point",
           "median_interval", "surely_beaten"]  # fmt: skip


class Interval(NamedTuple):
    """A value between a low and a high end."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """A measured choice. Tokens per second up, seconds and bytes down; length up if it counts."""

    batch: int
    length: int
    throughput: Interval
    latency_s: Interval
    kv_bytes: int

    def gains(self, *, length_counts: bool = False, end: str = "value") -> tuple[float, ...]:
        """Return what is to be large, at the medians or at the "good" or "bad" ends."""
        fast = {"value": (1, 1), "good": (2, 0), "bad": (0, 2)}[end]
        tail = (float(self.length),) if length_counts else ()
        memory = float(-self.kv_bytes)
        return (self.throughput[fast[0]], -self.latency_s[fast[1]], memory, *tail)


def median_interval(values: Sequence[float], coverage: float = 0.95) -> Interval:
    """Return the median of repeats and its interval. Raises ValueError for too few of them."""
    if bad := [value for value in values if not (isfinite(value) and value > 0)]:
        raise ValueError(f"latencies must be positive seconds; one is {bad[0]!r}.")
    n, tail, k = len(values), 0.0, 0
    while k < n and 1 - 2 * (tail + comb(n, k) / 2**n) >= coverage:
        tail += comb(n, k) / 2**n
        k += 1
    if k == 0:
        raise ValueError(
            f"{n} repeats give no {coverage:.0%} interval of a median; 95 % needs 6 or more."
        )
    ordered = sorted(values)
    return Interval(ordered[k - 1], median(ordered), ordered[n - k])


def measured_point(
    shape: tuple[int, int], seconds: Sequence[float], tokens: int, pages: KVPages
) -> Point:
    """Return the point of (batch, length) whose call handled `tokens` tokens in all."""
    batch, length = shape
    if batch < 1 or length < 1 or tokens < 1:
        raise ValueError(f"batch, length and tokens must be at least 1: {shape}, {tokens}.")
    took = median_interval(seconds)
    rate = Interval(tokens / took.high, tokens / took.value, tokens / took.low)
    return Point(batch, length, rate, took, pages.num_bytes(batch, length))


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Say whether a is nowhere smaller than b and somewhere larger."""
    pairs = list(zip(a, b, strict=True))
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def fronts(vectors: Sequence[Sequence[float]]) -> list[int]:
    """Return each vector's front: 0 is dominated by none, 1 only by those of 0, and so on."""
    order = sorted(range(len(vectors)), key=lambda i: tuple(vectors[i]), reverse=True)
    ranks, found = [0] * len(vectors), list[list[int]]()
    for i in order:
        rank = 0
        while rank < len(found) and any(dominates(vectors[j], vectors[i]) for j in found[rank]):
            rank += 1
        if rank == len(found):
            found.append([])
        found[rank].append(i)
        ranks[i] = rank
    return ranks


def surely_beaten(points: Sequence[Point], *, length_counts: bool = False) -> list[bool]:
    """Say of each point whether another one is better beyond both intervals."""
    bad, good = (
        [p.gains(length_counts=length_counts, end=e) for p in points] for e in ("bad", "good")
    )
    return [any(dominates(b, g) for j, b in enumerate(bad) if j != i) for i, g in enumerate(good)]


def epsilon_front(vectors: Sequence[Sequence[float]], epsilon: float) -> list[int]:
    """Return a few of front 0 such that each vector is at most a share ε better than one of them.

    Each value may be short of the other by ε · its size. ε = 0 keeps one of each tie.
    Raises ValueError for ε outside 0 … 1.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in 0 … 1; it is {epsilon!r}.")
    ranks, kept = fronts(vectors), list[int]()
    for i in (i for i, rank in enumerate(ranks) if rank == 0):
        slack = [x - epsilon * abs(x) for x in vectors[i]]
        if not any(all(x >= y for x, y in zip(vectors[j], slack, strict=True)) for j in kept):
            kept.append(i)
    return kept
