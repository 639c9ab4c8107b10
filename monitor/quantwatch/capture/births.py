"""Where non-finite values are born: the first place in forward order, per prompt.

A place where the reference isn't finite either is the reference's: the candidate is only blamed for
non-finite values where the reference has a number.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantwatch.capture.compare import Reading
from quantwatch.capture.layout import Layout
from quantwatch.capture.outputs import Outputs
from quantwatch.capture.trace import Trace
from quantwatch.domain import HEAD, NonFinite, Scope


def reference_births(trace: Trace, outputs: Outputs, layout: Layout) -> list[NonFinite | None]:
    """Return the reference's first non-finite value in each prompt of the batch."""
    bad = {scope: ~norm.isfinite() for scope, norm in trace.norms.items()}
    return _first(layout, {**bad, HEAD: _at_rows(layout, outputs.reference_bad)})


def candidate_births(
    reading: Reading, trace: Trace, outputs: Outputs, layout: Layout
) -> list[NonFinite | None]:
    """Return the candidate's first non-finite value per prompt where the reference is finite."""
    bad = {
        scope: ~stats.max_abs.isfinite() & trace.norms[scope].isfinite()
        for scope, stats in reading.taps.items()
    }
    return _first(layout, {**bad, HEAD: _at_rows(layout, outputs.candidate_bad)})


def _at_rows(layout: Layout, scored: Tensor) -> Tensor:
    """Spread a mask over the scored rows to the measured rows."""
    mask = torch.zeros(layout.batch.num_tokens, dtype=torch.bool)
    mask[layout.rows] = scored.cpu()
    return mask


def _first(layout: Layout, bad: Mapping[Scope, Tensor]) -> list[NonFinite | None]:
    found: list[NonFinite | None] = []
    for prompt, rows in zip(layout.batch.prompts, layout.batch.slices, strict=True):
        hits = ((scope, mask[rows].nonzero()) for scope, mask in bad.items())
        places = (NonFinite(scope, prompt.index, int(hit[0])) for scope, hit in hits if len(hit))
        found.append(next(places, None))
    return found
