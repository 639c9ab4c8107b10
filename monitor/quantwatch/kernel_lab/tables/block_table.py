"""The block table of a pool that has served for a while: what each request's pages waste, and
which of them lie next to each other and could move as one."""

from collections.abc import Sequence

from quantwatch.kernel_lab.paging import PAGE_SIZE, serve
from quantwatch.kernel_lab.tables.model import Column, Rows, Table, TableRequest
from quantwatch_kernels.serve.table_layout import Run, layout_of_pool

_STEPS, _QUICK_STEPS = 1500, 300
_SHOWN = 6
"""Runs of a request that are written out."""
_COLUMNS = (
    Column("request", "request"),
    Column("tokens", "tokens", ",d"),
    Column("pages", "pages"),
    Column("empty", "empty slots"),
    Column("waste", "waste", ".2%"),
    Column("mergeable", "mergeable neighbours"),
    Column("contiguity", "of all neighbours", ".1%"),
    Column("runs", "runs"),
    Column("blocks", "blocks"),
)


def build(request: TableRequest) -> Table:
    """Serve, and show every running request's pages."""
    served = serve(request.seed, _QUICK_STEPS if request.quick else _STEPS)
    layout = layout_of_pool(served.manager.tables)
    rows = Rows(_COLUMNS, request.tell)
    for row in layout.rows:
        rows.add(
            *(row.name, row.num_tokens, row.num_pages, row.num_slots - row.num_tokens),
            *(row.waste, row.mergeable, row.contiguity, len(row.runs), _written(row.runs)),
        )
    notes = (
        f"all together: waste {layout.waste:.2%} of {layout.num_slots:,} slots, shared pages once; "
        f"contiguity {layout.contiguity:.1%}; tables {layout.table_bytes:,} bytes",
        f"{PAGE_SIZE} tokens a page; {served.num_started} requests were started (seed "
        f"{request.seed}); the system prompt's pages are shared",
        "external fragmentation is 0: all pages have one size",
    )
    return Table("Block table", _COLUMNS, tuple(rows), notes)


def _written(runs: Sequence[Run]) -> str:
    spans = [
        f"{run.first}–{run.first + run.length - 1}" if run.length > 1 else f"{run.first}"
        for run in runs[:_SHOWN]
    ]
    return ", ".join(spans) + (", …" if len(runs) > _SHOWN else "")
