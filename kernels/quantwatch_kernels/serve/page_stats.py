"""What reading pages costs: page-miss rate, bytes moved per token, share of peak bandwidth.

Attention at decode reads every page of a sequence once per token. Memory moves in *units* of
several neighbouring pages (a DMA burst, a huge page, what one descriptor covers), and only the
units that were touched last are at hand:

    page-miss rate         references to a page whose unit isn't at hand ÷ references
    bytes moved per token  misses · bytes of a unit ÷ tokens
    useful share           bytes of the pages that were read ÷ bytes moved (1 at best, unless units
                           stay at hand from one token to the next: then more)

These are counts of a stated model (least recently used units leave), so they are exact and say
nothing about any machine. The third figure of the table is measured, not modelled: the time that
copying a batch's pages together takes, one copy per run, as a share of the bandwidth that a plain
copy of as many bytes reaches on the same machine (`copy_runs`, `share_of_peak`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from quantwatch_kernels.serve.paged_plan import PagedPlan
from quantwatch_kernels.serve.table_layout import Run, runs_of

__all__ = ["FetchModel", "PageTraffic", "copy_runs", "runs_of_plan", "share_of_peak", "traffic"]


@dataclass(frozen=True, slots=True)
class FetchModel:
    """How memory moves: units of `unit_pages` aligned neighbours, `resident_units` at hand."""

    unit_pages: int
    resident_units: int

    def __post_init__(self) -> None:
        for name in ("unit_pages", "resident_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; it is {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class PageTraffic:
    """Counts over some decode steps."""

    references: int
    misses: int
    num_tokens: int
    page_bytes: int
    unit_pages: int

    @property
    def miss_rate(self) -> float:
        """Misses ÷ references. Raises ValueError if no page was read."""
        if self.references == 0:
            raise ValueError("no page was read, so there is no miss rate.")
        return self.misses / self.references

    @property
    def bytes_moved(self) -> int:
        """Bytes of all units that were fetched."""
        return self.misses * self.unit_pages * self.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes moved ÷ tokens. Raises ValueError without tokens."""
        if self.num_tokens == 0:
            raise ValueError("no token was decoded, so there are no bytes per token.")
        return self.bytes_moved / self.num_tokens

    @property
    def useful(self) -> float:
        """Bytes of the pages that were read ÷ bytes moved. Raises ValueError if none moved."""
        if self.misses == 0:
            raise ValueError("nothing was moved, so no share of it was useful.")
        return self.references * self.page_bytes / self.bytes_moved


def traffic(steps: Iterable[PagedPlan], model: FetchModel, page_bytes: int) -> PageTraffic:
    """Count what decode steps fetch; each plan is one step and makes one token per sequence."""
    if page_bytes < 1:
        raise ValueError(f"page_bytes must be at least 1; it is {page_bytes}.")
    at_hand: OrderedDict[int, None] = OrderedDict()
    references = misses = tokens = 0
    for step in steps:
        tokens += len(step.kv_last_page_len)
        for page in step.kv_indices.tolist():
            unit = page // model.unit_pages
            references += 1
            if unit in at_hand:
                at_hand.move_to_end(unit)
                continue
            misses += 1
            at_hand[unit] = None
            if len(at_hand) > model.resident_units:
                at_hand.popitem(last=False)
    return PageTraffic(references, misses, tokens, page_bytes, model.unit_pages)


def runs_of_plan(plan: PagedPlan) -> tuple[Run, ...]:
    """Return a batch's pages as runs; runs don't reach from one sequence into the next."""
    ends, pages = plan.kv_indptr.tolist(), plan.kv_indices.tolist()
    return tuple(run for begin, end in pairwise(ends) for run in runs_of(pages[begin:end]))


def copy_runs(plane: Tensor, runs: Sequence[Run], out: Tensor) -> None:
    """Copy pages of `plane` [num_blocks, …] together into `out` [pages of all runs, …].

    One copy per run: what a DMA engine would need one descriptor for.
    """
    total = sum(run.length for run in runs)
    if out.shape != (total, *plane.shape[1:]):
        raise ValueError(f"out has shape {list(out.shape)}; {[total, *plane.shape[1:]]} is needed.")
    with torch.no_grad():
        begin = 0
        for run in runs:
            out[begin : begin + run.length].copy_(plane[run.first : run.first + run.length])
            begin += run.length


def share_of_peak(num_bytes: int, seconds: float, peak_bytes_per_s: float) -> float:
    """Return the bandwidth num_bytes ÷ seconds as a share of the peak that was measured alike."""
    if num_bytes < 0 or not seconds > 0 or not peak_bytes_per_s > 0:
        raise ValueError(
            "bytes must be at least 0, seconds and peak above 0; "
            f"got {num_bytes}, {seconds}, {peak_bytes_per_s}."
        )
    return num_bytes / seconds / peak_bytes_per_s
