"""Latency and bandwidth of a link from samples: seconds = α · steps + β · bytes, α, β ≥ 0.

Fitted by least absolute *relative* deviations, Σ |y − ŷ| ÷ y. Relative, because samples span 1 KiB
to 1 GiB and squared seconds would see the largest copy only; absolute, because a scheduler's hiccup
is ten times too slow and must not bend the line. The minimum of this linear programme lies where
two constraints meet (two samples that are hit, or one sample and α = 0 or β = 0), so every such
line is tried: exact, no starting value, no tolerance. Samples of equal size are first replaced by
their median. The mean rate of all samples, small copies included, is neither α nor β.

Given up: links whose bandwidth depends on the size (two protocols); `residual` shows such.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from statistics import median
from typing import NamedTuple

__all__ = ["GB", "GIB", "AlphaBeta", "Transfer", "fit_alpha_beta"]

GB = 10**9
"""Bytes of a gigabyte, in which links are sold; 7.4 % less than a GiB."""
GIB = 2**30
"""Bytes of a gibibyte, in which memory is counted."""
_MOST = 400


class Transfer(NamedTuple):
    """A measured transfer: bytes over the slowest wire, seconds, and latencies paid in a row."""

    num_bytes: float
    seconds: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A link. `residual` is the mean of |y − ŷ| ÷ y over the fitted points."""

    alpha_s: float
    beta_s_per_byte: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a link that takes negative or infinite time."""
        for name, value in (("alpha_s", self.alpha_s), ("beta_s_per_byte", self.beta_s_per_byte)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative; it is {value!r}.")

    def seconds(self, num_bytes: float, steps: int = 1) -> float:
        """Return the time of a transfer; of nothing in no step it is 0."""
        return self.alpha_s * steps + self.beta_s_per_byte * num_bytes

    @property
    def bytes_per_s(self) -> float:
        """Rate of an endless transfer; infinite where bytes cost nothing."""
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte else float("inf")


def fit_alpha_beta(samples: Iterable[Transfer]) -> AlphaBeta:
    """Return the link that the samples show.

    Raises ValueError for fewer than two different sizes per step, or a sample that isn't positive.
    """
    points = _points(list(samples))
    best: tuple[float, float, float] | None = None
    for alpha, beta in _lines(points):
        if alpha < 0 or beta < 0:
            continue
        cost = sum(abs(y - alpha - beta * x) / y for x, y in points)
        if best is None or (cost, alpha, beta) < best:
            best = (cost, alpha, beta)
    assert best is not None  # β = 0 through any point is a line
    return AlphaBeta(best[1], best[2], best[0] / len(points))


def _points(samples: Sequence[Transfer]) -> list[tuple[float, float]]:
    """Return (bytes per step, median seconds per step), one per size."""
    sizes: dict[float, list[float]] = {}
    for sample in samples:
        whole = sample.steps >= 1 and isfinite(sample.num_bytes) and sample.num_bytes >= 0
        if not (whole and isfinite(sample.seconds) and sample.seconds > 0):
            raise ValueError(
                "a transfer needs bytes ≥ 0, seconds > 0 and steps ≥ 1; "
                f"this has {sample.num_bytes!r}, {sample.seconds!r} and {sample.steps!r}."
            )
        sizes.setdefault(sample.num_bytes / sample.steps, []).append(sample.seconds / sample.steps)
    if len(sizes) < 2:
        raise ValueError(
            f"latency and bandwidth need two sizes at least; the {len(samples)} samples have "
            f"{len(sizes)}."
        )
    if len(sizes) > _MOST:
        raise ValueError(f"at most {_MOST} different sizes can be fitted; there are {len(sizes)}.")
    return [(size, median(seconds)) for size, seconds in sorted(sizes.items())]


def _lines(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    for x, y in points:
        yield y, 0.0
        if x > 0:
            yield 0.0, y / x
    for (x1, y1), (x2, y2) in combinations(points, 2):
        beta = (y2 - y1) / (x2 - x1)
        yield y1 - beta * x1, beta
