"""Pool, prefix cache and tables together, with what would be in the pages written next to them."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantwatch_kernels.serve.block_hash import ExtraKeys, extra_keys
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_pool import PoolExhaustedError
from quantwatch_kernels.serve.cached_block import CachedBlock
from quantwatch_kernels.serve.eviction import POLICIES, make_policy
from quantwatch_kernels.serve.host_tier import HostTensors, SwapSpaceError
from quantwatch_kernels.serve.swap import PageBytes, SwapSpace

PAGE, BLOCKS, SLOTS = 2, 9, 5
NAMES = st.sampled_from("abcd")
TEXTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=7)
EXTRAS = st.sampled_from([(), extra_keys(lora="1"), extra_keys(salt="1")])


def content(tokens: tuple[int, ...], extra: ExtraKeys) -> int:
    """What attention would write for the last of these tokens: it depends on all, and on the keys."""
    return hash((tokens, extra)) & (2**62 - 1)


class ManagerMachine(RuleBasedStateMachine):
    """Catches a page that two requests write, content found under another's name, and any leak."""

    @initialize(policy=st.sampled_from(POLICIES))
    def make(self, policy: str) -> None:
        self.manager = BlockManager(BLOCKS, PAGE, make_policy(policy, BLOCKS))
        self.pages = torch.zeros(BLOCKS, PAGE, dtype=torch.int64)
        self.space = SwapSpace(HostTensors(SLOTS, PAGE * 8), PageBytes([self.pages]))
        self.texts: dict[str, tuple[tuple[int, ...], ExtraKeys]] = {}
        self.out: dict[str, tuple[tuple[int, ...], ExtraKeys]] = {}

    def state(self) -> object:
        tables = {name: table.blocks for name, table in self.manager.tables.items()}
        pool = self.manager.pool
        return (
            tables,
            pool.free_blocks,
            [pool.ref_cnt(b) for b in range(BLOCKS)],
            self.space.num_free,
        )

    @rule(name=NAMES, prompt=TEXTS, extra=EXTRAS)
    def start(self, name: str, prompt: list[int], extra: ExtraKeys) -> None:
        if name in self.texts or name in self.out:
            with pytest.raises(ValueError, match="has been started already"):
                self.manager.start(name, prompt, extra)
            return
        known = self.manager.start(name, prompt, extra)
        assert known < len(prompt)
        assert known % PAGE == 0
        self.texts[name] = tuple(prompt[:known]), extra
        self.write(name, prompt[known:])

    @rule(name=NAMES, tokens=TEXTS)
    def write(self, name: str, tokens: list[int]) -> None:
        if name not in self.texts:
            return
        before, wanted = self.state(), self.manager.blocks_wanted(name, len(tokens))
        free = self.manager.pool.num_free
        try:
            copies = self.manager.reserve(name, len(tokens))
        except PoolExhaustedError:
            assert wanted > free
            assert self.state() == before
            return
        assert wanted == free - self.manager.pool.num_free
        for block, source in copies:
            assert source is not None
            self.pages[block] = self.pages[source]
        done, extra = self.texts[name]
        after = done + tuple(tokens)
        slots = self.manager.table(name).slot_mapping(len(done), len(after)).tolist()
        for position, slot in enumerate(slots, start=len(done) + 1):
            self.pages.view(-1)[slot] = content(after[:position], extra)
        self.manager.commit(name, tokens)
        self.texts[name] = after, extra

    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        if name in self.texts and new not in self.texts and new not in self.out:
            self.manager.fork(name, new)
            self.texts[new] = self.texts[name]

    @rule(name=NAMES, share=st.floats(0, 1))
    def slide(self, name: str, share: float) -> None:
        if name in self.texts and self.texts[name][0]:
            self.manager.drop_before(name, int(share * (len(self.texts[name][0]) - 1)))

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        if name in self.texts:
            self.manager.finish(name)
            del self.texts[name]
        elif name in self.out:
            self.manager.discard(name, self.space)
            del self.out[name]

    @rule(name=NAMES)
    def swap_out(self, name: str) -> None:
        if name not in self.texts:
            return
        before = self.state()
        try:
            self.manager.swap_out(name, self.space)
        except SwapSpaceError:
            assert self.state() == before
            return
        self.out[name] = self.texts.pop(name)

    @rule(name=NAMES)
    def swap_in(self, name: str) -> None:
        if name not in self.out:
            return
        before = self.state()
        try:
            self.manager.swap_in(name, self.space)
        except PoolExhaustedError:
            assert self.state() == before
            return
        self.texts[name] = self.out.pop(name)

    @precondition(lambda self: self.texts)
    @rule()
    def tidy(self) -> None:
        first = next(iter(self.texts))
        self.manager.relayout([self.pages], [first, *(n for n in self.texts if n != first)])
        live = [block for block in self.manager.table(first).blocks if block]
        assert live == list(range(1, len(live) + 1))

    @invariant()
    def content_is_right(self) -> None:
        for name, (tokens, extra) in self.texts.items():
            table = self.manager.table(name)
            for position, slot in enumerate(table.slot_mapping(0, len(tokens)).tolist()):
                if slot >= 0:
                    expected = content(tokens[: position + 1], extra)
                    assert int(self.pages.view(-1)[slot]) == expected, (name, position)
                else:
                    assert position // PAGE < table.num_dropped

    @invariant()
    def counts_are_right(self) -> None:
        pool = self.manager.pool
        held = Counter(b for table in self.manager.tables.values() for b in table.blocks if b)
        assert [pool.ref_cnt(block) for block in range(BLOCKS)] == [held[b] for b in range(BLOCKS)]
        assert set(pool.free_blocks) == set(range(1, BLOCKS)) - set(held)

    @invariant()
    def digests_name_their_content(self) -> None:
        cache = self.manager.cache
        assert cache is not None
        for block in range(BLOCKS):
            entry = cache.entry_of(block)
            if entry is None:
                continue
            chain: list[CachedBlock] = [entry]
            while chain[-1].parent is not None:
                chain.append(chain[-1].parent)
            assert all(one.alive for one in chain)
            text = tuple(token for one in reversed(chain) for token in one.tokens)
            expected = [content(text[: len(text) - PAGE + k + 1], entry.extra) for k in range(PAGE)]
            assert self.pages[block].tolist() == expected

    @invariant()
    def csr_is_the_tables(self) -> None:
        names = [name for name, (tokens, _) in self.texts.items() if tokens]
        plan = self.manager.plan(names)
        for number, name in enumerate(names):
            begin, end = plan.kv_indptr[number : number + 2].tolist()
            blocks = self.manager.table(name).blocks
            assert tuple(plan.kv_indices[begin:end].tolist()) == tuple(b for b in blocks if b)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=40, stateful_step_count=25)


