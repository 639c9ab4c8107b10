"""Pages that are only counted: what the scheduler asks for, without a pool, a cache or a tensor."""

from collections.abc import Sequence
from typing import Literal

from quantwatch_kernels.serve.block_hash import ExtraKeys
from quantwatch_kernels.serve.block_pool import PoolExhaustedError, Writable


class CountedBlocks:
    """`known` tokens of every text are held by somebody else's pages, which cost nothing."""

    def __init__(
        self, num_usable: int, page_size: int = 4, *, host: int = 0, known: int = 0
    ) -> None:
        self.num_usable, self.page_size, self.host, self.known = num_usable, page_size, host, known
        self.tokens: dict[str, int] = {}
        self.written: dict[str, list[int]] = {}
        self.shared: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.away: dict[str, int] = {}
        self.log: list[str] = []

    @property
    def num_free(self) -> int:
        return self.num_usable - sum(self._held(name) for name in self.tokens)

    def wanted_to_start(self, tokens: Sequence[int], extra: ExtraKeys) -> int:
        return self._pages(len(tokens)) - self._found(tokens) // self.page_size

    def start(self, name: str, tokens: Sequence[int], extra: ExtraKeys) -> int:
        found = self._found(tokens)
        self.tokens[name] = found
        self.written[name] = list(tokens[:found])
        self.shared[name], self.dropped[name] = found // self.page_size, 0
        return found

    def wanted(self, name: str, num_new: int) -> int:
        return self._pages(self.tokens[name] + num_new) - self._pages(self.tokens[name])

    def reserve(self, name: str, num_new: int) -> list[Writable]:
        if self.wanted(name, num_new) > self.num_free:
            raise PoolExhaustedError(self.wanted(name, num_new), self.num_free, self.num_usable)
        self.tokens[name] += num_new
        return []

    def commit(self, name: str, tokens: Sequence[int]) -> None:
        self.written[name] += tokens
        assert len(self.written[name]) <= self.tokens[name]

    def drop_before(self, name: str, position: int) -> None:
        assert position <= self.tokens[name]
        self.dropped[name] = max(self.dropped[name], max(position, 0) // self.page_size)

    def finish(self, name: str) -> None:
        self.log.append(f"finish {name}")
        del self.tokens[name], self.written[name]

    def preempt(self, name: str) -> Literal["swap", "recompute"]:
        assert len(self.written[name]) == self.tokens[name], "preempted in the middle of a step"
        pages = self._held(name)
        if sum(self._pages(n) for n in self.away.values()) + pages > self.host:
            del self.tokens[name], self.written[name]
            return "recompute"
        self.away[name] = self.tokens.pop(name)
        return "swap"

    def wanted_back(self, name: str) -> int:
        return self._pages(self.away[name]) - self.dropped[name]

    def resume(self, name: str) -> None:
        assert self.wanted_back(name) <= self.num_free
        self.tokens[name] = self.away.pop(name)
        self.shared[name] = 0

    def discard(self, name: str) -> None:
        self.log.append(f"discard {name}")
        del self.away[name], self.written[name]

    def _held(self, name: str) -> int:
        used = self._pages(self.tokens[name])
        return used - max(self.shared[name], self.dropped[name])

    def _found(self, tokens: Sequence[int]) -> int:
        return min(self.known, len(tokens) - 1) // self.page_size * self.page_size

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
