"""Other conditions under which a reference has to give the same numbers but for rounding.

Batch composition is measured apart (`side_by_side`). Here: another number of CPU threads, and
another attention implementation. A condition that cannot be had says why.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quantwatch.capture.batches import Batch
from quantwatch.capture.layout import Layout, lay_out
from quantwatch.capture.measure import Measurer
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.trace import LiveTraceSource, Trace
from quantwatch.domain import Observation, Prompt, Sink
from quantwatch.models.loaded import LoadedModel

THREADS, ATTENTION = "threads", "attention"
CONDITIONS = (THREADS, ATTENTION)
_OTHER = {"sdpa": "eager", "eager": "sdpa"}
_ROUNDINGS = 1000
_LARGEST = 0.1


@dataclass
class Kept:
    """A sink that keeps observations until it is known what they are worth."""

    observations: list[Observation] = field(default_factory=list)

    def observe(self, observation: Observation) -> None:
        """Keep an observation."""
        self.observations.append(observation)

    def largest_error(self) -> float:
        """Return the largest finite relative error at any tap."""
        errors = [
            m.values for o in self.observations for m in o.matrices if m.metric == "rel_error"
        ]
        found = [float(v[abs(v) < torch.inf].max(initial=0.0)) for v in errors]
        return max(found, default=0.0)


class Unseen:
    """A progress for work that is too short to be shown."""

    def start(self, stage: str, total_tokens: int) -> None:
        """Ignore a stage."""

    def advance(self, tokens: int) -> None:
        """Ignore tokens."""


def measure_conditions(
    probe: Probe, digest: str, prompt: Prompt, plan: CapturePlan, floor: Sink
) -> dict[str, str]:
    """Measure the reference against itself under the other conditions, on a batch of its own.

    Observations go to `floor` under the condition's name; isolated errors only under another
    attention. Only rounding is noise: what differs by more is left out. Return `measured` or the
    reason why not, by condition.
    """
    source, batch = LiveTraceSource(probe), Batch((prompt,), isolated=True)
    # Another batch object: inputs that differ by rounding alone are taken for the reference's own
    # (`Isolation`), which is a third of the price.
    layout = lay_out(replace(batch), digest, plan)
    trace = source.trace(batch, layout.measured(0, layout.positions[0]))
    plain = replace(trace, passages={}), lay_out(Batch((prompt,)), digest, plan)
    # Two threads on a busy machine wait for each other at every operation: the fewest there.
    views = {THREADS: plain, ATTENTION: (trace, layout)}
    return {
        condition: _measure(condition, (probe, source), views[condition], plan, floor)
        for condition in CONDITIONS
    }


def _measure(
    condition: str,
    reference: tuple[Probe, LiveTraceSource],
    view: tuple[Trace, Layout],
    plan: CapturePlan,
    floor: Sink,
) -> str:
    """Measure under one condition; return `measured`, or why nothing went to `floor`."""
    probe, source = reference
    if (reason := obstacle(condition, probe.model)) is not None:
        return reason
    kept = Kept()
    measurer = Measurer(source, {condition: probe}, plan, kept, CaptureReport())
    with under(condition, probe.model):
        measurer.measure(*view, Unseen())
    if (reason := _worth(kept, probe.model)) is not None:
        return reason
    for observation in kept.observations:
        floor.observe(observation)
    return "measured"


def _worth(kept: Kept, model: LoadedModel) -> str | None:
    """Say why what was measured is no noise, None when it is."""
    error = kept.largest_error()
    if is_rounding(error, model):
        return None
    return f"left out: the reference differs by {error:.3g} there, more than rounding does"


def obstacle(condition: str, model: LoadedModel) -> str | None:
    """Say why a model can't be measured under a condition, None when it can."""
    if condition == THREADS:
        on_cpu = model.device.type == "cpu"
        return None if on_cpu else f"not measurable: the reference is on {model.device}"
    current = _attention(model)
    can_switch = getattr(model.module, "_can_set_attn_implementation", lambda: False)()
    if current not in _OTHER or not can_switch:
        return "not measurable: the model can't switch its attention implementation"
    if _OTHER[current] == "sdpa" and not getattr(model.module, "_supports_sdpa", False):
        return "not measurable: the model has no second attention implementation"
    return None


@contextmanager
def under(condition: str, model: LoadedModel) -> Iterator[None]:
    """Change a condition for a while."""
    change = _other_threads() if condition == THREADS else _other_attention(model)
    with change:
        yield


def is_rounding(error: float, model: LoadedModel) -> bool:
    """Say whether a relative error can be rounding alone.

    Some models (with capped attention logits) compute something else under another implementation:
    that is no noise, and as a floor it would hide every fault.
    """
    return error <= min(_ROUNDINGS * torch.finfo(model.dtype).eps, _LARGEST)


@contextmanager
def _other_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _other_attention(model: LoadedModel) -> Iterator[None]:
    """Switch the attention of the whole model; every part gets back what it had, whatever fails."""
    current = _attention(model)
    assert current is not None
    found: list[Any] = [getattr(module, "config", None) for module in model.module.modules()]
    configs = {id(c): c for c in found if hasattr(c, "_attn_implementation")}.values()
    before = [(config, config._attn_implementation) for config in configs]
    try:
        model.module.set_attn_implementation(_OTHER[current])  # type: ignore[operator]
        yield
    finally:
        for config, name in before:  # outer ones first: they may hand theirs on
            config._attn_implementation = name


def _attention(model: LoadedModel) -> str | None:
    return getattr(getattr(model.module, "config", None), "_attn_implementation", None)
