"""Run the reference and its candidates side by side over a suite and compare them as they go."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch

from quantwatch.capture.basis import incomparable, refuse_as_reference
from quantwatch.capture.batches import Batch, plan_batches, regroup
from quantwatch.capture.conditions import measure_conditions
from quantwatch.capture.events import event_words
from quantwatch.capture.layout import lay_out
from quantwatch.capture.measure import Measurer
from quantwatch.capture.observer import check_observer_effect, plain_logits
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import readout_of
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.sampling import isolated_prompts, stratified_positions
from quantwatch.capture.trace import LiveTraceSource, Trace, TraceSource
from quantwatch.domain import Progress, Prompt, Scope, Sink, Suite, is_layer, layer_index
from quantwatch.errors import CaptureError
from quantwatch.models.loaded import LoadedModel

REFERENCE = "reference"
_OBSERVED_TOKENS = 4


def capture_suite(
    models: Mapping[str, LoadedModel],
    suite: Suite,
    plan: CapturePlan,
    sink: Sink,
    floor: Sink,
    progress: Progress,
) -> CaptureReport:
    """Measure every candidate on every prompt; the noise floor goes to `floor`.

    `models` holds the reference under that name, and the candidates under theirs.

    The floor is the reference against itself: the start of some isolated prompts beside another
    text instead of alone (as "reference"), and a few tokens under another thread count and another
    attention implementation (as "threads" and "attention"); without isolated prompts there is none.
    Nothing is kept of a prompt once it was observed, and every hook is removed however this ends.

    Raises:
        CaptureError: a tap didn't fire exactly once, looking changed the logits, or modules of
            reference and candidate don't take the same hidden states.
    """
    report = CaptureReport()
    _describe(models, report)
    with torch.no_grad(), ExitStack() as stack:
        probes = _observe(models, suite.prompts[0], plan, report, stack)
        source = LiveTraceSource(probes[REFERENCE])
        others = {name: probe for name, probe in probes.items() if name != REFERENCE}
        main = Measurer(source, others, plan, sink, report)
        quiet = replace(
            plan, worst_positions=0, lens="sampled"
        )  # shown only, and nobody looks at the floor's
        itself = {REFERENCE: probes[REFERENCE]}
        noise = Measurer(source, itself, quiet, floor, CaptureReport())
        night = _Night(source, (main, noise), suite, plan, models[REFERENCE].max_positions)
        night.run(progress)
        short = _condition_prompt(suite, plan)
        if short is not None:
            with report.timed("floor"):
                found = measure_conditions(probes[REFERENCE], suite.hash, short, quiet, floor)
                report.noise_floor_sources |= found
        _prove(probes, report)
    return report


class _Night:
    """One pass over a suite."""

    def __init__(
        self,
        source: TraceSource,
        measurers: tuple[Measurer, Measurer],
        suite: Suite,
        plan: CapturePlan,
        max_positions: int | None,
    ) -> None:
        self._source = source
        self._main, self._noise = measurers
        self._suite = suite
        self._plan = plan
        self._max_positions = max_positions

    def run(self, progress: Progress) -> None:
        """Measure batch by batch; `progress` advances after every model's pass."""
        suite, plan, report = self._suite, self._plan, self._main.report
        isolated = isolated_prompts(suite, plan.isolated_fraction)
        floor = self._floor_prompts(isolated)
        batches = plan_batches(suite.prompts, isolated, plan.batch_tokens)
        report.num_padding_tokens = sum(batch.num_padding for batch in batches)
        again = sum(self._floor_length(p) for p in suite.prompts if p.index in floor)
        progress.start("measure", suite.num_tokens * (1 + len(self._main.probes)) + again)
        for batch in batches:
            self._measure(batch, progress, with_floor=batch.prompts[0].index in floor)

    def _floor_prompts(self, isolated: frozenset[int]) -> frozenset[int]:
        chosen = tuple(prompt for prompt in self._suite.prompts if prompt.index in isolated)
        fraction = self._plan.floor_fraction if chosen else 0.0
        return isolated_prompts(replace(self._suite, prompts=chosen), fraction)

    def _floor_length(self, prompt: Prompt) -> int:
        return min(prompt.score_start + self._plan.floor_tokens, len(prompt.token_ids))

    def _measure(self, batch: Batch, progress: Progress, *, with_floor: bool) -> None:
        """Measure one batch. Its trace ends with this call, before the next one begins."""
        report, digest = self._main.report, self._suite.hash
        layout = lay_out(batch, digest, self._plan)
        count = self._plan.isolated_positions
        linears = stratified_positions(digest, batch.prompts[0], count, "linears")
        with report.timed("reference"):
            trace = self._source.trace(batch, layout.measured(0, linears))
        progress.advance(batch.num_tokens)
        for scope, reason in trace.unmeasured.items():
            report.missing.setdefault(scope, {})[REFERENCE] = reason
        self._main.measure(trace, layout, progress)
        if with_floor:
            with report.timed("floor"):
                self._measure_floor(trace, progress)

    def _measure_floor(self, trace: Trace, progress: Progress) -> None:
        start = trace.first(self._floor_length(trace.batch.prompts[0]))
        beside = regroup(start.batch.prompts[0], self._suite.prompts, self._max_positions)
        self._noise.measure(start, lay_out(beside, self._suite.hash, self._plan), progress)


