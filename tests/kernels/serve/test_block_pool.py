"""Reference counts, the free list and copy-on-write of a block pool."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quantwatch_kernels.serve.block_pool import NULL_BLOCK, BlockPool, PoolExhaustedError
from quantwatch_kernels.serve.free_list import FreeList


class FreeListMachine(RuleBasedStateMachine):
    """Catches a broken link: the same steps on an ordered dictionary give the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.model = FreeList(6), OrderedDict[int, None]()

    @rule(block=st.integers(-1, 6), front=st.booleans())
    def push(self, block: int, front: bool) -> None:
        step = self.real.push_front if front else self.real.push_back
        if block in self.model or not 0 <= block < 6:
            with pytest.raises(ValueError, match=f"block {block}"):
                step(block)
            return
        step(block)
        self.model[block] = None
        self.model.move_to_end(block, last=not front)

    @rule(block=st.integers(-1, 6))
    def remove(self, block: int) -> None:
        if block not in self.model:
            with pytest.raises(ValueError, match=f"block {block} isn't"):
                self.real.remove(block)
            return
        self.real.remove(block)
        del self.model[block]

    @invariant()
    def same(self) -> None:
        assert list(self.real) == list(self.model)
        assert len(self.real) == len(self.model)
        assert self.real.first == next(iter(self.model), None)
        assert all((block in self.real) == (block in self.model) for block in range(-1, 7))


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=30)


class PoolMachine(RuleBasedStateMachine):
    """Catches a count that drifts, and a block that is free and used, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.counts = dict.fromkeys(range(1, 7), 0)

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        free = sum(held == 0 for held in self.counts.values())
        if count > free:
            before = self.pool.free_blocks
            with pytest.raises(
                PoolExhaustedError, match=f"{count} blocks were asked for and {free} of"
            ):
                self.pool.take(count)
            assert self.pool.free_blocks == before
            return
        for block in self.pool.take(count):
            assert self.counts[block] == 0
            self.counts[block] = 1

    @rule(blocks=st.lists(st.integers(0, 6), max_size=4))
    def share(self, blocks: list[int]) -> None:
        if any(block and not self.counts[block] for block in blocks):
            with pytest.raises(ValueError, match="nothing to share"):
                self.pool.share(blocks)
            return
        self.pool.share(blocks)
        for block in filter(None, blocks):
            self.counts[block] += 1

    @rule(blocks=st.lists(st.integers(0, 6), max_size=5))
    def free(self, blocks: list[int]) -> None:
        if any(block and self.counts[block] < blocks.count(block) for block in blocks):
            with pytest.raises(ValueError, match="can't be dropped"):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for block in filter(None, blocks):
            self.counts[block] -= 1

    @rule(block=st.integers(1, 6))
    def write(self, block: int) -> None:
        held, before = self.counts[block], dict(self.counts)
        if held == 0:
            with pytest.raises(ValueError, match="used by nobody"):
                self.pool.writable(block)
        elif held == 1:
            assert self.pool.writable(block) == (block, None)
        elif all(self.counts.values()):
            with pytest.raises(PoolExhaustedError):
                self.pool.writable(block)
        else:
            new, source = self.pool.writable(block)
            assert source == block
            assert before[new] == 0
            self.counts[block] -= 1
            self.counts[new] = 1

    @rule(order=st.permutations(range(1, 7)))
    def renumber(self, order: list[int]) -> None:
        new_of = [0, *order]
        before = self.pool.free_blocks
        self.pool.renumber(new_of)
        self.counts = {new_of[block]: held for block, held in self.counts.items()}
        assert self.pool.free_blocks == tuple(new_of[block] for block in before)

    @invariant()
    def counted(self) -> None:
        assert {block: self.pool.ref_cnt(block) for block in range(1, 7)} == self.counts
        idle = {block for block, held in self.counts.items() if held == 0}
        assert set(self.pool.free_blocks) == idle
        assert len(self.pool.free_blocks) == self.pool.num_free == len(idle)
        assert self.pool.num_used == 6 - len(idle)
        assert self.pool.ref_cnt(NULL_BLOCK) == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30)


def test_a_freed_request_leaves_its_blocks_in_their_order() -> None:
    """Catches pages that come back reversed: the next request's would lie against its order."""
    pool = BlockPool(6)
    blocks = pool.take(3)
    pool.free(blocks)
    assert pool.free_blocks == (*blocks, 4, 5)


def test_the_null_block_is_never_handed_out() -> None:
    """Catches padding that writes into a live request's page."""
    pool = BlockPool(4)
    assert NULL_BLOCK not in pool.take(3)
    pool.share([NULL_BLOCK])
    pool.free([NULL_BLOCK, NULL_BLOCK])
    assert pool.ref_cnt(NULL_BLOCK) == 0
    with pytest.raises(PoolExhaustedError, match="1 blocks were asked for and 0 of 4 are free"):
        pool.take(1)


def test_exhaustion_says_what_is_missing_and_harms_nobody() -> None:
    """Catches a half-done take: five of six blocks gone and an exception."""
    pool = BlockPool(8)
    held = pool.take(3)
    with pytest.raises(PoolExhaustedError) as caught:
        pool.take(5)
    assert (caught.value.wanted, caught.value.num_free, caught.value.num_blocks) == (5, 4, 8)
    assert [pool.ref_cnt(block) for block in held] == [1, 1, 1]
    assert pool.can_take(4)
    assert not pool.can_take(5)
    assert len(pool.take(4)) == 4


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda _pool: BlockPool(1), "num_blocks must be at least 2"),
        (lambda _pool: FreeList(0), "capacity must be at least 1"),
        (lambda pool: pool.take(-1), "count must be at least 0"),
        (lambda pool: pool.ref_cnt(9), r"block 9 is none of 0 … 3"),
        (lambda pool: pool.free([-1]), r"block -1 is none of"),
        (lambda pool: pool.share([2]), "block 2 is free and blank"),
        (lambda pool: pool.free([1, 1]), "block 1 has 1 references; 2 can't be dropped"),
        (lambda pool: pool.renumber([0, 1, 1, 3]), "permutation"),
        (lambda pool: pool.renumber([1, 0, 2, 3]), "keeps block 0"),
    ],
    ids=[
        "one block",
        "no list",
        "negative",
        "unknown",
        "negative id",
        "blank",
        "double free",
        "no permutation",
        "null",
    ],
)
def test_bad_input(step: object, message: str) -> None:
    """Catches a count that goes below zero, and an id from another pool."""
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(ValueError, match=message):
        step(pool)  # type: ignore[operator]
    assert pool.ref_cnt(1) == 1
    assert pool.num_free == 2


@given(rounds=st.lists(st.integers(1, 5), max_size=30))
def test_nothing_is_lost(rounds: list[int]) -> None:
    """Catches a leak: after any takes and frees the pool is whole again."""
    pool = BlockPool(6)
    for count in rounds:
        pool.free(pool.take(count))
    assert sorted(pool.free_blocks) == [1, 2, 3, 4, 5]
