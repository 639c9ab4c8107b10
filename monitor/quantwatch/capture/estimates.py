"""Every layer's KL at every scored position, estimated, and the exact sample it is held against.

The sample stays what means, tests and rules are about: `lens_kl` at the sampled positions.
Estimates fill the rest of its picture as extras, which never enter a mean, and have a row of their
own, `lens_kl_estimated`. Wherever both were taken the estimate's error is stored. The top-k
deviations need no estimate: all their logits are kept. L layers, S scored positions, P of a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.isolated import comparable
from quantwatch.capture.layers import LayerReading
from quantwatch.capture.layout import Layout
from quantwatch.capture.outputs import chunk_rows
from quantwatch.capture.sketches import LayerSketch, parts_of, side_by_side
from quantwatch.domain import Scope, TokenMatrix
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics
from quantwatch_kernels.compare.sketch_estimate import estimated_kl

_DEVIATIONS = LensStatistics._fields[1:]
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerEstimates:
    """One candidate's layers at all scored positions of a batch."""

    scopes: tuple[Scope, ...]
    kl: Matrix
    """Nats [L, S]."""
    deviations: Mapping[str, Matrix]
    """Metric → [L, S]: not estimated."""


def estimate_layers(
    readout: Readout,
    layers: Mapping[Scope, tuple[Tensor, Tensor]],
    layout: Layout,
    sketch: LayerSketch,
) -> LayerEstimates:
    """Estimate the layers' KL from pairs (reference, candidate) [R, H] and the reference's sketch.

    Rows that an estimate can't answer for are read in full.
    """
    scopes, found = tuple(layers), []
    theirs, ours = ([pair[side] for pair in layers.values()] for side in (0, 1))
    for part in parts_of(layout):
        kept, after = sketch.part(part, scopes), side_by_side(ours, layout, part)
        estimate = estimated_kl(after.to(kept.ids.device), kept, readout)
        columns = torch.stack([estimate.kl, *(getattr(estimate, name) for name in _DEVIATIONS)])
        again = estimate.unanswered.nonzero().flatten()
        if len(again):
            before = side_by_side(theirs, layout, part)
            pair = comparable(before[again], after[again.to(after.device)])
            chunk = chunk_rows(readout, len(again))
            columns[:, again] = torch.stack(lens_statistics(*pair, readout, chunk=chunk))
        found.append(columns.view(len(columns), -1, len(scopes)))
    kl, *deviations = torch.cat(found, dim=1).transpose(1, 2).cpu().numpy()
    return LayerEstimates(scopes, kl, dict(zip(_DEVIATIONS, deviations, strict=True)))


def with_estimates(
    exact: tuple[LayerReading, LayerReading | None],
    estimates: LayerEstimates,
    layout: Layout,
    number: int,
) -> list[TokenMatrix]:
    """Return a prompt's layer matrices: sample and worst positions were read exactly."""
    sample, worst = exact
    scopes, kl = estimates.scopes, estimates.kl[:, layout.spans[number]]
    start = layout.batch.prompts[number].score_start
    matrices = [
        TokenMatrix(name, scopes, np.ascontiguousarray(values[:, layout.spans[number]]))
        for name, values in estimates.deviations.items()
    ]
    matrices.append(TokenMatrix("lens_kl_estimated", scopes, np.ascontiguousarray(kl)))
    matrices += _exactly(sample, kl[:, sample.positions - start])
    shown = kl.copy()
    if worst is not None and len(worst.positions):
        matrices += _exactly(worst, kl[:, worst.positions - start], extra=True)
        shown[:, worst.positions - start] = worst.statistics["lens_kl"]
    everywhere = np.arange(start, start + shown.shape[1])
    matrices.append(TokenMatrix("lens_kl", scopes, shown, everywhere, "extra"))
    return matrices


def _exactly(reading: LayerReading, kl: Matrix, *, extra: bool = False) -> list[TokenMatrix]:
    """Return what was read in full at some positions, and how far estimates are off there."""
    exact = reading.statistics["lens_kl"]
    found = {"lens_kl_error": relative_difference(kl, exact)}
    found |= {k: v for k, v in reading.statistics.items() if k not in _DEVIATIONS}
    if extra:  # its picture is made of estimates as well
        del found["lens_kl"]
    else:
        with np.errstate(invalid="ignore"):
            found["lens_kl_difference"] = np.where(kl == exact, 0.0, kl - exact)
    role: Literal["sample", "extra"] = "extra" if extra else "sample"
    return [TokenMatrix(m, reading.scopes, v, reading.positions, role) for m, v in found.items()]


def relative_difference(estimate: Matrix, exact: Matrix) -> Matrix:
    """Return |estimate − exact| ÷ the larger of both; 0 when they are equal, 1 at most."""
    larger = np.maximum(estimate, exact)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(estimate == exact, 0.0, np.abs(estimate - exact) / larger)
