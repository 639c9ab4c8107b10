"""The block table of one sequence: which block holds which tokens.

Token t is in slot `blocks[t // page_size] · page_size + t % page_size` of the pool. A table is
append-only: ids that a kernel or a captured graph has read stay right. Three things may replace an
id, each by the same content or none: the null block for pages a sliding window has left behind,
the copy of a shared page before it is written to, and a re-laying out of the whole pool.

A table changes no reference counts; `block_manager.py` keeps both in step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import NULL_BLOCK

__all__ = ["PADDING_SLOT", "BlockTable"]

PADDING_SLOT = -1
"""The slot of a token that has no place: kernels skip it."""


class BlockTable:
    """Blocks of one sequence and how many tokens they hold. Starts empty."""

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token; it is {page_size}.")
        self.page_size = page_size
        self._blocks: list[int] = []
        self._num_tokens = 0
        self._num_dropped = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block ids in the order of the text; the null block where pages were dropped."""
        return tuple(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that have a slot, those in dropped pages included."""
        return self._num_tokens

    @property
    def num_dropped(self) -> int:
        """Pages at the front that are the null block."""
        return self._num_dropped

    @property
    def last_page_len(self) -> int:
        """Tokens in the last page, 1 … page_size (a full page is page_size, never 0).

        Raises ValueError for an empty table, which has no last page.
        """
        if self._num_tokens == 0:
            raise ValueError("the table is empty, so it has no last page.")
        return (self._num_tokens - 1) % self.page_size + 1

    def blocks_needed(self, num_new: int) -> int:
        """Return how many more blocks `num_new` more tokens take."""
        if num_new < 0:
            raise ValueError(f"num_new must be at least 0 tokens; it is {num_new}.")
        pages = -(-(self._num_tokens + num_new) // self.page_size)
        return pages - len(self._blocks)

    def append(self, blocks: Sequence[int], num_new: int) -> None:
        """Add tokens and exactly the blocks they need. Raises ValueError for another number."""
        needed = self.blocks_needed(num_new)
        if len(blocks) != needed:
            raise ValueError(f"{num_new} more tokens need {needed} blocks; got {len(blocks)}.")
        live = self._blocks[self._num_dropped :] if blocks else []
        if NULL_BLOCK in blocks or len({*blocks, *live}) < len(blocks) + len(live):
            raise ValueError(f"blocks must be distinct, new and not the null block; got {blocks}.")
        self._blocks += blocks
        self._num_tokens += num_new

    def replace_last(self, block: int) -> None:
        """Put the copy of the last page into its place (copy-on-write)."""
        if not self._blocks or block in self._blocks or block == NULL_BLOCK:
            raise ValueError(f"block {block} can't take the place of the last page.")
        self._blocks[-1] = block

    def drop_before(self, position: int) -> list[int]:
        """Make pages whose last token is before `position` null; return their blocks to free.

        With a sliding window of W, the query at t sees t − W + 1 … t, so `position` is t − W + 1.
        """
        if position > self._num_tokens:
            raise ValueError(f"position is {position}; the table has {self._num_tokens} tokens.")
        until = max(self._num_dropped, max(0, position) // self.page_size)
        dropped = self._blocks[self._num_dropped : until]
        self._blocks[self._num_dropped : until] = [NULL_BLOCK] * len(dropped)
        self._num_dropped = until
        return dropped

    def slot_mapping(self, start: int, stop: int) -> Tensor:
        """Return the slots of tokens start … stop − 1, int64 [stop − start].

        Tokens of dropped pages have slot −1. Raises ValueError for tokens that aren't there.
        """
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(
                f"tokens {start} … {stop} aren't within the table's {self._num_tokens} tokens."
            )
        position = torch.arange(start, stop)
        first, size = start // self.page_size, self.page_size
        touched = torch.tensor(self._blocks[first : -(-stop // size)], dtype=torch.int64)
        block = touched[position // size - first]
        slot = block * size + position % size
        return torch.where(block == NULL_BLOCK, PADDING_SLOT, slot)

    def fork(self) -> "BlockTable":
        """Return a table with the same blocks, which the caller must take references to."""
        other = BlockTable(self.page_size)
        other._blocks = list(self._blocks)
        other._num_tokens, other._num_dropped = self._num_tokens, self._num_dropped
        return other

    def rebind(self, blocks: Sequence[int]) -> None:
        """Put all pages where a swap has brought them back to; dropped ones stay null."""
        old = [block == NULL_BLOCK for block in self._blocks]
        if [block == NULL_BLOCK for block in blocks] != old:
            raise ValueError(f"{len(blocks)} blocks don't fit a table of {len(old)} pages.")
        self._blocks = list(blocks)

    def renumber(self, new_of: Sequence[int]) -> None:
        """Make block b block `new_of[b]`, after the pages have moved."""
        self._blocks = [new_of[block] for block in self._blocks]
