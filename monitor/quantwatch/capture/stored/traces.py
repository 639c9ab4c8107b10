"""A trace as a pack and back: hidden states, passages, routers' choices, reasons."""

from typing import Any

import torch
from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.routers import Choices
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.packing import Packed
from quantwatch.capture.trace import Passage, Trace
from quantwatch.domain import Scope
from quantwatch_kernels.compare.routing import Routing

_ROWS, _HEAD_INPUT = "rows", "head input"


def pack_trace(trace: Trace, linear_rows: Tensor | None) -> Packed:
    """Return a trace as what is written; `linear_rows` are those it was asked for."""
    packed = Packed()
    for scope, tensor in trace.taps.items():
        packed.add(f"tap {scope}", tensor)
    packed.add(_HEAD_INPUT, trace.head_input)
    if linear_rows is not None:
        packed.add(_ROWS, linear_rows)
    for scope, passage in trace.passages.items():
        for number, tensor in enumerate(passage.inputs):
            packed.add(f"input {number} of {scope}", tensor)
        packed.add(f"output of {scope}", passage.output)
    for scope, routing in trace.choices.routings.items():
        for name in ("ids", "weights", "decided"):
            packed.add(f"router {name} of {scope}", getattr(routing, name))
    packed.structure = {
        "taps": list(trace.taps),
        "passages": [[s, len(p.inputs), p.rows is not None] for s, p in trace.passages.items()],
        "unmeasured": list(trace.unmeasured.items()),
        "routings": [[s, r.experts] for s, r in trace.choices.routings.items()],
        "unknown": list(trace.choices.unknown.items()),
    }
    return packed


def unpack_trace(packed: Packed, batch: Batch, linear_rows: Tensor | None) -> Trace:
    """Return the trace of a batch that a pack holds. Raises DamagedError when it holds another."""
    found = packed.structure
    taps = {Scope(scope): packed[f"tap {scope}"] for scope in found["taps"]}
    if any(len(rows) != batch.num_tokens for rows in (*taps.values(), packed[_HEAD_INPUT])):
        raise DamagedError(f"it is no trace of a batch of {batch.num_tokens} tokens")
    if linear_rows is not None and not torch.equal(packed[_ROWS], linear_rows):
        raise DamagedError("its linears were kept at other positions")
    return Trace(
        batch,
        taps,
        packed[_HEAD_INPUT],
        {Scope(s): _passage(packed, (s, *rest), linear_rows) for s, *rest in found["passages"]},
        {Scope(scope): reason for scope, reason in found["unmeasured"]},
        Choices(
            {Scope(scope): _routing(packed, scope, count) for scope, count in found["routings"]},
            {Scope(scope): reason for scope, reason in found["unknown"]},
        ),
    )


def _passage(packed: Packed, record: tuple[Any, ...], linear_rows: Tensor | None) -> Passage:
    scope, count, has_rows = record
    inputs = tuple(packed[f"input {number} of {scope}"] for number in range(count))
    return Passage(inputs, packed[f"output of {scope}"], linear_rows if has_rows else None)


def _routing(packed: Packed, scope: str, experts: int) -> Routing:
    ids, weights, decided = (
        packed[f"router {name} of {scope}"] for name in ("ids", "weights", "decided")
    )
    return Routing(ids, weights, experts, decided)
