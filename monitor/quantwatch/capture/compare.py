"""One candidate's pass over a batch, compared with the reference's trace as it goes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.capture.batches import Batch
from quantwatch.capture.calls import Call, hidden_output
from quantwatch.capture.isolated import Isolation, comparable
from quantwatch.capture.probe import Probe
from quantwatch.capture.trace import Trace
from quantwatch.domain import Scope, is_layer
from quantwatch.errors import CaptureError
from quantwatch_kernels.compare.tap import TapStatistics, tap_statistics


@dataclass(slots=True)
class Reading:
    """What a candidate's pass left behind. Values are float64 [R], R the batch's measured rows."""

    taps: dict[Scope, TapStatistics] = field(default_factory=dict)
    """In the order in which the taps fired."""
    headroom_bits: dict[Scope, Tensor] = field(default_factory=dict)
    isolated: dict[Scope, Tensor] = field(default_factory=dict)
    layers: dict[Scope, Tensor] = field(default_factory=dict)
    """The layers' outputs [R, H], kept until they are read off."""
    isolated_s: float = 0.0
    """Seconds of the pass that went into isolated errors."""
    head_input: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def is_equal(self) -> bool:
        """Whether every tap is equal to the reference's, bit for bit."""
        return all(bool((stats.rel_error == 0).all()) for stats in self.taps.values())


def read_candidate(probe: Probe, batch: Batch, trace: Trace, *, exact: bool = True) -> Reading:
    """Run a candidate on a batch of the trace's prompts and compare every tap.

    `exact` is explained in `Isolation`.

    Raises:
        CaptureError: a tap didn't fire once, or its hidden states have another shape.
    """
    listener = _Comparison(probe, batch, trace, exact)
    reading = listener.reading
    reading.head_input = batch.copy(probe.run(batch, listener))
    for scope in set(trace.passages) & set(probe.model.anatomy.linears):
        if probe.firings[scope] != 1:
            raise CaptureError(
                f"{probe.name}: linear {scope} fired {probe.firings[scope]} times in one forward, "
                "in the reference once"
            )
    reading.isolated = listener.isolation.errors
    reading.isolated_s = listener.isolation.seconds
    return reading


class _Comparison:
    """Compares every tap with the trace as soon as it fires."""

    def __init__(self, probe: Probe, batch: Batch, trace: Trace, exact: bool) -> None:
        self.reading = Reading()
        self.isolation = Isolation(probe, batch, trace.passages, exact=exact)
        self._probe = probe
        self._batch = batch
        self._trace = trace

    def before(self, scope: Scope, call: Call) -> None:
        """Nothing is needed before a module runs."""

    def after(self, scope: Scope, module: nn.Module, call: Call, output: Any) -> None:
        """Compare a tap's output; measure isolated errors once its layer is complete."""
        if scope in self._trace.taps and scope in self._probe.model.anatomy.taps:
            self._compare(scope, hidden_output(output, self._batch, f"{self._probe.name}: {scope}"))
        self.isolation.after(scope, module, call, output)

    def _compare(self, scope: Scope, output: Tensor) -> None:
        hidden, reference = self._batch.select(output), self._trace.taps[scope]
        if hidden.shape != reference.shape:
            raise CaptureError(
                f"{self._probe.name}: {scope} is {hidden.shape[-1]} wide, "
                f"the reference's is {reference.shape[-1]}"
            )
        theirs, ours = comparable(reference, hidden)
        reading, norm = self.reading, self._trace.norms[scope]
        stats = tap_statistics(theirs, ours, reference_norm=norm)
        reading.taps[scope] = stats
        reading.headroom_bits[scope] = headroom_bits(stats.max_abs, output.dtype)
        if is_layer(scope):
            reading.layers[scope] = self._batch.copy(output)


def headroom_bits(max_abs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log2 of the dtype's largest finite value over the magnitude: +∞ at 0, −∞ at ∞."""
    return torch.log2(torch.finfo(dtype).max / max_abs.double())
