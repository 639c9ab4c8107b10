"""Swapping a request's pages to host memory and back, bit for bit.

The unit is a page with *all* its planes: keys, values, and the scales and zeros without which codes
mean nothing. Planes are copied as bytes, so no value is touched on the way (NaN payloads, −0 and
packed nibbles included). A page that others also use is copied too, and stays with them; pages that
a sliding window dropped stay null.

All or nothing, both ways: no room in the host tier, no idle blocks in the pool, or a copy that
fails raises, and every slot and block is where it was. What was given up: parts. A request goes and
comes back whole, even if the prefix cache still holds some of what it waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import NULL_BLOCK, BlockPool
from quantwatch_kernels.serve.host_tier import HostTier, SwapSpaceError

__all__ = ["PageBytes", "SwapSpace", "Swapped"]


class PageBytes:
    """Pages of several planes [num_blocks, …] as strings of bytes."""

    def __init__(self, planes: Sequence[Tensor]) -> None:
        if not planes:
            raise ValueError("there are no planes; a page needs at least one.")
        for number, plane in enumerate(planes):
            if plane.shape[0] != planes[0].shape[0] or plane.ndim < 2:
                raise ValueError(
                    f"plane {number} has shape {list(plane.shape)}; "
                    f"[{planes[0].shape[0]}, …] is needed."
                )
            if not plane.is_contiguous():
                raise ValueError(f"plane {number} isn't contiguous; its pages have no byte string.")
        self._rows = [plane.view(plane.shape[0], -1).view(torch.uint8) for plane in planes]

    @property
    def num_blocks(self) -> int:
        """Pages in each plane."""
        return self._rows[0].shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all planes together."""
        return sum(row.shape[1] for row in self._rows)

    def save(self, block: int, out: Tensor) -> None:
        """Copy a page into uint8 [page_bytes]."""
        for part, row in zip(self._parts(out), self._rows, strict=True):
            part.copy_(row[block])

    def load(self, block: int, saved: Tensor) -> None:
        """Copy uint8 [page_bytes] into a page."""
        for part, row in zip(self._parts(saved), self._rows, strict=True):
            row[block].copy_(part)

    def _parts(self, page: Tensor) -> tuple[Tensor, ...]:
        return torch.split(page, [row.shape[1] for row in self._rows])


@dataclass(frozen=True, slots=True)
class Swapped:
    """A request's pages in the host tier: a slot per page, None for dropped ones."""

    slots: tuple[int | None, ...]

    @property
    def num_pages(self) -> int:
        """Pages that are in the host tier."""
        return sum(slot is not None for slot in self.slots)


class SwapSpace:
    """The slots of a host tier, given to requests. The tier's slots must hold a page."""

    def __init__(self, tier: HostTier, pages: PageBytes) -> None:
        if tier.slot_bytes < pages.page_bytes:
            raise ValueError(
                f"a page takes {pages.page_bytes} bytes and a slot has {tier.slot_bytes}."
            )
        self._tier, self._pages = tier, pages
        self._free = list(range(tier.num_slots - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def swap_out(self, blocks: Sequence[int], pool: BlockPool) -> Swapped:
        """Copy a table's pages to the host and drop its references.

        Raises SwapSpaceError when too few slots are free, ValueError for a block that nobody uses;
        nothing has changed then.
        """
        wanted = sum(block != NULL_BLOCK for block in blocks)
        if wanted > len(self._free):
            raise SwapSpaceError(
                f"{wanted} pages don't fit into the {len(self._free)} free slots of "
                f"{self._tier.num_slots}; recompute the request instead."
            )
        for block in blocks:
            if block != NULL_BLOCK and pool.ref_cnt(block) == 0:
                raise ValueError(f"block {block} is used by nobody; it can't be swapped out.")
        taken = self._free[len(self._free) - wanted :]
        slot = iter(taken)
        slots = tuple(None if block == NULL_BLOCK else next(slot) for block in blocks)
        for block, at in zip(blocks, slots, strict=True):
            if at is not None:
                self._pages.save(block, self._slot(at))
        # Taken only now: a copy that fails (a device, a mapped file) leaves them free.
        pool.free(blocks)
        del self._free[len(self._free) - wanted :]
        self._held.update(taken)
        return Swapped(slots)

    def swap_in(self, swapped: Swapped, pool: BlockPool) -> list[int]:
        """Copy pages back into new blocks and return the table's blocks.

        Raises PoolExhaustedError when too few are idle; the pages then stay in the host tier.
        """
        self._check(swapped)
        taken = pool.take(swapped.num_pages)
        new = iter(taken)
        blocks = [NULL_BLOCK if slot is None else next(new) for slot in swapped.slots]
        try:
            for block, slot in zip(blocks, swapped.slots, strict=True):
                if slot is not None:
                    self._pages.load(block, self._slot(slot))
        except BaseException:
            pool.free(taken)
            raise
        self.discard(swapped)
        return blocks

    def discard(self, swapped: Swapped) -> None:
        """Give slots back without reading them: the request was cancelled."""
        self._check(swapped)
        for slot in swapped.slots:
            if slot is not None:
                self._held.remove(slot)
                self._free.append(slot)

    def _check(self, swapped: Swapped) -> None:
        gone = [slot for slot in swapped.slots if slot is not None and slot not in self._held]
        if gone:
            raise ValueError(f"slots {gone} hold no swapped page; was it swapped in already?")

    def _slot(self, slot: int) -> Tensor:
        return self._tier.view(slot)[: self._pages.page_bytes]
