"""Re-laying pages out, so that a sequence's pages lie next to each other again.

After requests of different lengths have come and gone, a new one gets blocks from everywhere. The
plan is a permutation of block ids: sequence after sequence takes the lowest ids that are left, a
page that several share goes with the first of them, everything else fills what remains in its old
order. Content moves along the permutation's cycles with one page of scratch memory, so each page is
read once and written once, and a pool that is already in order moves nothing.

Then ids change in the pool, the prefix cache and every table (`BlockManager.relayout`). It costs
2 · page bytes per page that moves, so it pays only if what was gained is read often enough.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import NULL_BLOCK
from quantwatch_kernels.serve.block_table import BlockTable

__all__ = ["move_pages", "num_moved", "relayout"]


def relayout(tables: Sequence[BlockTable], num_blocks: int) -> list[int]:
    """Return `new_of`: block b should become block `new_of[b]`; the null block stays.

    Raises ValueError for a table that names a block the pool doesn't have.
    """
    order = [NULL_BLOCK]
    seen = {NULL_BLOCK}
    for number, table in enumerate(tables):
        for block in table.blocks:
            if not 0 <= block < num_blocks:
                raise ValueError(f"table {number} names block {block} of {num_blocks}.")
            if block not in seen:
                seen.add(block)
                order.append(block)
    order += [block for block in range(num_blocks) if block not in seen]
    new_of = [0] * num_blocks
    for new, old in enumerate(order):
        new_of[old] = new
    return new_of


def num_moved(new_of: Sequence[int]) -> int:
    """Return how many pages change their place."""
    return sum(old != new for old, new in enumerate(new_of))


def move_pages(planes: Sequence[Tensor], new_of: Sequence[int]) -> None:
    """Move page b of every plane [num_blocks, …] to `new_of[b]`, in place.

    Raises ValueError, with nothing moved, for a plane with another number of pages.
    """
    for number, plane in enumerate(planes):
        if plane.shape[0] != len(new_of):
            raise ValueError(f"plane {number} has {plane.shape[0]} pages, not {len(new_of)}.")
    cycles = _cycles(new_of)
    with torch.no_grad():
        for plane in planes:
            for cycle in cycles:
                # cycle: a → b → … → a. From the end: each page is overwritten after it was read.
                spare = plane[cycle[-1]].clone()
                for source, target in zip(cycle[-2::-1], cycle[:0:-1], strict=True):
                    plane[target].copy_(plane[source])
                plane[cycle[0]].copy_(spare)


def _cycles(new_of: Sequence[int]) -> list[list[int]]:
    """Return the cycles longer than 1, each as the places a page goes through."""
    cycles, seen = list[list[int]](), set[int]()
    for start in range(len(new_of)):
        cycle, block = list[int](), start
        while block not in seen:
            seen.add(block)
            cycle.append(block)
            block = new_of[block]
        if block != start and cycle:
            raise ValueError("new_of is no permutation.")
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles
