"""Blocks for requests: pool, prefix cache and block tables kept in step.

A request's life, as the serving loop drives it:

    start     find its prompt's kept prefix, take references      → tokens that needn't be computed
    reserve   slots for the next tokens, before they are computed → pages to copy first
    commit    their keys and values are written: enter full blocks
    fork, drop_before, finish

`reserve` is all or nothing: with too few idle blocks it raises PoolExhaustedError and no request,
this one included, has changed; the loop then waits, preempts or swaps (`preemption.py`). A request
that is cancelled is finished like any other, and what it had committed stays findable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quantwatch_kernels.serve.block_hash import ExtraKeys, token_ids
from quantwatch_kernels.serve.block_pool import BlockPool, PoolExhaustedError, Writable
from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.block_trace import TraceRecorder
from quantwatch_kernels.serve.cached_block import CachedBlock
from quantwatch_kernels.serve.eviction import EvictionPolicy
from quantwatch_kernels.serve.paged_plan import PagedPlan, plan
from quantwatch_kernels.serve.prefix_cache import PrefixCache
from quantwatch_kernels.serve.relayout import move_pages, relayout
from quantwatch_kernels.serve.swap import Swapped, SwapSpace

__all__ = ["BlockManager", "PageCopy"]

PageCopy = Writable
"""A page whose content `copy_from` must be copied into `block` before anything is written."""


@dataclass(slots=True)
class _Request:
    table: BlockTable
    extra: ExtraKeys
    tokens: list[int] = field(default_factory=list)
    """Committed ones: their keys and values are in the table's slots."""
    entries: int = 0
    """Blocks at the front that are done with: entered, or found by `start`."""
    parent: CachedBlock | None = None
    enters: bool = True
    """False once a block could not be kept: nothing behind it can be found."""
    swapped: Swapped | None = None
    """Where its pages are while it waits in the host."""


