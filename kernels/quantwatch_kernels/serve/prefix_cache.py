"""Prefix cache: full blocks found again by what they contain, across requests.

Entries form a tree: a block's parent is the entry of the text before it. A digest finds an entry in
one step (`block_hash.py`), and is then not believed: the tokens, the extra keys and the *identity
of the parent entry* are compared, so even a hash that sends everything to one value gives right
answers, only fewer hits. Of two contents with one digest the first stays, the second isn't kept.

Only full blocks are entered, since a partial one still changes. A block keeps its entry while it is
idle; when it is given up for something new the entry goes first, so no digest ever names other
content. Leaves go before their parents, and nothing that a request uses goes at all. One case has
no idle leaf: a text computed twice at a time is entered once, and the second request's later blocks
hang below the first one's; when only those are used, the deepest idle entry goes and what hangs
below it stops being findable.

What was given up: merging the second copy of a text that two requests computed at the same time,
because block tables are append-only.
"""

from collections.abc import Callable, Sequence

from quantwatch_kernels.serve.block_hash import BlockHash, ExtraKeys, block_digest, token_ids
from quantwatch_kernels.serve.block_pool import BlockPool
from quantwatch_kernels.serve.cached_block import CachedBlock, CacheStats
from quantwatch_kernels.serve.eviction import LRU, EvictionPolicy
from quantwatch_kernels.serve.victims import Victims

__all__ = ["PrefixCache"]


