"""One pass over a suite, or a piece of it: the reference's trace, then everybody against it."""

from collections.abc import Sequence
from functools import partial

from quantwatch.capture.batches import Batch
from quantwatch.capture.course import Course
from quantwatch.capture.floor import Floor
from quantwatch.capture.layout import lay_out
from quantwatch.capture.long_prompts import drop_caches
from quantwatch.capture.measure import Measurer
from quantwatch.capture.places import REFERENCE
from quantwatch.capture.served import ServedMeasurer
from quantwatch.capture.stored.parts import CONDITIONS, floor_part
from quantwatch.capture.stored.sides import LiveSide
from quantwatch.domain import Progress


class Pass:
    """Measures batches one after another; `progress` advances after every model's pass."""

    def __init__(
        self,
        side: LiveSide,
        measurers: tuple[Measurer, ServedMeasurer | None],
        floor: Floor,
        course: Course,
    ) -> None:
        self._side = side
        self.main, self._served = measurers
        self._floor = floor
        self.course = course
        self._probes = (floor.probe, *self.main.probes.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that `progress` will have seen when all is measured."""
        course = self.course
        again = sum(course.floor_length(p) for p in course.suite.prompts if p.index in course.floor)
        asked = 0 if self._served is None else self._served.num_models
        return course.suite.num_tokens * (1 + len(self.main.probes) + asked) + again

    def run(self, batches: Sequence[Batch], progress: Progress) -> None:
        """Measure batches; the chunks of a prompt come in a row."""
        for batch in batches:
            self._measure(batch, progress)
            if batch.chunk is not None and batch.chunk.is_last:
                drop_caches(self._probes)

    def conditions(self) -> None:
        """Measure the noise floor's other conditions, once everything else is measured."""
        report = self.main.report
        if self.course.conditions is not None:
            with report.timed("floor"):
                found = self._side.part(CONDITIONS, self._floor.conditions)
                report.noise_floor_sources |= found
            self._require_unwritten()

    def _measure(self, batch: Batch, progress: Progress) -> None:
        """Measure one batch. Its trace ends with this call, before the next one begins."""
        course, report = self.course, self.main.report
        layout = lay_out(batch, course.suite.hash, course.plan)
        with report.timed("reference"):
            trace = self._side.source.trace(batch, course.linear_rows(batch, layout))
        progress.advance(batch.num_tokens)
        for scope, reason in trace.unmeasured.items():
            report.missing.setdefault(scope, {})[REFERENCE] = reason
        self.main.measure(trace, layout, progress)
        if self._served is not None:
            self._served.measure(trace, layout, progress)
        with report.timed("reference"):
            self._side.keep(trace)
        if course.has_floor(batch):
            with report.timed("floor"):
                name = floor_part(course.number(batch))
                said = self._side.part(name, partial(self._floor.beside, trace))
            progress.advance(said["num_tokens"])
        self._require_unwritten()

    def _require_unwritten(self) -> None:
        """Raise ModelError where weights were other ones by now than those that were loaded."""
        for probe in self._probes:
            probe.model.files.require_unwritten()
