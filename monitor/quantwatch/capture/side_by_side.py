"""Run the reference and its candidates side by side over a suite and compare them as they go."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.course import Course
from quantwatch.capture.floor import Floor
from quantwatch.capture.long_prompts import caches_dropped, try_chunks
from quantwatch.capture.measure import Measurer
from quantwatch.capture.observer import check_observer_effect, plain_logits
from quantwatch.capture.passes import Pass
from quantwatch.capture.places import REFERENCE, describe, prove
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import check_products, readout_of
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.served import ServedMeasurer
from quantwatch.capture.shards.partials import Fold, Spread
from quantwatch.capture.stored.opening import Night, opened
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
    tried: Mapping[str, float] = field(default_factory=dict)
    """Models that were tried in chunks before, by how far their logits were off: not again."""
    spread: Spread | None = None
    """Who measures the batches, nothing served and nothing kept then; None: this process."""


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

    With a `spread`, other processes measure the batches, to the same bits; the observer's effect
    and the floor's other conditions are measured here.

    Raises:
        ModelError: a prompt has to go in chunks and a model can't take it so, or the lens is to
            multiply in bfloat16 and the reference's head doesn't allow it.
        CaptureError: a tap didn't fire exactly once, looking changed the logits, or modules of
            reference and candidate don't take the same hidden states.
    """
    plan, report, use, every = subject.plan, CaptureReport(), Use(), subject.models.items()
    models = {name: model for name, model in every if isinstance(model, LoadedModel)}
    served = {name: model for name, model in every if isinstance(model, ServedModel)}
    if subject.spread is not None and (served or subject.shelf is not None):
        raise ValueError("what is served or kept is measured by one process; a spread was given")
    describe(models, served, report)
    reference = models[REFERENCE]
    course = Course(subject.suite, plan, reference.max_positions)
    report.failed |= dict.fromkeys(served, _NOT_IN_CHUNKS) if course.long else {}
    with torch.no_grad(), ExitStack() as stack:
        check_products(reference, plan)
        report.prefill_effect = _tried(subject, models)
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
            whole = Pass(side, (main, asked), Floor(probes[REFERENCE], course), course)
            _run(whole, Fold(main, probes, sink, floor), subject.spread, progress)
        asked.finish()
        prove({name: probes[name] for name in run}, report)
        _conclude(side, kept, report, use)
    report.reference_cache = use.to_json()
    return report


def _tried(subject: Subject, models: Mapping[str, LoadedModel]) -> dict[str, float]:
    """Return how far the logits of all models are off in chunks, the reference's first."""
    new = {name: model for name, model in models.items() if name not in subject.tried}
    found = try_chunks(new, REFERENCE, subject.suite, subject.plan.prefill_chunk)
    return {**found, **subject.tried}


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


def _run(whole: Pass, fold: Fold, spread: Spread | None, progress: Progress) -> None:
    """Measure the whole suite, here or by workers; what is measured once is measured here."""
    course, report = whole.course, whole.main.report
    report.num_padding_tokens = sum(batch.num_padding for batch in course.batches)
    report.chunked_prompts = len(course.long)
    report.has_estimates = course.plan.lens == "estimated"
    report.lens_products = course.plan.lens_products if course.plan.rounds_lens else "float32"
    progress.start("measure", whole.num_tokens)
    if spread is None:
        whole.run(course.batches, progress)
    else:
        with closing(spread.partials(course, progress)) as partials:
            for partial in partials:
                fold.add(partial)
        report.sharding = spread.told()
    whole.conditions()


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