class PrefixCache:
    """Finds and keeps full blocks of `page_size` tokens in a pool that it attaches itself to."""

    def __init__(
        self,
        pool: BlockPool,
        page_size: int,
        policy: EvictionPolicy | None = None,
        *,
        digest: BlockHash = block_digest,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` gives the time of a use; without it requests are counted."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token; it is {page_size}.")
        self.page_size = page_size
        self.stats = CacheStats()
        self._pool, self._digest, self._clock = pool, digest, clock
        self._victims = Victims(policy or LRU())
        self._found: dict[bytes, CachedBlock] = {}
        self._of_block: dict[int, CachedBlock] = {}
        self._requests = 0
        pool.attach(self)

    def __len__(self) -> int:
        return len(self._of_block)

    def match(
        self, tokens: Sequence[int], extra: ExtraKeys = (), *, leave: int = 1
    ) -> list[CachedBlock]:
        """Return the entries of the longest kept prefix, changing nothing.

        `leave` tokens at the end are never covered: a request needs at least one new token, or
        there are no logits to go on from.
        """
        if leave < 0:
            raise ValueError(f"leave must be at least 0 tokens; it is {leave}.")
        ids, found = token_ids(tokens), list[CachedBlock]()
        for number in range(max(0, len(ids) - leave) // self.page_size):
            part = ids[number * self.page_size : (number + 1) * self.page_size]
            parent = found[-1] if found else None
            entry = self._found.get(self._name(parent, part, extra))
            if entry is None or not _is(entry, parent, part, extra):
                break
            found.append(entry)
        return found

    def acquire(
        self, tokens: Sequence[int], extra: ExtraKeys = (), *, source: str, leave: int = 1
    ) -> list[CachedBlock]:
        """Find the longest kept prefix and take a reference to each of its blocks for `source`."""
        found = self.match(tokens, extra, leave=leave)
        self._requests += 1
        self._victims.advance(self._now())
        self._pool.share([entry.block for entry in found])
        for entry in found:
            self._victims.reference(entry.digest, self._now(), source)
        self.stats.queries += max(0, len(tokens) - leave) // self.page_size
        self.stats.hits += len(found)
        return found

    def insert(
        self,
        parent: CachedBlock | None,
        block: int,
        tokens: Sequence[int],
        extra: ExtraKeys = (),
        *,
        source: str,
    ) -> CachedBlock:
        """Enter a full block that `source` uses and has computed; `parent` is its predecessor's.

        Returns the entry of this content: a new one, or that of another block which has the same.
        One that isn't alive if it can't be kept (its parent is gone, or another content has its
        digest): nothing behind it can be entered either. Raises ValueError for a block that isn't
        full, or that nobody uses.
        """
        ids = token_ids(tokens)
        self._check_full(block, ids)
        name = self._name(parent, ids, extra)
        entry = CachedBlock(block, name, ids, extra, parent, alive=False)
        if parent is not None and not parent.alive:
            return entry
        other = self._found.get(name)
        if other is not None:
            if _is(other, parent, ids, extra):
                self._victims.reference(name, self._now(), source)
                return other
            self.stats.collisions += 1
            return entry
        return self._enter(entry, source)

    def clear(self) -> None:
        """Forget every content, because the model or its weights changed; blocks stay used."""
        for entry in list(self._of_block.values()):
            if entry.alive and entry.parent is None:
                self._drop_tree(entry)

    def entry_of(self, block: int) -> CachedBlock | None:
        """Return the entry that a block holds the content of."""
        return self._of_block.get(block)

    # What the pool tells: see `block_pool.Keeper`.

    def keeps(self, block: int) -> bool:
        """Say whether the block has an entry."""
        return block in self._of_block

    def became_idle(self, block: int) -> None:
        """Make it a candidate for eviction if it is a leaf."""
        entry = self._of_block[block]
        self._victims.policy.release(entry.digest, self._now())
        if not entry.children:
            self._victims.add(entry.digest)

    def became_busy(self, block: int) -> None:
        """Make it none."""
        self._victims.discard(self._of_block[block].digest)

    def give_up(self) -> int:
        """Forget the policy's choice of the idle leaves, or the deepest idle entry if none is."""
        if len(self._victims):
            name = self._victims.pop()
            assert isinstance(name, bytes)
            entry = self._found[name]
        else:
            idle = [
                entry for entry in self._of_block.values() if not self._pool.ref_cnt(entry.block)
            ]
            entry = max(idle, key=lambda one: one.depth)
        self.stats.evictions += 1
        self._drop_tree(entry)
        return entry.block

    def renumbered(self, new_of: Sequence[int]) -> None:
        """Follow blocks to their new ids."""
        entries = list(self._of_block.values())
        for entry in entries:
            entry.block = new_of[entry.block]
        self._of_block = {entry.block: entry for entry in entries}

    def _check_full(self, block: int, ids: tuple[int, ...]) -> None:
        if len(ids) != self.page_size:
            raise ValueError(
                f"block {block} has {len(ids)} of {self.page_size} tokens; only a full one is kept."
            )
        if self._pool.ref_cnt(block) == 0:
            raise ValueError(f"block {block} is used by nobody; only a used one is entered.")
        if block in self._of_block:
            raise ValueError(f"block {block} is entered already.")

    def _enter(self, entry: CachedBlock, source: str) -> CachedBlock:
        entry.alive = True
        self._found[entry.digest] = self._of_block[entry.block] = entry
        if entry.parent is not None:
            entry.parent.children.add(entry)
            entry.depth = entry.parent.depth + 1
            self._victims.discard(entry.parent.digest)
        self._victims.reference(entry.digest, self._now(), source)
        return entry

    def _drop_tree(self, entry: CachedBlock) -> None:
        """Forget an entry and all that hang below it."""
        if entry.parent is not None:
            entry.parent.children.discard(entry)
            self._consider(entry.parent)
        waiting = [entry]
        while waiting:
            one = waiting.pop()
            waiting += one.children
            one.alive = False
            one.children = set()
            del self._found[one.digest], self._of_block[one.block]
            self._victims.discard(one.digest)
            self._victims.policy.evicted(one.digest)

    def _consider(self, entry: CachedBlock) -> None:
        if not entry.children and self._pool.ref_cnt(entry.block) == 0:
            self._victims.add(entry.digest)

    def _name(self, parent: CachedBlock | None, tokens: tuple[int, ...], extra: ExtraKeys) -> bytes:
        return self._digest(None if parent is None else parent.digest, tokens, extra)

    def _now(self) -> float:
        return float(self._requests) if self._clock is None else self._clock()


def _is(
    entry: CachedBlock, parent: CachedBlock | None, tokens: tuple[int, ...], extra: ExtraKeys
) -> bool:
    return entry.parent is parent and entry.tokens == tokens and entry.extra == extra