def prefill(manager: BlockManager, name: str, prompt: list[int], extra: ExtraKeys = ()) -> int:
    known = manager.start(name, prompt, extra)
    manager.reserve(name, len(prompt) - known)
    manager.commit(name, prompt[known:])
    return known


def test_a_long_prompt_again_costs_one_block() -> None:
    """The issue's case: 2,048 tokens, all but the last block are there."""
    manager = BlockManager(400, 16)
    prompt = np.random.default_rng(0).integers(0, 49152, 2048).tolist()
    assert prefill(manager, "cold", prompt) == 0
    manager.finish("cold")
    assert prefill(manager, "warm", prompt) == 2048 - 16
    assert prefill(manager, "other adapter", prompt, extra_keys(lora="x")) == 0
    manager.finish("warm")
    manager.finish("other adapter")
    assert manager.pool.num_used == 0


def test_a_prompt_longer_than_the_pool_is_refused_at_once() -> None:
    """Catches a request that waits for ever for pages that can't exist."""
    manager = BlockManager(5, 16)
    with pytest.raises(ValueError, match="a prompt of 65 tokens takes 5 pages; the pool has 4"):
        manager.start("long", list(range(65)))
    assert prefill(manager, "fits", list(range(64))) == 0


def test_a_full_pool_harms_nobody() -> None:
    """Catches a request that loses its pages to another's failed reserve; a cancelled one frees them."""
    manager = BlockManager(5, 4)
    prefill(manager, "a", list(range(8)))
    prefill(manager, "b", list(range(20, 28)))
    before = {name: table.blocks for name, table in manager.tables.items()}
    with pytest.raises(PoolExhaustedError, match="1 blocks were asked for and 0 of 5 are free"):
        manager.reserve("a", 1)
    assert {name: table.blocks for name, table in manager.tables.items()} == before
    manager.finish("b")
    assert manager.reserve("a", 1) == []
    # b's first block is still found: only its tail was given up.
    assert manager.start("c", [*range(20, 28), 1]) == 4


