"""The free list of a block pool: doubly linked, so that a block can leave from the middle.

A prefix hit takes *one particular* free block, wherever in the order it stands; a deque would
search for it. Two arrays of neighbours and one sentinel do it in a constant number of steps,
without an object per block. The price is two numbers per block.
"""

from collections.abc import Iterator

__all__ = ["FreeList"]

_ABSENT = -1


class FreeList:
    """An ordered set of block ids in 0 … capacity − 1; empty at first. All steps are O(1)."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block; it is {capacity}.")
        self._end = capacity  # the sentinel: before the first and behind the last
        self._next = [_ABSENT] * capacity + [capacity]
        self._prev = [_ABSENT] * capacity + [capacity]
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: int) -> bool:
        return 0 <= block < self._end and self._next[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Go from the first to the last. The list must not change meanwhile."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    @property
    def first(self) -> int | None:
        """The block whose turn it is; None when there is none."""
        return None if self._size == 0 else self._next[self._end]

    def push_front(self, block: int) -> None:
        """Put a block where it is taken next. Raises ValueError if it is there already."""
        self._insert(self._end, block, self._next[self._end])

    def push_back(self, block: int) -> None:
        """Put a block where it is taken last. Raises ValueError if it is there already."""
        self._insert(self._prev[self._end], block, self._end)

    def remove(self, block: int) -> None:
        """Take a block out, wherever it stands. Raises ValueError if it isn't there."""
        if block not in self:
            raise ValueError(f"block {block} isn't in the free list.")
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._next[block] = self._prev[block] = _ABSENT
        self._size -= 1

    def _insert(self, before: int, block: int, after: int) -> None:
        if not 0 <= block < self._end:
            raise ValueError(f"block {block} is none of 0 … {self._end - 1}.")
        if block in self:
            raise ValueError(f"block {block} is in the free list already.")
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self._size += 1
