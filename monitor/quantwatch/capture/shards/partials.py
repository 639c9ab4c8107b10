"""What one unit of a night leaves behind, and how units become a night again.

A unit is a whole batch, or all chunks of a long prompt, which need one another's caches. Nothing is
carried from one unit to the next, so wherever a unit is measured its partial has the same bits.
Partials are folded in the order of the batches: what is added up in floating point, what the first
or the last one decides, and the order of rows are then those of a single process.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quantwatch.capture.batches import Batch
from quantwatch.capture.counts import Counts
from quantwatch.capture.course import Course
from quantwatch.capture.measure import Measurer
from quantwatch.capture.probe import Probe
from quantwatch.capture.report import CaptureReport
from quantwatch.domain import Json, Observation, Progress, Sink

Unit = tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """All that was measured on one unit. Plain data: it can be sent to another process."""

    unit: int
    observations: tuple[Observation, ...]
    """Of the candidates, in the order in which they were made."""
    floor: tuple[Observation, ...]
    """Of the reference against itself."""
    report: CaptureReport
    """What is said of this unit alone."""
    head_rows: Mapping[str, frozenset[int]]
    """Candidate → ids whose logit differs on the reference's own input."""
    counts: Mapping[str, Counts]
    """Model → what its forward passes came to."""
    num_tokens: int
    """What a progress has to advance by."""


class Spread(Protocol):
    """Has units measured elsewhere."""

    def partials(self, course: Course, progress: Progress) -> Generator[Partial]:
        """Yield the partial of every unit of a course, each once, in order.

        `progress` advances as units are done, in any order, and stops everything when it raises.
        Raises what measuring a unit raised, and WorkersLostError when nobody is left to do it.
        """

    def told(self) -> Json:
        """Return what is reported of how it went."""


def units_of(course: Course) -> tuple[Unit, ...]:
    """Return the units of a course in the order of its batches."""
    units: list[list[Batch]] = []
    for batch in course.batches:
        if batch.chunk is None or batch.chunk.is_first:
            units.append([])
        units[-1].append(batch)
    return tuple(map(tuple, units))


def describe_unit(unit: Sequence[Batch], number: int) -> str:
    """Name a unit for people: its number and prompts."""
    prompts = sorted({prompt.index for batch in unit for prompt in batch.prompts})
    shown = ", ".join(map(str, prompts[:8])) + (", …" if len(prompts) > 8 else "")
    return f"batch {number} (prompt{'s' if len(prompts) > 1 else ''} {shown})"


class Fold:
    """Adds partials, in order, to the record of one night."""

    def __init__(
        self, main: Measurer, probes: Mapping[str, Probe], sink: Sink, floor: Sink
    ) -> None:
        self._main = main
        self._probes = probes
        self._sink, self._floor = sink, floor

    def add(self, partial: Partial) -> None:
        """Add the next partial."""
        for observation in partial.observations:
            self._sink.observe(observation)
        for observation in partial.floor:
            self._floor.observe(observation)
        self._main.report.add(partial.report)
        for name, differing in partial.head_rows.items():
            self._main.note_head_rows(name, differing)
        for name, counts in partial.counts.items():
            self._probes[name].counts.add(counts)
