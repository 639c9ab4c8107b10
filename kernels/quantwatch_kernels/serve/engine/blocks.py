"""The block manager as the scheduler sees it: prefix cache, eviction, swap and the choice between.

A preempted request goes to the host or is computed again: always one of them, or whatever costs
less by measured costs (`preemption.py`). Without room in the host it is computed again; that is
counted, so that a host tier that is too small shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantwatch_kernels.serve.block_hash import ExtraKeys
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_pool import NULL_BLOCK, Writable
from quantwatch_kernels.serve.preemption import PreemptionCosts, choose
from quantwatch_kernels.serve.swap import SwapSpace

__all__ = ["EngineBlocks", "Host"]


@dataclass(slots=True)
class Host:
    """Where preempted requests may wait; `costs` None: always there as long as it has room."""

    space: SwapSpace
    page_bytes: int
    costs: PreemptionCosts | None = None


class EngineBlocks:
    """`ports.Blocks` over a block manager; `extra` goes into the key of every page."""

    def __init__(
        self, manager: BlockManager, host: Host | None = None, extra: ExtraKeys = ()
    ) -> None:
        self.manager, self._host, self._extra = manager, host, extra
        self.host_refused = 0
        """Preempted requests that were to be swapped and found no room."""
        self._in_host: dict[str, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks of the pool without the null block."""
        return self.manager.pool.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, kept content included."""
        return self.manager.pool.num_free

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.manager.page_size

    def wanted_to_start(self, tokens: Sequence[int], extra: ExtraKeys) -> int:
        """Return how many free blocks a text takes; kept ones that are idle count as free too."""
        pages = -(-len(tokens) // self.page_size)
        if self.manager.cache is None:
            return pages
        found = self.manager.cache.match(tokens, self._keys(extra))
        return pages - sum(self.manager.pool.ref_cnt(entry.block) > 0 for entry in found)

    def start(self, name: str, tokens: Sequence[int], extra: ExtraKeys) -> int:
        """Begin, and return how many tokens other requests' pages hold already."""
        return self.manager.start(name, tokens, self._keys(extra))

    def wanted(self, name: str, num_new: int) -> int:
        """Return how many free blocks `reserve` takes."""
        return self.manager.blocks_wanted(name, num_new)

    def reserve(self, name: str, num_new: int) -> list[Writable]:
        """Give slots to more tokens; return pages to copy before anything is written."""
        return self.manager.reserve(name, num_new)

    def commit(self, name: str, tokens: Sequence[int]) -> None:
        """Note that the reserved tokens are written."""
        self.manager.commit(name, tokens)

    def drop_before(self, name: str, position: int) -> None:
        """Give back pages that hold only tokens before a position."""
        self.manager.drop_before(name, position)

    def finish(self, name: str) -> None:
        """End a request and drop its references."""
        self.manager.finish(name)

    def preempt(self, name: str) -> Literal["swap", "recompute"]:
        """Take a request's pages: to the host, or for good."""
        table = self.manager.table(name)
        pages = sum(block != NULL_BLOCK for block in table.blocks)
        if self._host is not None and self._goes(self._host, pages, table.num_tokens):
            self.manager.swap_out(name, self._host.space)
            self._in_host[name] = pages
            return "swap"
        self.manager.finish(name)
        return "recompute"

    def wanted_back(self, name: str) -> int:
        """Return how many free blocks `resume` takes."""
        return self._in_host[name]

    def resume(self, name: str) -> None:
        """Bring a request's pages back from the host."""
        assert self._host is not None
        self.manager.swap_in(name, self._host.space)
        del self._in_host[name]

    def discard(self, name: str) -> None:
        """End a request whose pages are in the host."""
        assert self._host is not None
        self.manager.discard(name, self._host.space)
        del self._in_host[name]

    def _goes(self, host: Host, pages: int, tokens: int) -> bool:
        free = host.space.num_free
        if host.costs is not None:
            sizes = {"num_pages": pages, "page_bytes": host.page_bytes, "num_tokens": tokens}
            if choose(host.costs, **sizes, free_slots=pages).how == "recompute":
                return False
        self.host_refused += pages > free
        return pages <= free

    def _keys(self, extra: ExtraKeys) -> ExtraKeys:
        return tuple(sorted((*self._extra, *extra)))
