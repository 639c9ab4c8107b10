"""The noise floor: the reference against itself, everything of it that needs the reference."""

from dataclasses import replace

from quantwatch.capture.chunks import goes_in_chunks
from quantwatch.capture.conditions import CONDITIONS, Unseen, measure_conditions
from quantwatch.capture.course import Course
from quantwatch.capture.layout import lay_out
from quantwatch.capture.measure import Measurer
from quantwatch.capture.probe import Probe
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.trace import LiveTraceSource, Trace
from quantwatch.domain import Json, Sink


class Floor:
    """Measures the floor with a reference under observation."""

    def __init__(self, probe: Probe, course: Course) -> None:
        self.probe = probe
        self._course = course
        # The worst positions are only shown, and nobody looks at the floor's.
        self._quiet = replace(course.plan, worst_positions=0, lens="sampled")
        self._source = LiveTraceSource(probe)

    def beside(self, trace: Trace, sink: Sink) -> Json:
        """Measure the start of a batch's only prompt beside another text; say how many tokens."""
        course = self._course
        start = trace.first(course.floor_length(trace.batch.prompts[0]))
        layout = lay_out(course.beside(start.batch.prompts[0]), course.suite.hash, course.plan)
        itself = {self.probe.name: self.probe}
        noise = Measurer(self._source, itself, self._quiet, sink, CaptureReport())
        noise.measure(start, layout, Unseen())
        return {"num_tokens": layout.batch.num_tokens}

    def conditions(self, sink: Sink) -> Json:
        """Measure under other conditions, if the plan has any; say which were, or why not."""
        short = self._course.conditions
        if short is None:
            return {}
        size = self._course.plan.prefill_chunk
        if goes_in_chunks(short, size):
            why = f"not measurable: the scored positions begin behind {size} tokens"
            return dict.fromkeys(CONDITIONS, why)
        return measure_conditions(self.probe, self._course.suite.hash, short, self._quiet, sink)
