"""prompts → models → capture → metrics: everything of a run that needs the models in memory."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from quantwatch.capture.long_prompts import try_chunks
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.shards.partials import Spread
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.domain import Block, Progress, Suite, Variant
from quantwatch.errors import ModelError, UserError
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.models.compatibility import check_compatible
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.served.model import ServedModel
from quantwatch.models.served.opening import open_served
from quantwatch.pipeline.executors.spreading import Spreading
from quantwatch.pipeline.loading import load_one, pinned_threads
from quantwatch.pipeline.overlap import overlap_notes
from quantwatch.pipeline.request import RunRequest
from quantwatch.prompts.loading import load_suite

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run. A candidate that could not be loaded has a reason instead."""

    reference: LoadedModel
    candidates: Mapping[str, LoadedModel]
    failures: Mapping[str, str]
    notes: Mapping[str, tuple[str, ...]]
    served: Mapping[str, ServedModel] = field(default_factory=dict)
    """Candidates that are asked instead of loaded."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """How far logits of candidates were off in chunks, where that was tried when they came."""

    def variant(self, name: str) -> Variant:
        """Return a candidate that was loaded, or that answered."""
        found = self.candidates.get(name)
        return self.served[name].variant if found is None else found.variant


@dataclass(frozen=True, slots=True)
class Measured:
    """What a capture left behind, before anything is judged. Valid while the sinks are open."""

    suite: Suite
    models: Models
    report: CaptureReport
    sink: Aggregator
    floor: Mapping[tuple[str, str], float]
    timings_s: dict[str, float] = field(default_factory=dict)
    floor_by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Condition ("reference" is another batch) → metric → largest floor at any scope."""

    def blocks(self) -> Iterator[Block]:
        """Yield all candidates' blocks, one at a time."""
        names = [*self.models.candidates, *self.models.served]
        return chain.from_iterable(
            self.sink.blocks(name) for name in names if name not in self.report.failed
        )


@contextmanager
def measure_check(request: RunRequest, progress: Progress) -> Iterator[Measured]:
    """Load the models of a check and capture its suite; the spool lives as long as the context."""
    started = time.perf_counter()
    spreading = Spreading.of(request)
    progress.start("load", 0)
    reference = load_one(request, REFERENCE, request.check.reference)
    suite = suite_for(request, reference)
    models = _load_candidates(request, reference, suite)
    load_s = time.perf_counter() - started
    loaded = {REFERENCE: models.reference, **models.candidates}
    spread = None if spreading is None else spreading.over(loaded, suite)
    with measure_models(request, models, suite, progress, spread=spread) as measured:
        measured.timings_s["load"] = load_s
        yield measured


@contextmanager
def measure_models(
    request: RunRequest,
    models: Models,
    suite: Suite,
    progress: Progress,
    plan: CapturePlan | None = None,
    spread: Spread | None = None,
) -> Iterator[Measured]:
    """Capture a suite on models that are loaded already, by the check's plan or another one.

    Without a `spread` this process measures everything, whatever the check's executor: models that
    were changed after they were loaded are nowhere else.
    """
    floor, spool = NoiseFloor(), request.cache_dir / "spool"
    with pinned_threads(request.check.threads), Aggregator(suite, spool) as sink:
        candidates: dict[str, LoadedModel | ServedModel] = {**models.candidates, **models.served}
        every = {REFERENCE: models.reference, **candidates}
        # Another plan is another reference, for this once: it isn't kept.
        shelf = None if plan is not None else _shelf(request, models.reference)
        wanted = (plan or request.plan).over(suite)
        subject = Subject(every, suite, wanted, shelf, models.tried, spread)
        report = capture(subject, sink, floor, progress)
        if report.failed and len(report.failed) == len(candidates):
            raise ModelError("; ".join(f"{name}: {why}" for name, why in report.failed.items()))
        timings = dict(report.timings_s)
        yield Measured(suite, models, report, sink, floor.values, timings, floor.largest())


def _shelf(request: RunRequest, reference: LoadedModel) -> Shelf | str | None:
    """Return where the reference is kept, why it can't be, or None when nobody wants it."""
    if not request.check.reference_cache:
        return None
    kind = reference.variant.source.get("kind")
    if kind in ("factory", "module"):
        return f"the code of a {kind} is no part of its fingerprint: what it computes isn't known"
    return Shelf(request.cache_dir / "reference", request.reference_bytes)


def suite_for(request: RunRequest, reference: LoadedModel) -> Suite:
    """Return the suite of a check as its reference reads it. Raises PromptError."""
    return load_suite(
        request.suite,
        reference.tokenizer,
        base_dir=request.base_dir,
        max_positions=reference.max_positions,
        allow_beyond_context=request.check.allow_beyond_context,
        num_tokens=reference.num_tokens,
    )


def _load_candidates(request: RunRequest, reference: LoadedModel, suite: Suite) -> Models:
    """Load what can be loaded. Raises the first UserError when no candidate is left."""
    loaded: dict[str, LoadedModel] = {}
    served: dict[str, ServedModel] = {}
    failures: dict[str, UserError] = {}
    notes: dict[str, tuple[str, ...]] = {}
    tried: dict[str, float] = {}
    for config in request.check.candidates:
        try:
            if config.served is not None:
                served[config.name] = open_served(config.name, config, reference, suite)
                notes[config.name] = ()
                continue
            model = load_one(request, config.name, config)
            seen = overlap_notes(suite, model.calibrated_on)
            notes[config.name] = (*seen, *check_compatible(reference, model))
            tried |= try_chunks({config.name: model}, REFERENCE, suite, request.plan.prefill_chunk)
            loaded[config.name] = model
        except UserError as error:
            failures[config.name] = error
    if not loaded and not served:
        raise next(iter(failures.values()))
    said = {name: str(error) for name, error in failures.items()}
    return Models(reference, loaded, said, notes, served, tried)