class BlockManager:
    """`num_blocks` pages of `page_size` tokens, the null block among them.

    All methods raise ValueError for a request that isn't there, or is there already.
    """

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        policy: EvictionPolicy | None = None,
        *,
        caching: bool = True,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.page_size = page_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, page_size, policy) if caching else None
        self._recorder = recorder
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[str, _Request] = {}

    @property
    def tables(self) -> dict[str, BlockTable]:
        """The tables of all requests, by name; to be read only."""
        return {name: request.table for name, request in self._requests.items()}

    def table(self, name: str) -> BlockTable:
        """Return a request's table, to be read only."""
        return self._of(name).table

    def start(self, name: str, prompt: Sequence[int], extra: ExtraKeys = ()) -> int:
        """Begin a request; return how many tokens of its prompt are there already.

        That is a multiple of page_size and less than the prompt: its last token is always computed.
        Raises ValueError for an empty prompt, or one that the whole pool couldn't hold.
        """
        self._check_new(name)
        if not prompt:
            raise ValueError(f"request {name!r}: the prompt is empty.")
        pages = -(-len(prompt) // self.page_size)
        if pages >= self.pool.num_blocks:
            raise ValueError(
                f"request {name!r}: a prompt of {len(prompt)} tokens takes {pages} pages; "
                f"the pool has {self.pool.num_blocks - 1}."
            )
        request = _Request(BlockTable(self.page_size), extra)
        if self.cache is not None:
            found = self.cache.acquire(prompt, extra, source=name)
            request.parent, request.entries = (found[-1] if found else None), len(found)
            covered = len(found) * self.page_size
            request.table.append([entry.block for entry in found], covered)
            request.tokens = list(token_ids(prompt[:covered]))
        self._requests[name] = request
        if self._recorder is not None:
            self._recorder.start(name, prompt, extra)
        return len(request.tokens)

    def blocks_wanted(self, name: str, num_new: int) -> int:
        """Return how many idle blocks `reserve` would take."""
        table = self._of(name).table
        return table.blocks_needed(num_new) + (num_new > 0 and self._copies(table))

    def reserve(self, name: str, num_new: int) -> list[PageCopy]:
        """Give a request slots for `num_new` more tokens; return pages to copy first.

        Raises PoolExhaustedError, with nothing changed, when too few blocks are idle.
        """
        table = self._of(name).table
        wanted = self.blocks_wanted(name, num_new)
        if not self.pool.can_take(wanted):
            raise PoolExhaustedError(wanted, self.pool.num_free, self.pool.num_blocks)
        copies = []
        if num_new > 0 and self._copies(table):
            copies.append(self.pool.writable(table.blocks[-1]))
            table.replace_last(copies[0].block)
        table.append(self.pool.take(table.blocks_needed(num_new)), num_new)
        return copies

    def commit(self, name: str, tokens: Sequence[int]) -> None:
        """Note that the next reserved tokens are written, and enter the blocks they filled."""
        request = self._of(name)
        if len(request.tokens) + len(tokens) > request.table.num_tokens:
            raise ValueError(
                f"request {name!r} has {request.table.num_tokens} slots; "
                f"{len(request.tokens)} + {len(tokens)} tokens are too many."
            )
        request.tokens += token_ids(tokens)
        self._enter_full(name, request)

    def fork(self, name: str, new_name: str) -> None:
        """Begin a request with the same tokens and pages; who writes first gets a copy."""
        request = self._of(name)
        self._check_new(new_name)
        if len(request.tokens) < request.table.num_tokens:
            raise ValueError(
                f"request {name!r} has reserved slots that aren't written; commit first."
            )
        self.pool.share(request.table.blocks)
        self._requests[new_name] = _Request(
            *(request.table.fork(), request.extra, list(request.tokens)),
            *(request.entries, request.parent, request.enters),
        )

    def drop_before(self, name: str, position: int) -> None:
        """Give back pages that hold only tokens before `position` (a sliding window's left end)."""
        request = self._of(name)
        # What isn't entered yet can't be later: the block is gone.
        if request.entries < position // self.page_size:
            request.enters = False
        self.pool.free(request.table.drop_before(position))

    def finish(self, name: str) -> None:
        """End a request, done or cancelled, and drop its references from the tail."""
        request = self._of(name)
        self.pool.free(request.table.blocks)
        if self._recorder is not None:
            self._recorder.finish(name, request.tokens, request.extra)
        del self._requests[name]

    def swap_out(self, name: str, space: SwapSpace) -> None:
        """Move a request's pages to the host; it can do nothing but come back or be finished."""
        request = self._of(name)
        request.swapped = space.swap_out(request.table.blocks, self.pool)
        self._waiting[name] = self._requests.pop(name)

    def swap_in(self, name: str, space: SwapSpace) -> None:
        """Bring a request's pages back, and enter its full blocks anew.

        Raises PoolExhaustedError when too few blocks are idle; the request then stays in the host.
        """
        request = self._out(name)
        assert request.swapped is not None
        request.table.rebind(space.swap_in(request.swapped, self.pool))
        request.swapped = None
        self._requests[name] = self._waiting.pop(name)
        request.entries, request.parent = 0, None
        request.enters = request.table.num_dropped == 0
        self._enter_full(name, request)

    def discard(self, name: str, space: SwapSpace) -> None:
        """End a request whose pages are in the host."""
        request = self._out(name)
        assert request.swapped is not None
        space.discard(request.swapped)
        del self._waiting[name]

    def plan(self, names: Sequence[str]) -> PagedPlan:
        """Return a batch's pages as CSR."""
        return plan([self._of(name).table for name in names], self.page_size)

    def relayout(self, planes: Sequence[Tensor], names: Sequence[str] | None = None) -> list[int]:
        """Make requests contiguous, in this order; move pages and ids. Return `new_of`."""
        chosen = list(self._requests) if names is None else names
        new_of = relayout([self._of(name).table for name in chosen], self.pool.num_blocks)
        move_pages(planes, new_of)
        self.pool.renumber(new_of)
        for request in self._requests.values():
            request.table.renumber(new_of)
        return new_of

    def _copies(self, table: BlockTable) -> bool:
        """Say whether the next token is written into a page that others see."""
        partial = table.num_tokens % self.page_size != 0
        return partial and self.pool.ref_cnt(table.blocks[-1]) > 1

    def _enter_full(self, name: str, request: _Request) -> None:
        """Enter the blocks that are full now and weren't before."""
        while (request.entries + 1) * self.page_size <= len(request.tokens):
            if self.cache is None or not request.enters:
                return
            self._enter(name, request, self.cache)

    def _enter(self, name: str, request: _Request, cache: PrefixCache) -> None:
        begin = request.entries * self.page_size
        block = request.table.blocks[request.entries]
        part = request.tokens[begin : begin + self.page_size]
        held = cache.insert(request.parent, block, part, request.extra, source=name)
        request.parent, request.enters = held, held.alive
        request.entries += 1

    def _check_new(self, name: str) -> None:
        if name in self._requests or name in self._waiting:
            raise ValueError(f"request {name!r} has been started already.")

    def _out(self, name: str) -> _Request:
        if name not in self._waiting:
            raise ValueError(f"there is no request {name!r} in the host.")
        return self._waiting[name]

    def _of(self, name: str) -> _Request:
        if name not in self._requests:
            raise ValueError(f"there is no request {name!r}.")
        return self._requests[name]
