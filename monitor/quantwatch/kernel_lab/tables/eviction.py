"""Hit rates of eviction policies on recorded traces, with Belady's oracle as the ceiling.

A hit is a full block of a prompt that needn't be computed. Pools are a share of the trace's
different blocks. The two traces differ in what returns: prompts of many applications, or what was
just said.
"""

from pathlib import Path

import quantwatch_kernels.serve
from quantwatch.kernel_lab.tables.model import Column, Rows, Table, TableRequest
from quantwatch_kernels.serve.block_trace import load_trace
from quantwatch_kernels.serve.trace_policies import hit_rates

_TRACES = Path(quantwatch_kernels.serve.__file__).parent / "traces"
_NAMES, _QUICK_NAMES = ("applications", "chat"), ("applications",)
_SHARES, _QUICK_SHARES = (0.06, 0.10, 0.20, 0.30), (0.10,)
_COLUMNS = (
    Column("trace", "trace"),
    Column("pool", "pool, blocks", ",d"),
    Column("share", "of the trace's", ".0%"),
    Column("lru", "LRU", ".2%"),
    Column("lru_k", "LRU-2", ".2%"),
    Column("slru", "SLRU", ".2%"),
    Column("belady", "Belady", ".2%"),
    Column("closed", "LRU-2 closes of the gap", "+.1%"),
)


def build(request: TableRequest) -> Table:
    """Replay every trace under every policy."""
    rows, notes = Rows(_COLUMNS, request.tell), list[str]()
    for name in _QUICK_NAMES if request.quick else _NAMES:
        trace = load_trace(_TRACES / f"{name}.json")
        notes.append(
            f"{name}: {len(trace.requests)} requests, {len(trace.parents):,} blocks of "
            f"{trace.page_size} tokens, recorded by {trace.about}"
        )
        for share in _QUICK_SHARES if request.quick else _SHARES:
            capacity = int(len(trace.parents) * share)
            found = {key: one.hit_rate for key, one in hit_rates(trace, capacity).items()}
            gap = found["belady"] - found["lru"]
            closed = (found["lru-k"] - found["lru"]) / gap if gap else None
            rows.add(name, capacity, share, *found.values(), closed)
    notes.append(
        "LRU-2's correlated period (8 requests) was chosen on other seeds; the traces are drawn, "
        "not taken from a service"
    )
    return Table("Eviction policies on recorded traces", _COLUMNS, tuple(rows), tuple(notes))
