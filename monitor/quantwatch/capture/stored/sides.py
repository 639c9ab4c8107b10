"""The reference's side of a night: run now, run and recorded, or read back.

The three give the same traces, the same noise floor and the same facts; the rest of capture doesn't
know which one it has.
"""

from collections.abc import Callable

from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.conditions import Kept as Observed
from quantwatch.capture.course import Course
from quantwatch.capture.layout import lay_out
from quantwatch.capture.outputs import Head
from quantwatch.capture.sketches import LayerSketch
from quantwatch.capture.stored.audit import head_floor
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.packing import Packed
from quantwatch.capture.stored.parts import batch_part, file_of, sketch_part
from quantwatch.capture.stored.reading import Kept
from quantwatch.capture.stored.recorder import Recorder
from quantwatch.capture.stored.seen import pack_seen, unpack_seen
from quantwatch.capture.stored.sketches import pack_sketches, unpack_sketches
from quantwatch.capture.stored.traces import pack_trace, unpack_trace
from quantwatch.capture.trace import Trace, TraceSource
from quantwatch.domain import Json, Sink

Measure = Callable[[Sink], Json]


class LiveSide:
    """A reference that is run now."""

    facts: Json | None = None
    """What is reported of the reference when it isn't run."""
    floor_logit_kl: float | None = None
    """The store's own floor in nats, where it was measured."""

    def __init__(self, source: TraceSource, floor: Sink) -> None:
        self.source = source
        self._floor = floor

    def part(self, name: str, measure: Measure) -> Json:
        """Measure a part of the noise floor; return what is said of it."""
        _ = name
        return measure(self._floor)

    def keep(self, trace: Trace) -> None:
        """Take what came to be of a trace while candidates were held against it."""

    def finish(self, facts: Json) -> None:
        """End the night; `facts` are what was reported of the reference."""


class RecordingSide(LiveSide):
    """A reference that is run now and kept."""

    def __init__(
        self, source: TraceSource, floor: Sink, recorder: Recorder, course: Course
    ) -> None:
        self._recording = _RecordingSource(source, recorder, course)
        super().__init__(self._recording, floor)
        self._recorder = recorder
        self._course = course

    def part(self, name: str, measure: Measure) -> Json:
        """Measure a part of the noise floor and keep what was seen."""
        seen = Observed()
        said = measure(seen)
        for observation in seen.observations:
            self._floor.observe(observation)
        self._recorder.put(file_of(name), pack_seen(seen.observations, said), self._recording.share)
        return said

    def keep(self, trace: Trace) -> None:
        """Write what the lens saw of it."""
        if trace.sketches:
            name = file_of(sketch_part(self._course.number(trace.batch)))
            self._recorder.put(name, pack_sketches(trace.sketches), self._recording.share)

    def finish(self, facts: Json) -> None:
        """Complete the entry."""
        self._recorder.commit(facts)
        self.floor_logit_kl = self._recording.floor_logit_kl


class StoredSide(LiveSide):
    """A reference that is read back; from damage on it is run."""

    def __init__(self, live: TraceSource, floor: Sink, kept: Kept, course: Course) -> None:
        self._stored = _StoredSource(live, kept, course)
        super().__init__(self._stored, floor)
        self.facts = kept.manifest.facts
        self._kept = kept

    def keep(self, trace: Trace) -> None:
        """Note sketches that this night had to make: a whole entry gets no more of them."""
        if self._kept.is_whole and set(trace.sketches) - self._stored.widths:
            self._kept.lacks_sketches()

    def part(self, name: str, measure: Measure) -> Json:
        """Repeat what was seen of a part of the noise floor."""
        packed = self._kept.read(name)
        try:
            found = None if packed is None else unpack_seen(packed)
        except DamagedError as error:
            self._kept.damaged(f"{name}: {error}")
            found = None
        if found is None:
            return measure(self._floor)
        for observation in found[0]:
            self._floor.observe(observation)
        return found[1]


class _RecordingSource:
    """Runs the reference and writes what it gave."""

    def __init__(self, live: TraceSource, recorder: Recorder, course: Course) -> None:
        self.share = 0.0
        """Share of the suite's tokens that were run."""
        self.floor_logit_kl: float | None = None
        self._live = live
        self._recorder = recorder
        self._course = course

    def head(self, inputs: Tensor) -> Head:
        """Return the reference's head on inputs [R, H] of one batch."""
        return self._live.head(inputs)

    def trace(self, batch: Batch, linear_rows: Tensor | None = None) -> Trace:
        """Run the reference on a batch and write the trace."""
        trace = self._live.trace(batch, linear_rows)
        self.share += batch.num_tokens / self._course.suite.num_tokens
        name = batch_part(self._course.number(batch))
        if self._recorder.given_up is None:
            self._recorder.put(file_of(name), pack_trace(trace, linear_rows), min(self.share, 1.0))
            if self.floor_logit_kl is None and self._recorder.read_back is not None:
                self.floor_logit_kl = self._store_floor(trace, self._recorder.read_back)
                self._recorder.read_back = None
        return trace

    def _store_floor(self, live: Trace, stored: Packed) -> float:
        layout = lay_out(live.batch, self._course.suite.hash, self._course.plan)
        there = unpack_trace(stored, live.batch, stored.tensors.get("rows"))
        return head_floor(self.head(live.head_input), self.head(there.head_input), layout)


class _StoredSource:
    """Reads what the reference gave on another night."""

    def __init__(self, live: TraceSource, kept: Kept, course: Course) -> None:
        self._live = live
        self._kept = kept
        self._course = course
        self.widths: set[int] = set()
        """Numbers of ids of the last trace's stored sketches."""

    def head(self, inputs: Tensor) -> Head:
        """Return the reference's head on inputs [R, H] of one batch: it is there, and run."""
        return self._live.head(inputs)

    def trace(self, batch: Batch, linear_rows: Tensor | None = None) -> Trace:
        """Return the trace of a batch; run the reference when it can't be read."""
        number = self._course.number(batch)
        packed: Packed | None = self._kept.read(batch_part(number))
        if packed is not None:
            try:
                trace = unpack_trace(packed, batch, linear_rows)
                trace.sketches = self._sketches(sketch_part(number))
                self.widths = set(trace.sketches)
                return trace
            except DamagedError as error:
                self._kept.damaged(str(error))
        return self._live.trace(batch, linear_rows)

    def _sketches(self, part: str) -> dict[int, LayerSketch]:
        if file_of(part) not in self._kept.manifest.files:
            return {}
        packed = self._kept.read(part)
        return {} if packed is None else unpack_sketches(packed)


def side_of(
    kept: Kept | Recorder | None, live: TraceSource, floor: Sink, course: Course
) -> LiveSide:
    """Return the side that what was opened makes of a reference under observation."""
    if isinstance(kept, Kept):
        return StoredSide(live, floor, kept, course)
    return LiveSide(live, floor) if kept is None else RecordingSide(live, floor, kept, course)
