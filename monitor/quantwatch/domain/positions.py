"""How a metric goes with the position in a prompt: its mean in ranges that double in length."""

from dataclasses import dataclass

from quantwatch.domain.words import Json

BY_POSITION = "by_position"
"""Where a run's capture keeps the ranges: candidate → list of `PositionRange` as JSON."""


@dataclass(frozen=True, slots=True)
class PositionRange:
    """One metric over the measured positions `first` … `last` of all prompts.

    `n` counts positions and `num_nonfinite` those of them without a finite value; mean and its
    standard error, clustered by prompt, are of the others: None without one, the error also where
    fewer than two prompts reach.
    """

    metric: str
    first: int
    last: int
    n: int
    num_nonfinite: int
    mean: float | None
    se: float | None

    @property
    def name(self) -> str:
        """The range as people read it."""
        return f"{self.first:,}–{self.last:,}"


def ranges_of(capture: Json, candidate: str) -> tuple[PositionRange, ...]:
    """Return a candidate's ranges as a run's capture has them; none of runs before there were any.

    Ordered by metric, then position.
    """
    found = capture.get(BY_POSITION, {}).get(candidate, ())
    return tuple(PositionRange(**each) for each in found)
