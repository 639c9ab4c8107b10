"""Turn what was measured on a batch into one observation per prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.compare import Reading, headroom_bits
from quantwatch.capture.estimates import LayerEstimates, with_estimates
from quantwatch.capture.layers import LayerReading
from quantwatch.capture.layout import Layout
from quantwatch.capture.outputs import Outputs
from quantwatch.capture.routing import both, router_loads, router_matrices
from quantwatch.capture.trace import Trace
from quantwatch.domain import (
    HEAD,
    MODEL,
    NonFinite,
    Observation,
    Scope,
    TokenMatrix,
    TopLogits,
)
from quantwatch_kernels.compare.output import OutputStatistics
from quantwatch_kernels.compare.tap import TapStatistics

_EVERYWHERE = (
    *("logit_kl", "reverse_kl", "js", "tv", "top1_agreement", "topk_overlap_k5"),
    *("topk_logit_deviation_k5", "topk_logit_deviation_k3"),
)
_WITH_TARGET = ("delta_p", "nll_reference", "nll_candidate", "nll_difference")

Matrix = NDArray[np.float64]


@dataclass(slots=True)
class Measured:
    """Everything measured of one candidate on one batch."""

    name: str
    dtype: torch.dtype
    reading: Reading
    outputs: Outputs
    samples: Sequence[LayerReading] = ()
    extras: Sequence[LayerReading] = ()
    estimates: LayerEstimates | None = None
    """At every scored position, if the plan asks for that."""
    isolated_head: Tensor | None = None
    """Float64, at the layout's sampled positions of the only prompt."""
    births: Sequence[NonFinite | None] = field(default_factory=list)


def observations(measured: Measured, trace: Trace, layout: Layout) -> list[Observation]:
    """Return one observation per prompt of the batch; only scored positions are in it."""
    taps = _tap_matrices(measured.reading)
    isolated = _isolated_matrices(measured, trace)
    pairs, _ = both(trace.choices, measured.reading.choices)
    routers = router_matrices(pairs)
    found = []
    for number, prompt in enumerate(layout.batch.prompts):
        matrices = [
            *_output_matrices(measured.outputs, layout, number),
            *_scored(taps, layout, number),
            *_head_matrices(measured, layout, number),
            *_layer_matrices(measured, layout, number),
            *_scored(isolated, layout, number),
            *_scored(routers, layout, number),
            *_sampled_isolated(measured, trace, layout),
        ]
        top = _top(measured.outputs.statistics, layout.spans[number])
        loads = tuple(router_loads(pairs, layout, number))
        birth = measured.births[number]
        kept = tuple(m for m in matrices if m.positions is None or len(m.positions))
        found.append(Observation(measured.name, prompt.index, kept, top, birth, loads))
    return found


def _numpy(columns: Sequence[Tensor]) -> Matrix:
    return torch.stack(list(columns)).double().cpu().numpy()


def _output_matrices(outputs: Outputs, layout: Layout, number: int) -> list[TokenMatrix]:
    span, prompt = layout.spans[number], layout.batch.prompts[number]
    statistics = outputs.statistics
    matrices = [
        TokenMatrix(name, (MODEL,), _numpy([getattr(statistics, name)[span]]))
        for name in _EVERYWHERE
    ]
    if outputs.leaked_mass is not None:
        leaked = _numpy([outputs.leaked_mass[span]])
        matrices.append(TokenMatrix("leaked_mass", (MODEL,), leaked))
    known = int((layout.targets[span] >= 0).sum())  # all but a prompt's last
    if known:
        part = slice(span.start, span.start + known)
        at = np.arange(prompt.score_start, prompt.score_start + known)
        matrices += [
            TokenMatrix(name, (MODEL,), _numpy([getattr(statistics, name)[part]]), at)
            for name in _WITH_TARGET
        ]
    return matrices


