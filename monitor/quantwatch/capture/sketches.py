"""What the lens saw of the reference's layers, kept so that candidates need few logits each.

Made by reading every layer at every scored position in full, once; a stored reference brings it
along. Rows are token by token, the layers of a token one after another: neighboring layers have
many of their likeliest ids in common, whose rows of the head are then still in the cache. L layers,
S scored positions of a batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantwatch.capture.layout import Layout
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.sampling import token_seeds
from quantwatch.domain import Scope, is_layer
from quantwatch_kernels.compare.lens import Readout
from quantwatch_kernels.compare.sketch import Sketch, join, sketch_rows
from quantwatch_kernels.compare.sketch_draws import hashes

TOKENS_AT_A_TIME = 256
"""Tokens whose layers are copied side by side: 18 MB for 30 layers of 576."""


@dataclass(frozen=True, slots=True)
class LayerSketch:
    """The layers of the reference at a batch's scored positions."""

    scopes: tuple[Scope, ...]
    sketch: Sketch
    """Rows [S · L], the layers of a position in the order of the scopes."""

    def part(self, positions: slice, scopes: Sequence[Scope]) -> Sketch:
        """Return the rows of some positions and scopes, positions first."""
        if tuple(scopes) == self.scopes:
            count = len(scopes)
            return self.sketch.rows(slice(positions.start * count, positions.stop * count))
        at = torch.arange(positions.start, positions.stop)[:, None] * len(self.scopes)
        columns = torch.tensor([self.scopes.index(scope) for scope in scopes])
        return self.sketch.rows((at + columns).flatten())


def sketch_layers(
    readout: Readout, taps: Mapping[Scope, Tensor], layout: Layout, plan: CapturePlan
) -> LayerSketch:
    """Sketch the layers among the reference's taps [R, H] at the scored positions of a batch."""
    layers = {scope: hidden for scope, hidden in taps.items() if is_layer(scope)}
    seeds = _seeds(layout, len(layers))
    found = []
    for part in parts_of(layout):
        theirs = side_by_side(list(layers.values()), layout, part)
        rows = slice(part.start * len(layers), part.stop * len(layers))
        sizes = plan.sketch_top, plan.sketch_draws
        found.append(sketch_rows(theirs, readout, *sizes, seeds[rows]))
    return LayerSketch(tuple(layers), join(found))


def parts_of(layout: Layout) -> Iterator[slice]:
    """Yield the scored positions' numbers, a few positions at a time."""
    for start in range(0, len(layout.rows), TOKENS_AT_A_TIME):
        yield slice(start, min(start + TOKENS_AT_A_TIME, len(layout.rows)))


def side_by_side(layers: Sequence[Tensor], layout: Layout, part: slice) -> Tensor:
    """Return the layers' rows at some of the scored positions [positions · L, H]."""
    rows = layout.rows[part].to(layers[0].device)
    hidden = torch.stack([layer[rows] for layer in layers], dim=1).flatten(0, 1)
    return hidden if hidden.dtype == torch.float64 else hidden.float()


def _seeds(layout: Layout, num_layers: int) -> Tensor:
    """Return a seed per scored position and layer: a hash of suite, prompt, position and layer."""
    prompts = layout.batch.prompts
    each = [token_seeds(layout.suite_hash, prompt, "sketch") for prompt in prompts]
    seeds = hashes(torch.from_numpy(np.concatenate(each)), num_layers)
    return torch.from_numpy(seeds.view(np.int64)).flatten()
