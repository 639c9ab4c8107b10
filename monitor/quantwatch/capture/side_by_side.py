"""Run the reference and its candidates side by side over a suite and compare them as they go."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.course import Course
from quantwatch.capture.floor import Floor
from quantwatch.capture.layout import lay_out
from quantwatch.capture.long_prompts import caches_dropped, drop_caches, try_chunks
from quantwatch.capture.measure import Measurer
from quantwatch.capture.observer import check_observer_effect, plain_logits
from quantwatch.capture.places import REFERENCE, describe, prove
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import check_products, readout_of
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.served import ServedMeasurer
from quantwatch.capture.stored.opening import Night, opened
from quantwatch.capture.stored.parts import CONDITIONS, floor_part
from quantwatch.capture.stored.reading import Kept
from quantwatch.capture.stored.recorder import Recorder
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.capture.stored.sides import LiveSide, side_of
from quantwatch.capture.stored.use import Use
from quantwatch.capture.trace import LiveTraceSource
from quantwatch.domain import Progress, Sink, Suite
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.served.model import ServedModel

T = TypeVar("T")
_NOT_IN_CHUNKS = (
    "not measurable: a prompt goes in chunks (prefill_chunk), a server is asked for all of it"
)
_OBSERVED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Subject:
    """What is captured: models by name (the reference under that name), texts, budgets."""

    models: Mapping[str, LoadedModel | ServedModel]
    suite: Suite
    plan: CapturePlan
    shelf: Shelf | str | None = None
    """Where the reference is kept from night to night, why it can't be, or None: nobody asked."""


def capture_suite(
    models: Mapping[str, LoadedModel | ServedModel],
    suite: Suite,
    plan: CapturePlan,
    sink: Sink,
    floor: Sink,
    progress: Progress,
) -> CaptureReport:
    """Do `capture` with a reference that is run."""
    return capture(Subject(models, suite, plan), sink, floor, progress)


def capture(subject: Subject, sink: Sink, floor: Sink, progress: Progress) -> CaptureReport:
    """Measure every candidate on every prompt; the noise floor goes to `floor`.

    Of a candidate that is served only what it tells is compared; if it can't be measured to the
    end, the report says why.

    The floor is the reference against itself: the start of some isolated prompts beside another
    text instead of alone (as "reference"), and a few tokens under another thread count and another
    attention implementation (as "threads" and "attention"); without isolated prompts there is none.
    Nothing is kept of a prompt once it was observed, and every hook is removed however this ends.

    A prompt longer than the plan's `prefill_chunk` goes in chunks (`long_prompts`).

    Raises:
        ModelError: a prompt has to go in chunks and a model can't take it so, or the lens is to
            multiply in bfloat16 and the reference's head doesn't allow it.
        CaptureError: a tap didn't fire exactly once, looking changed the logits, or modules of
            reference and candidate don't take the same hidden states.
    """
    plan, report, use, every = subject.plan, CaptureReport(), Use(), subject.models.items()
    models = {name: model for name, model in every if isinstance(model, LoadedModel)}
    served = {name: model for name, model in every if isinstance(model, ServedModel)}
    describe(models, served, report)
    reference = models[REFERENCE]
    course = Course(subject.suite, plan, reference.max_positions)
    report.failed |= dict.fromkeys(served, _NOT_IN_CHUNKS) if course.long else {}
    with torch.no_grad(), ExitStack() as stack:
        check_products(reference, plan)
        report.prefill_effect = try_chunks(models, REFERENCE, subject.suite, plan.prefill_chunk)
        night = Night(REFERENCE, reference, course, report, use)
        kept = stack.enter_context(opened(subject.shelf, night))
        run = models if kept is None or isinstance(kept, Recorder) else _without_reference(models)
        plain = _plain_logits(run, course, report)
        probes = {n: stack.enter_context(Probe(n, model)) for n, model in models.items()}
        _observe({name: probes[name] for name in run}, plain, course, report)
        side = side_of(kept, LiveTraceSource(probes[REFERENCE]), floor, course)
        others = _without_reference(probes)
        main = Measurer(side.source, others, plan, sink, report)
        asked = ServedMeasurer(side.source, served, reference.dtype, sink, report)
        with caches_dropped(probes.values()):
            _Night(side, (main, asked), Floor(probes[REFERENCE], course), course).run(progress)
        asked.finish()
        prove({name: probes[name] for name in run}, report)
        _conclude(side, kept, report, use)
    report.reference_cache = use.to_json()
    return report


