"""What block tables waste, and which of their pages lie next to each other.

With pages of one size there is no external fragmentation: every idle block fits every request
("free ÷ total" measures load, not fragmentation). What can be measured is

    internal waste   slots of used pages that hold no token ÷ all their slots; a sequence of length
                     n wastes (−n) mod T slots, on average (T − 1)/2 over lengths
    contiguity       neighbours in a table that are neighbours in the pool ÷ all neighbours; such
                     pages are *mergeable*: one copy, one descriptor, one burst instead of two
    table bytes      4 per entry

A page that several sequences share counts once in the pool's waste.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantwatch_kernels.serve.block_table import BlockTable

__all__ = ["PoolLayout", "Run", "TableLayout", "layout_of", "layout_of_pool", "runs_of"]

_ENTRY_BYTES = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one sequence that lie next to each other: the first block and how many."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """One row of the table: a sequence, its waste and its runs. Dropped pages don't count."""

    name: str
    num_tokens: int
    """Tokens in pages that aren't dropped."""
    num_slots: int
    runs: tuple[Run, ...]

    @property
    def num_pages(self) -> int:
        """Pages that aren't dropped."""
        return sum(run.length for run in self.runs)

    @property
    def waste(self) -> float:
        """Empty slots ÷ slots; 0 without pages."""
        return 1 - self.num_tokens / self.num_slots if self.num_slots else 0.0

    @property
    def mergeable(self) -> int:
        """Neighbours in the table that are neighbours in the pool."""
        return self.num_pages - len(self.runs)

    @property
    def contiguity(self) -> float:
        """Mergeable neighbours ÷ neighbours; 1 for a single page or none."""
        return self.mergeable / (self.num_pages - 1) if self.num_pages > 1 else 1.0


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """All sequences together; shared pages count once in `waste`."""

    rows: tuple[TableLayout, ...]
    num_tokens: int
    num_slots: int

    @property
    def waste(self) -> float:
        """Empty slots ÷ slots of used pages."""
        return 1 - self.num_tokens / self.num_slots if self.num_slots else 0.0

    @property
    def num_runs(self) -> int:
        """Copies that moving every sequence takes."""
        return sum(len(row.runs) for row in self.rows)

    @property
    def contiguity(self) -> float:
        """Mergeable neighbours ÷ neighbours over all sequences; 1 if there are no neighbours."""
        neighbours = sum(max(0, row.num_pages - 1) for row in self.rows)
        return sum(row.mergeable for row in self.rows) / neighbours if neighbours else 1.0

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables' entries."""
        return _ENTRY_BYTES * sum(row.num_pages for row in self.rows)


def runs_of(blocks: Sequence[int]) -> tuple[Run, ...]:
    """Return the longest runs of consecutive ids, in order."""
    runs: list[Run] = []
    for block in blocks:
        if runs and block == runs[-1].first + runs[-1].length:
            runs[-1] = Run(runs[-1].first, runs[-1].length + 1)
        else:
            runs.append(Run(block, 1))
    return tuple(runs)


def layout_of(name: str, table: BlockTable) -> TableLayout:
    """Return one sequence's row."""
    pages = table.blocks[table.num_dropped :]
    tokens = table.num_tokens - table.num_dropped * table.page_size
    return TableLayout(name, max(0, tokens), len(pages) * table.page_size, runs_of(pages))


def layout_of_pool(tables: Mapping[str, BlockTable]) -> PoolLayout:
    """Return all rows and their sum. Raises ValueError for tables of different page sizes."""
    sizes = {table.page_size for table in tables.values()}
    if len(sizes) > 1:
        raise ValueError(f"tables have pages of {sorted(sizes)} tokens; a pool has one size.")
    filled: dict[int, int] = {}
    for table in tables.values():
        for number in range(table.num_dropped, len(table.blocks)):
            block, begun = table.blocks[number], number * table.page_size
            count = min(table.page_size, table.num_tokens - begun)
            filled[block] = max(filled.get(block, 0), count)
    rows = tuple(layout_of(name, table) for name, table in tables.items())
    return PoolLayout(rows, sum(filled.values()), len(filled) * max(sizes, default=0))
