"""Is memory bandwidth the bottleneck? Utilisation above 82 % in five consecutive samples.

Utilisation is bytes moved ÷ seconds ÷ the *measured* peak: a data sheet's peak is 10 to 30 % out of
reach, so 82 % of it may never come. The peak is the best median over repeats of one copy size; a
single fastest copy may be a clock's error. Strictly above, and consecutive in time: a pause longer
than 1.5 sampling periods ends the row, as does one sample that isn't above. More than 110 % of the
peak is no utilisation but a wrong peak or unit (GB taken for GiB are 7.4 % off), and is refused.
Both numbers of the rule can be set. What is not seen: bursts shorter than a sample, and a peak
measured with copies that never left the cache, which only hides bottlenecks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import NamedTuple

__all__ = ["Episode", "Rule", "Sample", "bottlenecks", "measured_peak", "utilisation"]

_IMPOSSIBLE = 1.1
_PAUSE = 1.5


class Sample(NamedTuple):
    """Bytes moved in `seconds` that end at time `at_s`."""

    at_s: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rule:
    """When bandwidth is a bottleneck. Raises ValueError for a share outside 0 … 1 or no sample."""

    above: float = 0.82
    samples: int = 5

    def __post_init__(self) -> None:
        """Check both."""
        if not 0 < self.above < 1 or self.samples < 1:
            raise ValueError(f"above must be in 0 … 1 and samples at least 1: {self}.")


class Episode(NamedTuple):
    """Consecutive samples above: which (last one included), and how far."""

    first: int
    last: int
    mean: float
    highest: float

    @property
    def samples(self) -> int:
        """How many."""
        return self.last - self.first + 1


def measured_peak(copies: Sequence[tuple[float, float]]) -> float:
    """Return bytes per second: the best median over the copies (bytes, seconds) of one size.

    Raises ValueError without three copies of some size, or for one that isn't positive.
    """
    rates: dict[float, list[float]] = {}
    for num_bytes, seconds in copies:
        if not all(isfinite(x) and x > 0 for x in (num_bytes, seconds)):
            raise ValueError(f"a copy needs positive bytes and seconds: {num_bytes}, {seconds}.")
        rates.setdefault(num_bytes, []).append(num_bytes / seconds)
    medians = [median(found) for found in rates.values() if len(found) >= 3]
    if not medians:
        raise ValueError(f"a peak needs three copies of one size; there are {len(copies)} in all.")
    return max(medians)


def utilisation(samples: Sequence[Sample], peak_bytes_per_s: float) -> list[float]:
    """Return each sample's share of the measured peak.

    Raises ValueError for a peak or sample that isn't a number, times that don't grow, and shares
    beyond 110 %.
    """
    if not (isfinite(peak_bytes_per_s) and peak_bytes_per_s > 0):
        raise ValueError(f"the peak must be positive bytes per second, not {peak_bytes_per_s!r}.")
    shares = []
    for index, sample in enumerate(samples):
        if not all(map(isfinite, sample)) or sample.num_bytes < 0 or sample.seconds <= 0:
            raise ValueError(f"sample {index} isn't bytes ≥ 0 in seconds > 0: {sample}.")
        if index and sample.at_s <= samples[index - 1].at_s:
            raise ValueError(f"sample {index} is not later than the one before: {sample.at_s} s.")
        shares.append(sample.num_bytes / sample.seconds / peak_bytes_per_s)
        if shares[-1] > _IMPOSSIBLE:
            raise ValueError(
                f"sample {index} moves {shares[-1]:.0%} of the peak {peak_bytes_per_s:.4g} B/s; "
                "the peak is too low, or a unit is wrong."
            )
    return shares


def bottlenecks(
    samples: Sequence[Sample], peak_bytes_per_s: float, rule: Rule | None = None
) -> list[Episode]:
    """Return every longest row of at least `rule.samples` samples above `rule.above`."""
    rule = rule or Rule()
    shares = utilisation(samples, peak_bytes_per_s)
    gaps = [after.at_s - before.at_s for before, after in pairwise(samples)]
    period = median(gaps) if gaps else 0.0
    found, start = list[Episode](), 0
    for index in range(len(shares) + 1):
        paused = 0 < index < len(shares) and gaps[index - 1] > _PAUSE * period
        ends = index == len(shares) or paused or shares[index] <= rule.above
        if ends:
            if index - start >= rule.samples:
                row = shares[start:index]
                found.append(Episode(start, index - 1, sum(row) / len(row), max(row)))
            start = index if paused and shares[index] > rule.above else index + 1
    return found
