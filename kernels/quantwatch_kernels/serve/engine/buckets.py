"""Sizes that graphs are captured for, and what tells one captured graph from another.

A graph has fixed shapes. A batch of n is padded to the smallest captured size that holds it; what
is larger than all of them runs without a graph. Sizes are 1, 2, 4 and then multiples of a step: at
most as many rows of padding as the step, where powers of two alone would waste half.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Buckets", "GraphKey", "GraphStats", "powers_up_to", "sizes_up_to"]


def sizes_up_to(largest: int, step: int = 8) -> tuple[int, ...]:
    """Return 1, 2, 4, …, then multiples of `step`, the last one `largest` itself."""
    if largest < 1 or step < 1:
        raise ValueError(f"sizes up to {largest} in steps of {step}: both must be at least 1.")
    small = [size for size in (2**power for power in range(30)) if size < min(step, largest)]
    return (*small, *range(step, largest, step), largest)


def powers_up_to(largest: int, first: int) -> tuple[int, ...]:
    """Return first, 2 · first, 4 · first, … and at last `largest` itself: few, for large shapes."""
    if largest < 1 or first < 1:
        raise ValueError(f"powers from {first} up to {largest}: both must be at least 1.")
    sizes = [first * 2**power for power in range(30)]
    return (*[size for size in sizes if size < largest], largest)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Captured sizes, ascending. Raises ValueError for none, doubles or a size below 1."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes are distinct, ascending and at least 1; not {self.sizes}.")

    def holding(self, count: int) -> int | None:
        """Return the smallest size that holds `count`; None: all are smaller."""
        if count < 1:
            raise ValueError(f"there is no bucket for {count} rows.")
        place = bisect_left(self.sizes, count)
        return self.sizes[place] if place < len(self.sizes) else None


class GraphKey(NamedTuple):
    """What a captured graph is good for."""

    kind: str
    """decode or prefill."""
    rows: int
    """Tokens of the batch, padding included."""
    keys: int
    """Keys that a query of a decode may read, padding included; 0 for a prefill."""


@dataclass(slots=True)
class GraphStats:
    """Counts since the runner was made."""

    captured: int = 0
    replayed: int = 0
    dropped: int = 0
    """Graphs given up because the pool, a weight or the adapter changed."""
    eager: int = 0
    """Batches that no bucket holds."""
    padded_rows: int = 0