def test_who_writes_to_a_shared_page_first_gets_a_copy() -> None:
    """Catches beams that overwrite each other; the last to hold the page writes in place."""
    manager = BlockManager(8, 4)
    prefill(manager, "a", [1, 2, 3, 4, 5])
    manager.fork("a", "b")
    shared = manager.table("a").blocks
    assert manager.blocks_wanted("b", 1) == 1
    copies = manager.reserve("b", 1)
    assert copies == [(manager.table("b").blocks[1], shared[1])]
    assert manager.table("b").blocks[0] == shared[0]
    assert manager.reserve("a", 1) == []
    assert manager.table("a").blocks == shared
    with pytest.raises(ValueError, match="has reserved slots that aren't written"):
        manager.fork("a", "c")


def test_swapped_pages_can_be_found_again() -> None:
    """Catches a request that comes back from the host and is lost to the prefix cache."""
    manager = BlockManager(5, 4)
    pages = torch.zeros(5, 4, dtype=torch.int64)
    space = SwapSpace(HostTensors(4, 32), PageBytes([pages]))
    prefill(manager, "a", list(range(8)))
    manager.swap_out("a", space)
    prefill(manager, "other", list(range(50, 66)))  # takes every page
    manager.finish("other")
    manager.swap_in("a", space)
    assert manager.start("b", [*range(8), 1]) == 8
    assert manager.table("b").blocks == manager.table("a").blocks


def test_a_page_that_was_dropped_is_not_entered() -> None:
    """Catches a null block entered under a digest: tokens that a window left before the commit."""
    manager = BlockManager(8, 4)
    manager.start("a", list(range(12)))
    manager.reserve("a", 12)
    manager.commit("a", [0, 1])
    manager.drop_before("a", 8)
    manager.commit("a", list(range(2, 12)))
    assert manager.start("b", [*range(12), 1]) == 0


def test_without_a_cache_nothing_is_found() -> None:
    """Catches `caching=False` that keeps pages all the same."""
    manager = BlockManager(8, 4, caching=False)
    prefill(manager, "a", list(range(9)))
    manager.finish("a")
    assert manager.cache is None
    assert prefill(manager, "b", list(range(9))) == 0


def test_bad_input() -> None:
    """Catches names that aren't there, and tokens without a slot."""
    manager = BlockManager(8, 4)
    space = SwapSpace(HostTensors(2, 8), PageBytes([torch.zeros(8, 1, dtype=torch.int64)]))
    prefill(manager, "a", [1, 2])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: manager.start("a", [1]), "request 'a' has been started already"),
        (lambda: manager.start("b", []), "request 'b': the prompt is empty"),
        (lambda: manager.reserve("b", 1), "there is no request 'b'"),
        (lambda: manager.reserve("a", -1), "num_new must be at least 0"),
        (lambda: manager.finish("b"), "there is no request 'b'"),
        (lambda: manager.fork("a", "a"), "request 'a' has been started already"),
        (lambda: manager.commit("a", [3]), r"has 2 slots; 2 \+ 1 tokens are too many"),
        (lambda: manager.swap_in("a", space), "there is no request 'a' in the host"),
        (lambda: manager.start("c", [-1, 2, 3, 4, 5]), "token 0 is -1"),
    ]
    for step, message in cases:
        with pytest.raises(ValueError, match=message):
            step()
    assert list(manager.tables) == ["a"]
    manager.swap_out("a", space)
    with pytest.raises(ValueError, match="request 'a' has been started already"):
        manager.start("a", [1])
