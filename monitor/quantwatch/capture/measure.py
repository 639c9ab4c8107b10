"""Measure some candidates against the reference's trace of a batch, and report to a sink."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quantwatch.capture.basis import other_inputs
from quantwatch.capture.births import candidate_births, reference_births
from quantwatch.capture.compare import Reading, read_candidate
from quantwatch.capture.estimates import estimate_layers
from quantwatch.capture.joining import Joined
from quantwatch.capture.layers import read_layers, worst_positions
from quantwatch.capture.layout import Layout, Positions
from quantwatch.capture.observations import Measured, observations
from quantwatch.capture.outputs import Head, Outputs, compare_outputs, isolate_head
from quantwatch.capture.places import REFERENCE
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import readout_of
from quantwatch.capture.report import MAX_HEAD_ROWS, CaptureReport
from quantwatch.capture.routing import both
from quantwatch.capture.sketches import sketch_layers
from quantwatch.capture.trace import Trace, TraceSource
from quantwatch.domain import HEAD, NonFinite, Progress, Sink
from quantwatch_kernels.registry import Watch, watched


class Measurer:
    """Compares candidates with a source's traces; findings go to the sink and into the report."""

    def __init__(
        self,
        source: TraceSource,
        probes: Mapping[str, Probe],
        plan: CapturePlan,
        sink: Sink,
        report: CaptureReport,
    ) -> None:
        self.probes = probes
        self.report = report
        self.source = source
        self._readouts = {name: readout_of(probe.model) for name, probe in probes.items()}
        self._plan = plan
        self._sink = sink
        self.head_rows: dict[str, set[int]] = {}
        """Candidate → ids whose logit differs on the reference's own input; some of too many."""
        self._other_heads = {n for n, probe in probes.items() if HEAD in other_inputs(probe.model)}
        report.bit_equal = dict.fromkeys(probes, True)
        report.head_rows = dict.fromkeys(probes, ())
        self._joined: dict[str, Joined] = {}

    def measure(self, trace: Trace, layout: Layout, progress: Progress) -> None:
        """Measure all candidates on the prompts of a trace, in the layout's batch."""
        if not self.probes:
            return
        readings = self._read(trace, layout, progress)
        chunk = layout.batch.chunk
        if chunk is not None and chunk.is_first:
            self._joined = {name: Joined(self._plan.worst_positions) for name in self.probes}
        if len(layout.rows):
            self._compare(readings, trace, layout)
            return
        for name, reading in readings.items():
            self._note_births(name, reading, None, layout)
            self.report.bit_equal[name] &= reading.is_equal

    def _read(self, trace: Trace, layout: Layout, progress: Progress) -> dict[str, Reading]:
        readings: dict[str, Reading] = {}
        for name, probe in self.probes.items():
            with self.report.timed("candidates"):
                own_batch = layout.batch is trace.batch
                readings[name] = read_candidate(probe, layout.batch, trace, exact=own_batch)
            self.report.shift("candidates", "isolated", readings[name].isolated_s)
            progress.advance(layout.batch.num_tokens)
        return readings

    def _compare(self, readings: Mapping[str, Reading], trace: Trace, layout: Layout) -> None:
        """Compare the outputs at the scored positions, look closer, and hand on what was found."""
        heads = {
            name: Head.of(
                probe.model, self._readouts[name], readings[name].head_input, probe.counts.watch
            )
            for name, probe in self.probes.items()
        }
        theirs = self.source.head(trace.head_input)
        equal = {name for name in heads if self.report.bit_equal[name] and readings[name].is_equal}
        with self.report.timed("outputs"):
            outputs = compare_outputs(
                theirs, heads, layout, keep=self._plan.keep_top, check_equal=frozenset(equal)
            )
        found = [
            Measured(name, self.probes[name].model.dtype, reading, outputs[name])
            for name, reading in readings.items()
        ]
        for measured in found:
            with self.report.timed("lens"):
                self._read_layers(measured, trace, layout, theirs)
            self._look_closer(measured, trace, layout, (theirs, heads[measured.name]))
            self._hand_on(measured, trace, layout)

    def _hand_on(self, measured: Measured, trace: Trace, layout: Layout) -> None:
        chunk = layout.batch.chunk
        for found in observations(measured, trace, layout):
            part = found if chunk is None else self._joined[measured.name].observation(found, chunk)
            self._sink.observe(part)

    def _look_closer(
        self, measured: Measured, trace: Trace, layout: Layout, heads: tuple[Head, Head]
    ) -> None:
        """Add isolated head and births, and note what the report keeps."""
        outputs, report = measured.outputs, self.report
        if self._plan.lens == "estimated" and layout.batch.chunk is None:
            self._estimate(measured, trace, layout, heads[0])
        if layout.batch.isolated and measured.name not in self._other_heads:
            with report.timed("isolated"):
                self._isolate_head(measured, layout, heads)
        measured.births = self._note_births(measured.name, measured.reading, outputs, layout)
        report.bit_equal[measured.name] &= outputs.is_equal
        _, wrong = both(trace.choices, measured.reading.choices)
        for name, found in (("reference", trace.choices.unknown), (measured.name, wrong)):
            for scope, reason in found.items():
                report.unrouted.setdefault(scope, {}).setdefault(name, reason)

    def _read_layers(
        self, measured: Measured, trace: Trace, layout: Layout, reference: Head
    ) -> None:
        layers = {s: (trace.taps[s], hidden) for s, hidden in measured.reading.layers.items()}
        sampled, chunk = list(enumerate(layout.positions)), layout.batch.chunk
        if not self._plan.lens_positions:
            measured.samples = read_layers(None, layers, layout, sampled)
            return
        worst = [self._worst(measured, layout, n) for n, _ in sampled]
        readout = replace(reference.readout, width=measured.outputs.width)
        requests = [*sampled, *enumerate(worst)]
        products = self._plan.lens_products
        with watched(self._told(measured.name)):
            readings = read_layers(readout, layers, layout, requests, products=products)
        measured.samples, measured.extras = readings[: len(worst)], readings[len(worst) :]
        if chunk is not None:  # a later chunk may have worse ones
            self._joined[measured.name].keep(chunk, *measured.extras)
            measured.extras = ()

    def _told(self, name: str) -> Watch | None:
        """Return who is told that a lens that was to be faster is not: candidates, no floor."""
        probe = self.probes[name]
        return probe.counts.watch if self._plan.rounds_lens and probe.name != REFERENCE else None

    def _estimate(self, measured: Measured, trace: Trace, layout: Layout, reference: Head) -> None:
        """Estimate every layer at every scored position, from the trace's sketch."""
        width, report = measured.outputs.width, self.report
        readout = replace(reference.readout, width=width)
        if width not in trace.sketches:
            with report.timed("sketch"):
                trace.sketches[width] = sketch_layers(readout, trace.taps, layout, self._plan)
        # What the estimator does another way is told with the candidate's other events.
        with report.timed("estimates"), watched(self.probes[measured.name].counts.watch):
            layers = {s: (trace.taps[s], hidden) for s, hidden in measured.reading.layers.items()}
            sketch = trace.sketches[width]
            measured.estimates = estimate_layers(readout, layers, layout, sketch)

    def _worst(self, measured: Measured, layout: Layout, number: int) -> Positions:
        kl = measured.outputs.statistics.logit_kl[layout.spans[number]].cpu().numpy()
        start = layout.batch.prompts[number].score_start
        sampled, chunk = layout.positions[number], layout.batch.chunk
        if chunk is not None:
            return self._joined[measured.name].worst_here(chunk, kl, sampled)
        return worst_positions(kl, start, sampled, self._plan.worst_positions)

    def _note_births(
        self, name: str, reading: Reading, outputs: Outputs | None, layout: Layout
    ) -> list[NonFinite | None]:
        """Note where values stop being finite; return the candidate's, of chunks with the last."""
        ours = candidate_births(reading, outputs, layout)
        theirs = reference_births(reading, outputs, layout)
        if (chunk := layout.batch.chunk) is not None:
            places = (*reading.scopes, HEAD)
            joined = self._joined[name]
            ours = [joined.note_birth(name, chunk, places, birth) for birth in ours]
            theirs = [joined.note_birth("reference", chunk, places, birth) for birth in theirs]
        for model, births in ((name, ours), ("reference", theirs)):
            for birth in births:
                self.report.note_nonfinite(model, birth)
        return ours

    def _isolate_head(self, measured: Measured, layout: Layout, heads: tuple[Head, Head]) -> None:
        rows = layout.measured(0, layout.positions[0])
        errors, differing = isolate_head(*heads, rows, measured.outputs.width)
        measured.isolated_head = errors
        self.note_head_rows(measured.name, differing)

    def note_head_rows(self, name: str, differing: Iterable[int]) -> None:
        """Add ids whose logit differs; of more than are told, only enough to know that are kept."""
        seen = self.head_rows.setdefault(name, set())
        seen |= set(differing)
        few = len(seen) <= MAX_HEAD_ROWS
        self.report.head_rows[name] = tuple(sorted(seen)) if few else ()
        if not few:
            self.head_rows[name] = set(sorted(seen)[: MAX_HEAD_ROWS + 1])
