"""Blocks of a paged KV cache: who uses which, and who gets the next.

A block is a page of `page_size` tokens; this file knows its id only, the tensors are elsewhere.
Each block has a reference count. At 0 it is *idle* and stands in the free list:

    blank idle blocks … | idle blocks whose content a prefix cache keeps, longest idle first …

A request's blocks are freed from the tail, so the front of its text, which others can share, goes
last. Blank blocks are used up first; then the keeper says whose content is given up.

Block 0 is the *null block*: it belongs to nobody, is never handed out and stands for pages that a
sliding window has left behind, so a table keeps its positions.

All or nothing: a call that can't be done raises before it changes anything. What was given up is
fairness between requests (the scheduler's), and any size but one: with equal pages there is no
external fragmentation to manage. Rules as in vLLM's block pool (kernel_anchors.md §1.10).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quantwatch_kernels.serve.free_list import FreeList

__all__ = ["NULL_BLOCK", "BlockPool", "Keeper", "PoolExhaustedError", "Writable"]

NULL_BLOCK = 0


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than are idle. Nothing has changed."""

    def __init__(self, wanted: int, num_free: int, num_blocks: int) -> None:
        super().__init__(
            f"{wanted} blocks were asked for and {num_free} of {num_blocks} are free; "
            "free or swap out a request, or make the pool larger."
        )
        self.wanted, self.num_free, self.num_blocks = wanted, num_free, num_blocks


class Keeper(Protocol):
    """Keeps the content of blocks beyond their last use: the prefix cache."""

    def keeps(self, block: int) -> bool:
        """Say whether the block's content is kept for later."""

    def became_idle(self, block: int) -> None:
        """Hear that nobody uses a kept block any more."""

    def became_busy(self, block: int) -> None:
        """Hear that a kept idle block is used again."""

    def give_up(self) -> int:
        """Choose an idle kept block and forget its content; there is one."""

    def renumbered(self, new_of: Sequence[int]) -> None:
        """Hear that block b is now block `new_of[b]`."""


class Writable(NamedTuple):
    """Where to write: the block, and the one whose content must be copied into it first."""

    block: int
    copy_from: int | None


class BlockPool:
    """`num_blocks` blocks, the null block among them: `num_blocks` − 1 can be used.

    Raises ValueError for ids that don't exist and counts that would become wrong.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2, the null block and one to use; it is {num_blocks}."
            )
        self.num_blocks = num_blocks
        self._ref_cnt = [0] * num_blocks
        self._free = FreeList(num_blocks)
        self._keeper: Keeper | None = None
        for block in range(1, num_blocks):
            self._free.push_back(block)

    def attach(self, keeper: Keeper) -> None:
        """Let a prefix cache keep content; only one can, and before any block is used."""
        if self._keeper is not None:
            raise ValueError("the pool has a keeper already; there can be one.")
        if self.num_used:
            raise ValueError(f"{self.num_used} blocks are used; a keeper comes before the first.")
        self._keeper = keeper

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out, kept content included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with a reference, each once."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Idle blocks in the order of the free list."""
        return tuple(self._free)

    def ref_cnt(self, block: int) -> int:
        """Return how many hold a block; 0 for the null block."""
        return self._ref_cnt[self._known(block)]

    def can_take(self, count: int) -> bool:
        """Say whether `take(count)` would succeed."""
        return 0 <= count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each and undefined content.

        Raises PoolExhaustedError, with nothing changed, when fewer are idle.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0; it is {count}.")
        if count > len(self._free):
            raise PoolExhaustedError(count, len(self._free), self.num_blocks)
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        block = self._free.first
        assert block is not None  # counted before
        if self._keeper is not None and self._keeper.keeps(block):
            # Blank ones stand in front, so all that are left are kept.
            block = self._keeper.give_up()
        self._free.remove(block)
        self._ref_cnt[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; idle ones must have content that is kept."""
        for block in blocks:
            if block != NULL_BLOCK and self.ref_cnt(block) == 0 and not self._is_kept(block):
                raise ValueError(f"block {block} is free and blank; it has nothing to share.")
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._ref_cnt[block] == 0:
                self._free.remove(block)
                if self._keeper is not None:
                    self._keeper.became_busy(block)
            self._ref_cnt[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each block; `blocks` in the order of the text, freed from its tail.

        Raises ValueError, with nothing changed, when a block has fewer references than dropped.
        """
        for block, count in Counter(blocks).items():
            if block != NULL_BLOCK and self.ref_cnt(block) < count:
                raise ValueError(
                    f"block {block} has {self.ref_cnt(block)} references; {count} can't be dropped."
                )
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self._ref_cnt[block] -= 1
            if self._ref_cnt[block] == 0:
                self._retire(block)

    def writable(self, block: int) -> Writable:
        """Return the block to write to in place of `block`: itself, or a copy if others see it.

        Others are further references and the prefix cache. The caller puts the new id into its
        table and copies `copy_from`: all copies in the order they were asked for, before anything
        is written, since the old block may be handed out meanwhile. Raises PoolExhaustedError, with
        nothing changed, if a copy is needed and no block is idle; ValueError for a block without a
        reference.
        """
        if self.ref_cnt(block) == 0:
            raise ValueError(f"block {block} is used by nobody; only a used one is written to.")
        if self._ref_cnt[block] == 1 and not self._is_kept(block):
            return Writable(block, None)
        new = self.take(1)[0]
        self.free([block])
        return Writable(new, block)

    def renumber(self, new_of: Sequence[int]) -> None:
        """Make block b block `new_of[b]`: the pages have been re-laid out (`relayout.py`).

        Raises ValueError unless it is a permutation that leaves the null block alone.
        """
        if sorted(new_of) != list(range(self.num_blocks)) or new_of[NULL_BLOCK] != NULL_BLOCK:
            raise ValueError(
                f"new_of must be a permutation of 0 … {self.num_blocks - 1} that keeps block 0."
            )
        counts = list(self._ref_cnt)
        order = [new_of[block] for block in self._free]
        for old, new in enumerate(new_of):
            self._ref_cnt[new] = counts[old]
        self._free = FreeList(self.num_blocks)
        for block in order:
            self._free.push_back(block)
        if self._keeper is not None:
            self._keeper.renumbered(new_of)

    def _retire(self, block: int) -> None:
        if self._keeper is not None and self._keeper.keeps(block):
            self._free.push_back(block)
            self._keeper.became_idle(block)
        else:
            self._free.push_front(block)

    def _is_kept(self, block: int) -> bool:
        return self._keeper is not None and self._keeper.keeps(block)

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is none of 0 … {self.num_blocks - 1}.")
        return block
