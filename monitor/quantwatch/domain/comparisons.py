"""What a paired test over prompts says of a candidate now and in its baseline."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantwatch.domain.results import CandidateResult
from quantwatch.domain.words import Scope

MIN_SAMPLES = 10
"""Prompts below which nothing is concluded from their spread."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One number at one scope, now against the baseline, over the prompts that both runs have.

    `low` … `high` is the 95 % interval of value − baseline; below `MIN_SAMPLES` prompts it is the
    range of their differences, and `q` is None.
    """

    metric: str
    scope: Scope
    num_prompts: int
    value: float
    baseline: float
    low: float
    high: float
    p: float
    """Two-sided, that the two are equal."""
    q: float | None = None
    """Share of false discoveries among the changes of this direction that are at least as clear."""
    established: int = 0
    """+1 where an increase is established among everything that is judged, −1 a decrease."""
    lost: tuple[int, ...] = ()
    """Prompts (by index) with values that only one of the runs has."""
    handicap: float = 0.0
    """By how much the baseline is expected to be too good: it was chosen as the best of many."""
    se: float = 0.0
    """Standard error of the difference that a test has to reckon with, clustered by prompt: never
    below what the noise floor gives, also where all prompts are equal. 0 below `MIN_SAMPLES`."""

    @property
    def difference(self) -> float:
        """Value minus baseline."""
        return self.value - self.baseline

    @property
    def is_enough(self) -> bool:
        """Whether there are prompts enough for an interval."""
        return self.num_prompts >= MIN_SAMPLES


@dataclass(frozen=True, slots=True)
class Baseline(CandidateResult):
    """A candidate's result in the baseline, and the paired tests against it."""

    comparisons: Mapping[tuple[str, str], Comparison] = field(default_factory=dict)
    """(metric as rules name it, scope) → comparison of the means."""
