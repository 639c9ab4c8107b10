"""Read layers through the lens: the reference's final norm and head, for both models.

All layers' rows at the sampled and at the worst positions of a batch go through the head together,
so that its weights are read few times. L layers, P positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.layout import Layout, Positions
from quantwatch.domain import Scope
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics


@dataclass(frozen=True, slots=True)
class LensReading:
    """Lens statistics of one prompt."""

    scopes: tuple[Scope, ...]
    positions: Positions
    statistics: Mapping[str, NDArray[np.float64]]
    """Metric → [L, P]."""


def read_lens(
    readout: Readout,
    layers: Mapping[Scope, tuple[Tensor, Tensor]],
    layout: Layout,
    requests: Sequence[tuple[int, Positions]],
) -> list[LensReading]:
    """Compare the layers' outputs (reference, candidate) [R, H] at some positions.

    A request is a prompt's number in the batch and positions; one reading per request, in order.
    """
    rows = torch.cat([layout.measured(n, at) for n, at in requests])
    theirs, ours = (torch.cat([pair[side][rows] for pair in layers.values()]) for side in (0, 1))
    found = lens_statistics(theirs, ours.to(theirs.device), readout)
    metrics = ("lens_kl", *LensStatistics._fields[1:])
    values = {
        metric: column.cpu().numpy().reshape(len(layers), len(rows))
        for metric, column in zip(metrics, found, strict=True)
    }
    ends = np.cumsum([len(at) for _, at in requests])[:-1]
    parts = {metric: np.split(matrix, ends, axis=1) for metric, matrix in values.items()}
    return [
        LensReading(tuple(layers), at, {metric: part[n] for metric, part in parts.items()})
        for n, (_, at) in enumerate(requests)
    ]


def cut(readout: Readout, width: int) -> Readout:
    """Return the readout with only the first `width` ids."""
    return replace(readout, width=width)


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