def _condition_prompt(suite: Suite, plan: CapturePlan) -> Prompt | None:
    """Return the few tokens on which the floor's other conditions are measured, if they are."""
    chosen = isolated_prompts(suite, plan.isolated_fraction)
    if not chosen or not plan.condition_tokens:
        return None
    prompts = [prompt for prompt in suite.prompts if prompt.index in chosen]
    best = min(prompts, key=lambda p: (p.score_start, -p.num_scored, p.index))
    return replace(best, token_ids=best.token_ids[: best.score_start + plan.condition_tokens])


def _observe(
    models: Mapping[str, LoadedModel],
    prompt: Prompt,
    plan: CapturePlan,
    report: CaptureReport,
    stack: ExitStack,
) -> dict[str, Probe]:
    """Compare unhooked with hooked logits of every model and return the hooked models."""
    ids = prompt.token_ids[:_OBSERVED_TOKENS]
    short = Batch((replace(prompt, token_ids=ids),))
    with report.timed("observer"):
        plain = {name: plain_logits(model, short) for name, model in models.items()}
        probes = {n: stack.enter_context(Probe(n, model)) for n, model in models.items()}
        for name, probe in probes.items():
            lens = name == REFERENCE and plan.lens_positions > 0
            report.observer_effect[name] = check_observer_effect(
                probe, readout_of(probe.model), short, plain[name], lens=lens
            )
    return probes


def _describe(models: Mapping[str, LoadedModel], report: CaptureReport) -> None:
    """Note where the taps are in each model, and what is missing.

    Raises:
        CaptureError: a candidate lacks a place that can't be left out, or the reference can't
            be compared with.
    """
    reference = models[REFERENCE].anatomy
    refuse_as_reference(models[REFERENCE])
    for name, model in models.items():
        anatomy = model.anatomy
        for scope, reason in incomparable(model).items():
            report.missing.setdefault(scope, {})[name] = reason
        for scope, reason in anatomy.missing.items():
            report.missing.setdefault(scope, {})[name] = reason
        for scope in {**reference.taps, **reference.linears}:
            if scope in anatomy.taps:
                report.taps.setdefault(scope, {})[name] = anatomy.taps[scope]
            elif scope not in anatomy.linears:
                report.missing.setdefault(scope, {}).setdefault(name, "no such module")
        lost = [s for s in reference.taps if s not in anatomy.taps and _is_needed(s)]
        if lost or anatomy.num_layers != reference.num_layers:
            raise CaptureError(
                f"{name} has {anatomy.num_layers} layers and lacks {lost}; the reference has "
                f"{reference.num_layers} layers"
            )


def _is_needed(scope: Scope) -> bool:
    """Say whether a tap must be in both models: all but the attention and MLP of a layer."""
    return is_layer(scope) or layer_index(scope) is None


def _prove(probes: Mapping[str, Probe], report: CaptureReport) -> None:
    """Note how often every tap fired, and what the kernels did unasked."""
    for name, probe in probes.items():
        report.num_forwards[name] = probe.num_forwards
        report.events[name] = event_words(probe.watch, probe.overflows())
        for scope, path in probe.routers.paths.items():
            report.routers.setdefault(scope, {})[name] = path
        for scope in probe.model.anatomy.taps:
            report.firings.setdefault(scope, {})[name] = probe.all_firings[scope]
