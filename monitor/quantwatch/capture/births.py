"""Where non-finite values are born: the first place in forward order, per prompt.

A place where the reference isn't finite either is the reference's: the candidate is only blamed for
non-finite values where the reference has a number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwatch.capture.compare import Reading
from quantwatch.capture.layout import Layout
from quantwatch.capture.outputs import Outputs
from quantwatch.domain import HEAD, NonFinite, Scope


def reference_births(
    reading: Reading, outputs: Outputs | None, layout: Layout
) -> list[NonFinite | None]:
    """Return the reference's first non-finite value in each prompt of the batch.

    Without outputs (no position is scored), of the taps alone.
    """
    bad = ~reading.reference_norms.cpu().isfinite()
    return _first(layout, reading.scopes, bad, None if outputs is None else outputs.reference_bad)


def candidate_births(
    reading: Reading, outputs: Outputs | None, layout: Layout
) -> list[NonFinite | None]:
    """Return the candidate's first non-finite value per prompt where the reference is finite."""
    bad = (~reading.taps.max_abs.isfinite() & reading.reference_norms.isfinite()).cpu()
    return _first(layout, reading.scopes, bad, None if outputs is None else outputs.candidate_bad)


def _first(
    layout: Layout, scopes: Sequence[Scope], bad: Tensor, head: Tensor | None
) -> list[NonFinite | None]:
    """Find the first place of each prompt in masks: taps [S, R], then the head's scored rows."""
    spread = torch.zeros(1, layout.batch.num_tokens, dtype=torch.bool)
    if head is not None:
        spread[0, layout.rows] = head.cpu()
    masks, places = torch.cat([bad, spread]), (*scopes, HEAD)
    found: list[NonFinite | None] = []
    for prompt, rows in zip(layout.batch.prompts, layout.batch.slices, strict=True):
        hits = masks[:, rows].nonzero()  # in the order of the scopes, then of the positions
        birth = (
            NonFinite(places[int(hits[0, 0])], prompt.index, int(hits[0, 1])) if len(hits) else None
        )
        found.append(birth)
    return found