def _tap_matrices(reading: Reading) -> dict[str, tuple[tuple[Scope, ...], Matrix]]:
    """Return metric → scopes and values [S, R] of all taps."""
    columns = {**reading.taps._asdict(), "headroom_bits": reading.headroom_bits}
    return {name: (reading.scopes, column.cpu().numpy()) for name, column in columns.items()}


def _isolated_matrices(
    measured: Measured, trace: Trace
) -> dict[str, tuple[tuple[Scope, ...], Matrix]]:
    """Return the isolated errors that were measured at every position."""
    errors = measured.reading.isolated
    scopes = tuple(s for s, passage in trace.passages.items() if passage.rows is None)
    scopes = tuple(scope for scope in scopes if scope in errors)
    if not scopes:
        return {}
    return {"isolated_error": (scopes, _numpy([errors[scope] for scope in scopes]))}


def _scored(
    found: Mapping[str, tuple[tuple[Scope, ...], Matrix]], layout: Layout, number: int
) -> list[TokenMatrix]:
    where, prompt = layout.batch.slices[number], layout.batch.prompts[number]
    part = slice(where.start + prompt.score_start, where.stop)
    return [
        TokenMatrix(name, scopes, np.ascontiguousarray(values[:, part]))
        for name, (scopes, values) in found.items()
    ]


def _sampled_isolated(measured: Measured, trace: Trace, layout: Layout) -> list[TokenMatrix]:
    """Return the isolated errors of linears and head, each at its own positions."""
    errors = measured.reading.isolated
    scopes = tuple(s for s, passage in trace.passages.items() if passage.rows is not None)
    scopes = tuple(scope for scope in scopes if scope in errors)
    matrices = []
    if scopes:
        rows = trace.passages[scopes[0]].rows
        assert rows is not None  # of the batch's only prompt: a row is a position
        values = _numpy([errors[scope] for scope in scopes])
        matrices.append(TokenMatrix("isolated_error", scopes, values, rows.numpy()))
    if measured.isolated_head is not None:
        values = _numpy([measured.isolated_head])
        matrices.append(TokenMatrix("isolated_error", (HEAD,), values, layout.positions[0]))
    return matrices


def _head_matrices(measured: Measured, layout: Layout, number: int) -> list[TokenMatrix]:
    """Return the head's statistics as a tap, at the sampled positions."""
    counts = [len(at) for at in layout.positions]
    first = sum(counts[:number])
    part, at = slice(first, first + counts[number]), layout.positions[number]
    stats = measured.outputs.head
    columns = {name: getattr(stats, name)[part] for name in TapStatistics._fields}
    columns["headroom_bits"] = headroom_bits(columns["max_abs"], torch.finfo(measured.dtype).max)
    return [TokenMatrix(name, (HEAD,), _numpy([column]), at) for name, column in columns.items()]


def _layer_matrices(measured: Measured, layout: Layout, number: int) -> list[TokenMatrix]:
    if measured.estimates is not None:
        worst = next(iter(measured.extras[number : number + 1]), None)
        exact = measured.samples[number], worst
        return with_estimates(exact, measured.estimates, layout, number)
    matrices = []
    for reading in measured.samples[number : number + 1]:
        matrices += [
            TokenMatrix(name, reading.scopes, values, reading.positions)
            for name, values in reading.statistics.items()
        ]
    for reading in measured.extras[number : number + 1]:
        matrices += [
            TokenMatrix(name, reading.scopes, values, reading.positions, "extra")
            for name, values in reading.statistics.items()
        ]
    return matrices


def _top(statistics: OutputStatistics, span: slice) -> TopLogits:
    return TopLogits(
        statistics.reference_ids[span].int().cpu().numpy(),
        statistics.reference_logits[span].cpu().numpy(),
        statistics.candidate_ids[span].int().cpu().numpy(),
        statistics.candidate_logits[span].cpu().numpy(),
        statistics.candidate_at_reference[span].cpu().numpy(),
    )