def _conclude(
    side: LiveSide, kept: Kept | Recorder | None, report: CaptureReport, use: Use
) -> None:
    """Note what is said of a reference that wasn't run, and complete what was recorded."""
    if side.facts is not None:
        report.add_facts(REFERENCE, side.facts)
    side.finish(report.facts(REFERENCE))
    if side.floor_logit_kl is not None:
        use.floor_logit_kl = side.floor_logit_kl
    if isinstance(kept, Recorder):
        report.shift("reference", "recording", kept.seconds)


class _Night:
    """One pass over a suite."""

    def __init__(
        self,
        side: LiveSide,
        measurers: tuple[Measurer, ServedMeasurer],
        floor: Floor,
        course: Course,
    ) -> None:
        self._side = side
        self._main, self._served = measurers
        self._floor = floor
        self._course = course
        self._probes = (floor.probe, *self._main.probes.values())

    def run(self, progress: Progress) -> None:
        """Measure batch by batch; `progress` advances after every model's pass."""
        course, report = self._course, self._main.report
        suite = course.suite
        report.num_padding_tokens = sum(batch.num_padding for batch in course.batches)
        report.chunked_prompts = len(course.long)
        report.has_estimates = course.plan.lens == "estimated"
        report.rounds_lens = course.plan.rounds_lens
        again = sum(course.floor_length(p) for p in suite.prompts if p.index in course.floor)
        passes = 1 + len(self._main.probes) + self._served.num_models
        progress.start("measure", suite.num_tokens * passes + again)
        for batch in course.batches:
            self._measure(batch, progress)
            if batch.chunk is not None and batch.chunk.is_last:
                drop_caches(self._probes)
        if course.conditions is not None:
            with report.timed("floor"):
                found = self._side.part(CONDITIONS, self._floor.conditions)
                report.noise_floor_sources |= found

    def _measure(self, batch: Batch, progress: Progress) -> None:
        """Measure one batch. Its trace ends with this call, before the next one begins."""
        course, report = self._course, self._main.report
        layout = lay_out(batch, course.suite.hash, course.plan)
        with report.timed("reference"):
            trace = self._side.source.trace(batch, course.linear_rows(batch, layout))
        progress.advance(batch.num_tokens)
        for scope, reason in trace.unmeasured.items():
            report.missing.setdefault(scope, {})[REFERENCE] = reason
        self._main.measure(trace, layout, progress)
        self._served.measure(trace, layout, progress)
        with report.timed("reference"):
            self._side.keep(trace)
        if course.has_floor(batch):
            with report.timed("floor"):
                name = floor_part(course.number(batch))
                said = self._side.part(name, partial(self._floor.beside, trace))
            progress.advance(said["num_tokens"])


def _without_reference(found: Mapping[str, T]) -> dict[str, T]:
    return {name: each for name, each in found.items() if name != REFERENCE}


def _short(course: Course) -> Batch:
    prompt = course.suite.prompts[0]
    return Batch((replace(prompt, token_ids=prompt.token_ids[:_OBSERVED_TOKENS]),))


def _plain_logits(
    models: Mapping[str, LoadedModel], course: Course, report: CaptureReport
) -> dict[str, Tensor]:
    """Return a few tokens' logits of models without hooks."""
    with report.timed("observer"):
        return {name: plain_logits(model, _short(course)) for name, model in models.items()}


def _observe(
    probes: Mapping[str, Probe], plain: Mapping[str, Tensor], course: Course, report: CaptureReport
) -> None:
    """Compare unhooked with hooked logits of every model that is run."""
    with report.timed("observer"):
        for name, probe in probes.items():
            lens = name == REFERENCE and course.plan.lens_positions > 0
            report.observer_effect[name] = check_observer_effect(
                probe, readout_of(probe.model), _short(course), plain[name], lens=lens
            )
