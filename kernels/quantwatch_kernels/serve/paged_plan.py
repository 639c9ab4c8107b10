"""Block tables of a batch in the form that paged attention reads.

CSR, as FlashInfer's: the pages of sequence i are `kv_indices[kv_indptr[i] : kv_indptr[i + 1]]`,
and its last page holds `kv_last_page_len[i]` tokens, 1 … page_size. Pages that a sliding window has
left behind aren't listed; `kv_start[i]` is the position of the first token of the first page that
is, so masks keep working on positions. The null block is thus never read.

`padded_tables` gives the other form (vLLM's): one row of ids per sequence, filled up with the null
block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import NULL_BLOCK
from quantwatch_kernels.serve.block_table import BlockTable

__all__ = ["PagedPlan", "padded_tables", "plan"]


class PagedPlan(NamedTuple):
    """Where the keys and values of n sequences are; all int32 and on the CPU."""

    kv_indptr: Tensor
    """[n + 1]"""
    kv_indices: Tensor
    """[number of pages]"""
    kv_last_page_len: Tensor
    """[n], 1 … page_size"""
    kv_start: Tensor
    """[n], a multiple of page_size"""
    page_size: int

    @property
    def kv_lengths(self) -> Tensor:
        """Tokens in the listed pages, int32 [n]."""
        pages = self.kv_indptr.diff()
        return (pages - 1) * self.page_size + self.kv_last_page_len


def plan(tables: Sequence[BlockTable], page_size: int) -> PagedPlan:
    """Return the CSR form of a batch of tables, empty for an empty batch.

    Raises ValueError for a table without tokens (it has no last page) or of another page size.
    """
    counts, indices, last, start = [0], list[int](), list[int](), list[int]()
    for number, table in enumerate(tables):
        _check(table, number, page_size)
        if table.num_tokens == 0:
            raise ValueError(f"table {number} has no tokens; there is nothing to attend to.")
        pages = table.blocks[table.num_dropped :]
        if not pages:
            raise ValueError(f"table {number}: all of its pages were dropped.")
        indices += pages
        counts.append(len(indices))
        last.append(table.last_page_len)
        start.append(table.num_dropped * page_size)
    return PagedPlan(_int32(counts), _int32(indices), _int32(last), _int32(start), page_size)


def padded_tables(tables: Sequence[BlockTable], page_size: int) -> Tensor:
    """Return int32 [n, most pages], filled up with the null block."""
    for number, table in enumerate(tables):
        _check(table, number, page_size)
    width = max((len(table.blocks) for table in tables), default=0)
    rows = [[*table.blocks, *[NULL_BLOCK] * (width - len(table.blocks))] for table in tables]
    return _int32(rows).reshape(len(tables), width)


def _check(table: BlockTable, number: int, page_size: int) -> None:
    if table.page_size != page_size:
        raise ValueError(
            f"table {number} has pages of {table.page_size} tokens; the pool's have {page_size}."
        )


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
