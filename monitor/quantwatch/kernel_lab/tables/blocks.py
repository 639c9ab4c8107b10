"""KV pages before and after they are laid out anew: waste, misses, bytes per token, bandwidth.

Rows are one pool that has served for a while, as it then lies and re-laid out
(`serve/relayout.py`). Misses and bytes moved are counts of a stated model (`serve/page_stats.py`);
the share of peak bandwidth is measured: the time of one plain copy of as many bytes ÷ the time that
bringing a batch's pages together takes, interleaved, median over rounds with a bootstrap interval.
Two ways: a copy per run, where each copy has its fixed cost (as for a DMA engine or a swap), and
one gather by index, which has none and shows what the order alone is worth.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quantwatch.kernel_lab.bench import interleaved, median_interval
from quantwatch.kernel_lab.paging import PAGE_SIZE, Served, serve
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.page_stats import FetchModel, copy_runs, runs_of_plan, traffic
from quantwatch_kernels.serve.paged_plan import PagedPlan
from quantwatch_kernels.serve.relayout import num_moved
from quantwatch_kernels.serve.table_layout import layout_of_pool

_HEADS, _HEAD_DIM = 3, 64
"""SmolLM2-135M's; a page of one layer holds keys and values in bfloat16."""
_PAGE_BYTES = 2 * PAGE_SIZE * _HEADS * _HEAD_DIM * 2
_MODEL = FetchModel(unit_pages=8, resident_units=16)
_DECODED = 8
"""Decode steps whose reads are counted; tables stay as they are meanwhile."""
_LAYERS = 4
"""Planes that copies go through in turn, so that they leave the cache."""
_STEPS, _QUICK_STEPS = 1500, 300
_ROUNDS, _QUICK_ROUNDS = 60, 10
_COLUMNS = (
    Column("layout", "pages"),
    Column("waste", "internal waste", ".2%"),
    Column("contiguity", "neighbours that lie together", ".1%"),
    Column("copies", "copies for all", ",d"),
    Column("pages_per_copy", "pages per copy", ".1f"),
    Column("miss_rate", "page-miss rate", ".1%"),
    Column("kib_per_token", "KiB moved per token", ",.0f"),
    Column("useful", "read ÷ moved", ".2f"),
    Column("peak_share", "share of peak bandwidth, copy per run", ".1%"),
    Column("peak_low", "95 % from", ".1%"),
    Column("peak_high", "to", ".1%"),
    Column("gather_share", "one gather", ".1%"),
    Column("gather_low", "95 % from", ".1%"),
    Column("gather_high", "to", ".1%"),
)


def build(request: TableRequest) -> Table:
    """Serve, measure, re-lay out, measure again."""
    served = serve(request.seed, _QUICK_STEPS if request.quick else _STEPS)
    manager, width = served.manager, 2 * PAGE_SIZE * _HEADS * _HEAD_DIM
    torch.manual_seed(request.seed)
    planes = [torch.randn(manager.pool.num_blocks, width).bfloat16() for _ in range(_LAYERS)]
    before = [plane.clone() for plane in planes]
    names = list(manager.tables)
    plans, counts = [manager.plan(names)], [_counts(manager, names)]
    new_of = manager.relayout(planes)
    plans.append(manager.plan(names))
    counts.append(_counts(manager, names))
    rounds = _QUICK_ROUNDS if request.quick else _ROUNDS
    shares = _shares((before, planes), plans, rounds)
    rows = Rows(_COLUMNS, request.tell)
    for name, count, share in zip(("as served", "re-laid out"), counts, shares, strict=True):
        rows.add(name, *count, *share)
    notes = _notes(served, request.seed, num_moved(new_of), rounds)
    return Table("KV pages before and after re-laying out", _COLUMNS, tuple(rows), notes)


def _notes(served: Served, seed: int, moved: int, rounds: int) -> tuple[str, ...]:
    tables = served.manager.tables.values()
    return (
        f"{len(tables)} requests, {sum(table.num_tokens for table in tables):,} tokens, after "
        f"{served.num_started} requests in a pool of {served.manager.pool.num_blocks - 1:,} pages "
        f"(seed {seed}); {PAGE_SIZE} tokens a page, {_PAGE_BYTES:,} bytes of one layer in bfloat16",
        f"re-laying out moved {moved:,} pages, once: {2 * moved * _PAGE_BYTES / 2**20:.1f} MiB "
        "read and written per layer",
        f"misses and bytes: a model, not a machine: units of {_MODEL.unit_pages} pages, the last "
        f"{_MODEL.resident_units} at hand, {_DECODED} tokens of each request",
        "share of peak: one plain copy of as many bytes ÷ one copy per run of pages, called from "
        f"Python, or ÷ one index_select; {torch.get_num_threads()} thread(s) of this CPU, "
        f"{rounds} interleaved rounds",
    )


def _counts(manager: BlockManager, names: list[str]) -> tuple[Cell, ...]:
    layout = layout_of_pool(manager.tables)
    found = traffic([manager.plan(names)] * _DECODED, _MODEL, _PAGE_BYTES)
    pages = sum(row.num_pages for row in layout.rows)
    return (
        *(layout.waste, layout.contiguity, layout.num_runs, pages / layout.num_runs),
        *(found.miss_rate, found.bytes_per_token / 1024, found.useful),
    )


def _shares(
    planes: tuple[list[Tensor], list[Tensor]], plans: list[PagedPlan], rounds: int
) -> list[tuple[float, ...]]:
    """Return each layout's shares of a plain copy's bandwidth, with their intervals."""
    count = plans[0].kv_indices.numel()
    plain = [plane[:1].repeat(count, 1) for plane in planes[0]]
    out = torch.empty_like(plain[0])
    runs: list[Callable[[int], object]] = [lambda copy: out.copy_(plain[copy])]
    for layers, plan in zip(planes, plans, strict=True):
        runs += [_by_run(layers, plan, out), _by_index(layers, plan, out)]
    peak, *seconds = (np.array(taken) for taken in interleaved(runs, len(plain), rounds))
    # As many bytes in each: the ratio of times is the ratio of bandwidths.
    shares = [(float(np.median(peak / mine)), *median_interval(peak / mine)) for mine in seconds]
    return [(*shares[k], *shares[k + 1]) for k in range(0, len(shares), 2)]


def _by_run(layers: list[Tensor], plan: PagedPlan, out: Tensor) -> Callable[[int], object]:
    pieces = runs_of_plan(plan)
    return lambda copy: copy_runs(layers[copy], pieces, out)


def _by_index(layers: list[Tensor], plan: PagedPlan, out: Tensor) -> Callable[[int], object]:
    return lambda copy: torch.index_select(layers[copy], 0, plan.kv_indices, out=out)
