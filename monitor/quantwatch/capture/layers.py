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
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics
from quantwatch_kernels.compare.rounding import Factors
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
    *,
    products: Factors = "float32",
) -> list[LayerReading]:
    """Compare the layers' outputs (reference, candidate) [R, H]; without a readout, no lens.

    A request is a prompt's number in the batch and positions; one reading per request, in order.
    """
    rows = torch.cat([layout.measured(n, at) for n, at in requests])
    if not len(rows):  # a chunk of a long prompt may lie between its sampled positions
        return [LayerReading(tuple(layers), at, {}) for _, at in requests]
    theirs, ours = (torch.cat([pair[side][rows] for pair in layers.values()]) for side in (0, 1))
    theirs, ours = comparable(theirs, ours)
    columns = {"feature_kl": feature_kl(theirs, ours)}
    if readout is not None:
        chunk = chunk_rows(readout, len(theirs))
        found = lens_statistics(theirs, ours, readout, chunk=chunk, products=products)
        columns |= zip(("lens_kl", *LensStatistics._fields[1:]), found, strict=True)
    ends = np.cumsum([len(at) for _, at in requests])[:-1]
    parts = {
        metric: np.split(column.cpu().numpy().reshape(len(layers), len(rows)), ends, axis=1)
        for metric, column in columns.items()
    }
    return [
        LayerReading(tuple(layers), at, {metric: part[n] for metric, part in parts.items()})
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
