"""One worker's part of a night: models under observation, and one unit after another."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from quantwatch.capture.conditions import Kept
from quantwatch.capture.course import Course
from quantwatch.capture.floor import Floor
from quantwatch.capture.long_prompts import caches_dropped
from quantwatch.capture.measure import Measurer
from quantwatch.capture.passes import Pass
from quantwatch.capture.places import REFERENCE
from quantwatch.capture.probe import Probe
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.shards.partials import Partial, units_of
from quantwatch.capture.stored.sides import LiveSide
from quantwatch.capture.trace import LiveTraceSource
from quantwatch.models.loaded import LoadedModel


class Shard:
    """Measures units of a course. A context manager: leaving it removes every hook.

    Sinks, report and counters are new for each unit: a unit's partial says nothing of another one.
    """

    def __init__(self, models: Mapping[str, LoadedModel], course: Course) -> None:
        self._models = models
        self._course = course
        self._units = units_of(course)
        self._probes: dict[str, Probe] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, model in self._models.items():
                self._probes[name] = stack.enter_context(Probe(name, model))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def measure(self, unit: int) -> Partial:
        """Measure one unit. Raises CaptureError as `capture` does."""
        for probe in self._probes.values():
            probe.take_counts()  # of a unit that failed half-way
        seen, floor, steps = Kept(), Kept(), _Steps()
        main = self._measurer(seen)
        side = LiveSide(main.source, floor)
        piece = Pass(side, (main, None), Floor(self._probes[REFERENCE], self._course), self._course)
        with torch.no_grad(), caches_dropped(self._probes.values()):
            piece.run(self._units[unit], steps)
        return Partial(
            unit,
            tuple(seen.observations),
            tuple(floor.observations),
            main.report,
            {name: frozenset(ids) for name, ids in main.head_rows.items()},
            {name: probe.take_counts() for name, probe in self._probes.items()},
            steps.done,
        )

    def _measurer(self, sink: Kept) -> Measurer:
        source = LiveTraceSource(self._probes[REFERENCE])
        candidates = {name: probe for name, probe in self._probes.items() if name != REFERENCE}
        return Measurer(source, candidates, self._course.plan, sink, CaptureReport())


class _Steps:
    """A progress that adds up."""

    def __init__(self) -> None:
        self.done = 0

    def start(self, stage: str, total_tokens: int) -> None:
        """Ignore a stage."""

    def advance(self, tokens: int) -> None:
        """Add tokens."""
        self.done += tokens
