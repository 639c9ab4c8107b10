"""Compare the layers' outputs at the sampled and at the worst positions.

Read through the lens, the reference's final norm and head for both models, all layers' rows of a
batch go through the head together, so that its weights are read few times. The feature KL, kept for
parity, is taken at the same places: over every position it would cost as much as all other tap
statistics. L layers, P positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.isolated import comparable
from quantwatch.capture.layout import Layout, Positions
from quantwatch.capture.outputs import chunk_rows
from quantwatch.domain import Scope
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics_of_many
from quantwatch_kernels.compare.tap import feature_kl


@dataclass(frozen=True, slots=True)
class LayerReading:
    """Statistics of one prompt's layers at some positions."""

    scopes: tuple[Scope, ...]
    positions: Positions
    statistics: Mapping[str, NDArray[np.float64]]
    """Metric → [L, P]."""


def read_layers(
    readout: Readout | None,
    layers: Mapping[Scope, tuple[Tensor, Tensor]],
    layout: Layout,
    requests: Sequence[tuple[int, Positions]],
) -> list[LayerReading]:
    """Compare the layers' outputs (reference, candidate) [R, H]; without a readout, no lens.

    A request is a prompt's number in the batch and positions; one reading per request, in order.
    """
    return read_layers_of_many(readout, [layers], layout, requests)[0]


def read_layers_of_many(
    readout: Readout | None,
    models: Sequence[Mapping[Scope, tuple[Tensor, Tensor]]],
    layout: Layout,
    requests: Sequence[tuple[int, Positions]],
) -> list[list[LayerReading]]:
    """Do `read_layers` for models with the same layers: the reference is read off once."""
    rows = torch.cat([layout.measured(n, at) for n, at in requests])
    if not len(rows):  # a chunk of a long prompt may lie between its sampled positions
        nothing = [LayerReading(tuple(models[0]), at, {}) for _, at in requests]
        return [nothing for _ in models]
    pairs = [_at_rows(layers, rows) for layers in models]
    seen: list[LensStatistics] = []
    if readout is not None:
        theirs, others = pairs[0][0], [ours for _, ours in pairs]
        chunk = chunk_rows(readout, len(theirs))
        seen = lens_statistics_of_many(theirs, others, readout, chunk=chunk)
    names = ("lens_kl", *LensStatistics._fields[1:])
    found = []
    for number, pair in enumerate(pairs):
        columns = {"feature_kl": feature_kl(*pair)}
        columns |= zip(names, seen[number], strict=True) if seen else ()
        found.append(_readings(columns, tuple(models[0]), requests))
    return found


def _at_rows(layers: Mapping[Scope, tuple[Tensor, Tensor]], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layers' rows one after another, of both models."""
    theirs, ours = (torch.cat([pair[side][rows] for pair in layers.values()]) for side in (0, 1))
    return comparable(theirs, ours)


def _readings(
    columns: Mapping[str, Tensor],
    scopes: tuple[Scope, ...],
    requests: Sequence[tuple[int, Positions]],
) -> list[LayerReading]:
    """Cut columns over all layers' rows into one reading per request."""
    ends = np.cumsum([len(at) for _, at in requests])[:-1]
    parts = {
        metric: np.split(column.cpu().numpy().reshape(len(scopes), -1), ends, axis=1)
        for metric, column in columns.items()
    }
    return [
        LayerReading(scopes, at, {metric: part[n] for metric, part in parts.items()})
        for n, (_, at) in enumerate(requests)
    ]


def worst_positions(
    kl: NDArray[np.float64], start: int, sampled: Positions, count: int
) -> Positions:
    """Return up to `count` positions with the largest output KL that aren't sampled, ascending.

    `kl` [P] covers the scored positions from `start` on. A NaN is worse than anything.
    """
    ranked = np.where(np.isnan(kl), np.inf, kl)
    order = start + np.argsort(-ranked, kind="stable")
    fresh = order[~np.isin(order, sampled)]
    return np.sort(fresh[:count]).astype(np.int64)
