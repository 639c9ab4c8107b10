"""One candidate's pass over a batch, compared with the reference's trace as it goes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.capture.basis import other_inputs
from quantwatch.capture.batches import Batch
from quantwatch.capture.calls import Call, hidden_output
from quantwatch.capture.isolated import Isolation
from quantwatch.capture.probe import Probe
from quantwatch.capture.routers import Choices
from quantwatch.capture.trace import Trace
from quantwatch.domain import Scope, is_layer
from quantwatch.errors import CaptureError
from quantwatch_kernels.compare.tap import TapNorms, TapStatistics, statistics_of, tap_norms
from quantwatch_kernels.quantize.basis import give_back


@dataclass(slots=True)
class Reading:
    """What a candidate's pass left behind. Float64; S taps, R the batch's measured rows."""

    scopes: tuple[Scope, ...] = ()
    """The taps in the order in which they fired."""
    taps: TapStatistics = field(default_factory=lambda: TapStatistics(*[torch.empty(0, 0)] * 4))
    """Columns [S, R]."""
    reference_norms: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """The reference's norms [S, R], not finite exactly where it isn't."""
    headroom_bits: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """[S, R]."""
    isolated: dict[Scope, Tensor] = field(default_factory=dict)
    """[R], or only the passage's rows."""
    layers: dict[Scope, Tensor] = field(default_factory=dict)
    """The layers' outputs [R, H], kept until they are read off."""
    isolated_s: float = 0.0
    """Seconds of the pass that went into isolated errors."""
    head_input: Tensor = field(default_factory=lambda: torch.empty(0))
    choices: Choices = field(default_factory=Choices)
    """Where the routers sent the tokens."""

    @property
    def is_equal(self) -> bool:
        """Whether every tap is equal to the reference's, bit for bit."""
        return bool((self.taps.rel_error == 0).all())


def read_candidate(probe: Probe, batch: Batch, trace: Trace, *, exact: bool = True) -> Reading:
    """Run a candidate on a batch of the trace's prompts and compare every tap.

    `exact` is explained in `Isolation`.

    Raises:
        CaptureError: a tap didn't fire once, or its hidden states have another shape.
    """
    listener = _Comparison(probe, batch, trace, exact)
    head_input = batch.copy(probe.run(batch, listener))
    reading = listener.finish()
    reading.head_input, reading.choices = head_input, probe.choices
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
        changed = other_inputs(probe.model) if trace.passages else {}
        passages = {s: passage for s, passage in trace.passages.items() if s not in changed}
        self.isolation = Isolation(probe, batch, passages, exact=exact)
        self._probe = probe
        self._batch = batch
        self._trace = trace
        self._norms: dict[Scope, TapNorms] = {}
        self._largest: list[Tensor] = []
        self._limits: list[float] = []
        self._layers: dict[Scope, Tensor] = {}

    def before(self, scope: Scope, call: Call) -> None:
        """Nothing is needed before a module runs."""

    def after(self, scope: Scope, module: nn.Module, call: Call, output: Any) -> None:
        """Compare a tap's output; measure isolated errors once its layer is complete."""
        if scope in self._trace.taps and scope in self._probe.model.anatomy.taps:
            hidden = hidden_output(output, self._batch, f"{self._probe.name}: {scope}")
            plain = give_back(module, hidden)
            if isinstance(plain, Tensor):  # else the report tells why it isn't compared
                self._compare(scope, plain)
                self._limit(scope, hidden, plain)
        self.isolation.after(scope, module, call, output)

    def finish(self) -> Reading:
        """Return the statistics of all taps, computed together."""
        scopes = tuple(self._norms)
        norms = TapNorms(*(_stack(column) for column in zip(*self._norms.values(), strict=True)))
        stats = statistics_of(norms)
        largest = _stack(self._largest)
        limits = torch.tensor(self._limits, dtype=torch.float64, device=largest.device)
        bits = headroom_bits(largest, limits[:, None])
        return Reading(scopes, stats, norms.reference, bits, layers=self._layers)

    def _compare(self, scope: Scope, output: Tensor) -> None:
        hidden, reference = self._batch.select(output), self._trace.taps[scope]
        if hidden.shape != reference.shape:
            raise CaptureError(
                f"{self._probe.name}: {scope} is {hidden.shape[-1]} wide, "
                f"the reference's is {reference.shape[-1]}"
            )
        self._norms[scope] = tap_norms(reference, hidden.to(reference.device))
        if is_layer(scope):
            self._layers[scope] = self._batch.copy(output)

    def _limit(self, scope: Scope, hidden: Tensor, plain: Tensor) -> None:
        """Note how near an output, as it is, comes to what its dtype can hold."""
        norms = self._norms[scope]
        largest = torch.maximum(norms.largest, -norms.smallest)
        if plain is not hidden:  # what was rotated back is nowhere in the model
            largest = self._batch.select(hidden).abs().amax(-1)
        self._largest.append(largest.abs().double())
        self._limits.append(torch.finfo(hidden.dtype).max)


def headroom_bits(max_abs: Tensor, limit: Tensor | float) -> Tensor:
    """Return log2 of a dtype's largest finite value over the magnitude: +∞ at 0, −∞ at ∞."""
    return torch.log2(limit / max_abs.double())


def _stack(columns: Sequence[Tensor]) -> Tensor:
    """Stack what may lie on the devices of several layers on the first one's."""
    return torch.stack([column.to(columns[0].device) for column in columns])
