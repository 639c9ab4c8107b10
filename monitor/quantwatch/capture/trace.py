"""What the reference computed on one batch, and where that comes from.

A trace is the seam between the reference and everything that is compared with it: live today; a
stored or streamed reference only has to give the same record.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantwatch.capture.batches import Batch
from quantwatch.capture.calls import Call, hidden_output
from quantwatch.capture.outputs import Head
from quantwatch.capture.probe import Probe
from quantwatch.capture.readout import readout_of
from quantwatch.capture.routers import Choices
from quantwatch.capture.sketches import LayerSketch
from quantwatch.domain import EMBEDDING, HEAD, Scope


@dataclass(frozen=True, slots=True)
class Passage:
    """What went into and came out of a module of the reference: rows [R, ·] of the same tokens."""

    inputs: tuple[Tensor, ...]
    """The arguments that carry hidden states, in the order of the call."""
    output: Tensor
    rows: Tensor | None
    """Which measured rows these are, int64; None for all."""

    def first(self, count: int) -> "Passage":
        """Return the part at the first `count` measured rows."""
        kept = count if self.rows is None else int((self.rows < count).sum())
        inputs = tuple(tensor[:kept] for tensor in self.inputs)
        return Passage(inputs, self.output[:kept], None if self.rows is None else self.rows[:kept])


@dataclass(slots=True)
class Trace:
    """The reference's hidden states on one batch: copies that nothing else can change."""

    batch: Batch
    taps: dict[Scope, Tensor] = field(default_factory=dict)
    """Rows [R, ·] in the reference's dtype, in the order in which the taps fired."""
    head_input: Tensor = field(default_factory=lambda: torch.empty(0))
    passages: dict[Scope, Passage] = field(default_factory=dict)
    """What isolated errors need; empty unless the batch is isolated."""
    unmeasured: dict[Scope, str] = field(default_factory=dict)
    """Places that have no passage, each with the reason."""
    choices: Choices = field(default_factory=Choices)
    """Where the reference's routers sent the tokens."""
    sketches: dict[int, LayerSketch] = field(default_factory=dict)
    """Number of ids that are compared → what the lens saw of the layers, by one plan and suite."""

    def first(self, count: int) -> "Trace":
        """Return the trace of the only prompt's first `count` tokens, as views.

        It is what a pass over those tokens alone would leave but for rounding: attention looks
        backwards only.
        """
        (prompt,) = self.batch.prompts
        batch = replace(self.batch, prompts=(replace(prompt, token_ids=prompt.token_ids[:count]),))
        return Trace(
            batch,
            {scope: rows[:count] for scope, rows in self.taps.items()},
            self.head_input[:count],
            {scope: passage.first(count) for scope, passage in self.passages.items()},
            self.unmeasured,
            self.choices.first(count),
        )


class TraceSource(Protocol):
    """Where the reference's traces come from."""

    def head(self, inputs: Tensor) -> Head:
        """Return the reference's head on inputs [R, H] of one batch."""

    def trace(self, batch: Batch, linear_rows: Tensor | None = None) -> Trace:
        """Return the reference's trace of a batch; linears are kept at `linear_rows` only."""


class LiveTraceSource:
    """Runs the reference now. Only one batch's trace is alive at a time."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._readout = readout_of(probe.model)
        probe.routers.margins = True

    def head(self, inputs: Tensor) -> Head:
        """Return the reference's head on inputs [R, H] of one batch."""
        return Head.of(self._probe.model, self._readout, inputs)

    def trace(self, batch: Batch, linear_rows: Tensor | None = None) -> Trace:
        """Run the reference on a batch. Raises CaptureError when a tap doesn't fire once."""
        recorder = _Recorder(self._probe, batch, linear_rows)
        trace = recorder.trace
        trace.head_input = batch.copy(self._probe.run(batch, recorder))
        trace.choices = self._probe.choices
        anatomy = self._probe.model.anatomy
        for scope in (*anatomy.taps, *anatomy.linears) if batch.isolated else ():
            reason = self._reason(scope, trace)
            if reason is not None:
                trace.passages.pop(scope, None)
                trace.unmeasured[scope] = reason
        return trace

    def _reason(self, scope: Scope, trace: Trace) -> str | None:
        """Say why a place can't be measured in isolation."""
        if scope == HEAD:  # measured apart, from the head's input
            return None
        if scope in self._probe.model.anatomy.routed:
            return "sees only the tokens routed to it"
        count = self._probe.firings[scope]
        if count != 1:
            return f"fires {count} times in one forward of the reference"
        return None if scope in trace.passages else "does not map one row per token to one row"


class _Recorder:
    """Keeps copies of what the reference's modules take and give."""

    def __init__(self, probe: Probe, batch: Batch, linear_rows: Tensor | None) -> None:
        self.trace = Trace(batch)
        self._probe = probe
        self._linear_rows = linear_rows
        self._inputs: dict[Scope, tuple[Tensor, ...]] = {}
        self._latest: tuple[Tensor, int, Tensor] | None = None

    def before(self, scope: Scope, call: Call) -> None:
        """Copy the input: modules may change it in place."""
        batch = self.trace.batch
        if batch.isolated:
            rows, hidden = self._rows(scope), call.hidden(batch).values()
            self._inputs[scope] = tuple(self._copy(tensor, rows) for tensor in hidden)

    def after(self, scope: Scope, _: nn.Module, __: Call, output: Any) -> None:
        """Copy the output of a tap, and of a linear on an isolated batch."""
        trace, batch = self.trace, self.trace.batch
        inputs = self._inputs.pop(scope, ())
        if scope in self._probe.model.anatomy.taps:
            what = f"{self._probe.name}: {scope}"
            hidden = hidden_output(output, batch, what)
            kept = batch.copy(hidden)
            trace.taps[scope] = kept
            self._latest = None if hidden.is_inference() else (hidden, hidden._version, kept)
            if batch.isolated and (inputs or scope == EMBEDDING):
                trace.passages[scope] = Passage(inputs, kept, None)
        elif inputs:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and batch.fits(first):
                rows = self._rows(scope)
                trace.passages[scope] = Passage(inputs, batch.copy(first, rows), rows)

    def _copy(self, tensor: Tensor, rows: Tensor | None) -> Tensor:
        """Copy, unless it is the output that was copied last and hasn't changed since."""
        if rows is None and self._latest is not None:
            source, version, kept = self._latest
            if tensor is source and tensor._version == version:
                return kept
        return self.trace.batch.copy(tensor, rows)

    def _rows(self, scope: Scope) -> Tensor | None:
        return None if scope in self._probe.model.anatomy.taps else self._linear_rows
