"""Measure some candidates against the reference's trace of a batch, and report to a sink."""

from collections.abc import Mapping
from dataclasses import replace

from quantwatch.capture.basis import other_inputs
from quantwatch.capture.births import candidate_births, reference_births
from quantwatch.capture.compare import Reading, read_candidate
from quantwatch.capture.estimates import estimate_layers
from quantwatch.capture.layers import read_layers, worst_positions
from quantwatch.capture.layout import Layout, Positions
from quantwatch.capture.observations import Measured, observations
from quantwatch.capture.outputs import Head, Outputs, compare_outputs, isolate_head
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import readout_of
from quantwatch.capture.report import MAX_HEAD_ROWS, CaptureReport
from quantwatch.capture.routing import both
from quantwatch.capture.sketches import sketch_layers
from quantwatch.capture.trace import Trace, TraceSource
from quantwatch.domain import HEAD, Progress, Sink
from quantwatch_kernels.registry import watched


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
        self._source = source
        self._readouts = {name: readout_of(probe.model) for name, probe in probes.items()}
        self._plan = plan
        self._sink = sink
        self._head_rows: dict[str, set[int]] = {}
        self._other_heads = {n for n, probe in probes.items() if HEAD in other_inputs(probe.model)}
        report.bit_equal = dict.fromkeys(probes, True)
        report.head_rows = dict.fromkeys(probes, ())

    def measure(self, trace: Trace, layout: Layout, progress: Progress) -> None:
        """Measure all candidates on the prompts of a trace, in the layout's batch."""
        readings: dict[str, Reading] = {}
        for name, probe in self.probes.items():
            with self.report.timed("candidates"):
                own_batch = layout.batch is trace.batch
                readings[name] = read_candidate(probe, layout.batch, trace, exact=own_batch)
            self.report.shift("candidates", "isolated", readings[name].isolated_s)
            progress.advance(layout.batch.num_tokens)
        heads = {
            name: Head.of(probe.model, self._readouts[name], readings[name].head_input, probe.watch)
            for name, probe in self.probes.items()
        }
        theirs = self._source.head(trace.head_input)
        equal = {name for name in heads if self.report.bit_equal[name] and readings[name].is_equal}
        with self.report.timed("outputs"):
            outputs = compare_outputs(
                theirs, heads, layout, keep=self._plan.keep_top, check_equal=frozenset(equal)
            )
        for name, reading in readings.items():
            dtype = self.probes[name].model.dtype
            measured = Measured(name, dtype, reading, outputs[name])
            self._look_closer(measured, trace, layout, (theirs, heads[name]))
            for observation in observations(measured, trace, layout):
                self._sink.observe(observation)

    def _look_closer(
        self, measured: Measured, trace: Trace, layout: Layout, heads: tuple[Head, Head]
    ) -> None:
        """Add lens, isolated head and births, and note what the report keeps."""
        outputs, report = measured.outputs, self.report
        with report.timed("lens"):
            self._read_layers(measured, trace, layout, heads[0])
        if self._plan.lens == "estimated":
            self._estimate(measured, trace, layout, heads[0])
        if layout.batch.isolated and measured.name not in self._other_heads:
            with report.timed("isolated"):
                self._isolate_head(measured, layout, heads)
        measured.births = candidate_births(measured.reading, outputs, layout)
        for birth in measured.births:
            report.note_nonfinite(measured.name, birth)
        for birth in reference_births(measured.reading, outputs, layout):
            report.note_nonfinite("reference", birth)
        report.bit_equal[measured.name] &= outputs.is_equal
        _, wrong = both(trace.choices, measured.reading.choices)
        for name, found in (("reference", trace.choices.unknown), (measured.name, wrong)):
            for scope, reason in found.items():
                report.unrouted.setdefault(scope, {}).setdefault(name, reason)

    def _read_layers(
        self, measured: Measured, trace: Trace, layout: Layout, reference: Head
    ) -> None:
        layers = {s: (trace.taps[s], hidden) for s, hidden in measured.reading.layers.items()}
        if not self._plan.lens_positions:
            measured.samples = read_layers(None, layers, layout, list(enumerate(layout.positions)))
            return
        worst = [self._worst(measured.outputs, layout, n) for n in range(len(layout.spans))]
        requests = [*enumerate(layout.positions), *enumerate(worst)]
        readout = replace(reference.readout, width=measured.outputs.width)
        readings = read_layers(readout, layers, layout, requests)
        measured.samples, measured.extras = readings[: len(worst)], readings[len(worst) :]

    def _estimate(self, measured: Measured, trace: Trace, layout: Layout, reference: Head) -> None:
        """Estimate every layer at every scored position, from the trace's sketch."""
        width, report = measured.outputs.width, self.report
        readout = replace(reference.readout, width=width)
        if width not in trace.sketches:
            with report.timed("sketch"):
                trace.sketches[width] = sketch_layers(readout, trace.taps, layout, self._plan)
        # What the estimator does another way is told with the candidate's other events.
        with report.timed("estimates"), watched(self.probes[measured.name].watch):
            layers = {s: (trace.taps[s], hidden) for s, hidden in measured.reading.layers.items()}
            sketch = trace.sketches[width]
            measured.estimates = estimate_layers(readout, layers, layout, sketch)

    def _worst(self, outputs: Outputs, layout: Layout, number: int) -> Positions:
        kl = outputs.statistics.logit_kl[layout.spans[number]].cpu().numpy()
        start = layout.batch.prompts[number].score_start
        sampled = layout.positions[number]
        return worst_positions(kl, start, sampled, self._plan.worst_positions)

    def _isolate_head(self, measured: Measured, layout: Layout, heads: tuple[Head, Head]) -> None:
        rows = layout.measured(0, layout.positions[0])
        errors, differing = isolate_head(*heads, rows, measured.outputs.width)
        measured.isolated_head = errors
        seen = self._head_rows.setdefault(measured.name, set())
        seen |= differing
        few = len(seen) <= MAX_HEAD_ROWS
        self.report.head_rows[measured.name] = tuple(sorted(seen)) if few else ()
