"""Block hashes and the prefix cache: found by content, believed only when it is the same."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.serve.block_hash import ExtraKeys, block_digest, extra_keys, token_ids
from quantwatch_kernels.serve.block_pool import BlockPool, PoolExhaustedError
from quantwatch_kernels.serve.cached_block import CachedBlock
from quantwatch_kernels.serve.prefix_cache import PrefixCache

PAGE = 4


def made(num_blocks: int = 10, **options: object) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, PAGE, **options)  # type: ignore[arg-type]


def entered(
    pool: BlockPool,
    cache: PrefixCache,
    tokens: Sequence[int],
    extra: ExtraKeys = (),
    name: str = "r",
) -> list[int]:
    """Compute a text's full blocks as a request would; return the blocks it holds."""
    found = cache.acquire(tokens, extra, source=name, leave=0)
    parent: CachedBlock | None = found[-1] if found else None
    blocks = [entry.block for entry in found]
    for begin in range(len(found) * PAGE, len(tokens) - PAGE + 1, PAGE):
        blocks += pool.take(1)
        parent = cache.insert(parent, blocks[-1], tokens[begin : begin + PAGE], extra, source=name)
    return blocks


def ids_found(cache: PrefixCache, tokens: Sequence[int], extra: ExtraKeys = ()) -> list[int]:
    return [entry.block for entry in cache.match(tokens, extra, leave=0)]


DIFFERENT: dict[str, tuple[bytes, bytes]] = {
    "token id & 0xFF (vllm-mlx#444)": (
        block_digest(None, (1,), ()),
        block_digest(None, (257,), ()),
    ),
    "token order": (block_digest(None, (1, 2), ()), block_digest(None, (2, 1), ())),
    "number of tokens": (block_digest(None, (0,), ()), block_digest(None, (0, 0), ())),
    "parent": (block_digest(None, (1,), ()), block_digest(bytes(32), (1,), ())),
    "lora or salt (vllm#44701)": (
        block_digest(None, (1,), extra_keys(lora="1")),
        block_digest(None, (1,), extra_keys(salt="1")),
    ),
    "where a name ends": (
        block_digest(None, (1,), extra_keys(ab="c")),
        block_digest(None, (1,), extra_keys(a="bc")),
    ),
    "type": (
        block_digest(None, (1,), extra_keys(lora=1)),
        block_digest(None, (1,), extra_keys(lora="1")),
    ),
    "scheme of the cache": (
        block_digest(None, (1,), extra_keys(scheme="int8")),
        block_digest(None, (1,), extra_keys(scheme="int4")),
    ),
    "a key that looks like a token": (
        block_digest(None, (), extra_keys(a=b"\1\0\0\0")),
        block_digest(None, (1,), extra_keys(a=b"")),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_content_has_another_digest(case: str) -> None:
    """Catches keys that run into each other."""
    one, other = DIFFERENT[case]
    assert one != other
    assert len(one) == len(other) == 32


def test_digests_are_the_same_in_every_process() -> None:
    """Catches Python's salted hash(): a stored digest would name nothing tomorrow."""
    digest = block_digest(block_digest(None, (1, 2), ()), (3, 300), extra_keys(lora="a", salt=None))
    assert digest == block_digest(block_digest(None, (1, 2), ()), (3, 300), (("lora", "a"),))
    assert digest.hex().startswith("634c65b2eb36c971")


def test_extra_keys_and_tokens_refuse_what_would_compare_equal() -> None:
    """Catches True, 1 and 1.0 as one key, and ids that don't fit."""
    assert extra_keys(salt="s", lora=None, a=1) == (("a", 1), ("salt", "s"))
    with pytest.raises(ValueError, match="extra key 'lora' is True"):
        extra_keys(lora=True)
    with pytest.raises(ValueError, match=r"extra key 'lora' is 1\.0"):
        extra_keys(lora=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token 1 is -1"):
        token_ids([3, -1])
    with pytest.raises(ValueError, match="token 0 is 9223372036854775808"):
        token_ids([2**63])


def test_a_prefix_is_found_by_another_request() -> None:
    """Catches reuse that ends with the request: the blocks outlive it and are shared."""
    pool, cache = made()
    blocks = entered(pool, cache, range(12), name="first")
    pool.free(blocks)
    assert pool.num_free == 9
    found = cache.acquire([*range(8), 99, 98, 97, 96], source="second")
    assert [entry.block for entry in found] == blocks[:2]
    assert [pool.ref_cnt(block) for block in blocks] == [1, 1, 0]
    assert (cache.stats.queries, cache.stats.hits) == (3 + 2, 2)
    assert cache.stats.hit_rate == 2 / 5


@pytest.mark.parametrize(
    ("length", "leave", "expected"),
    [(12, 1, 2), (13, 1, 3), (12, 0, 3), (11, 1, 2), (3, 1, 0), (1, 1, 0), (0, 1, 0), (12, 9, 0)],
)
def test_the_last_token_is_always_computed(length: int, leave: int, expected: int) -> None:
    """Catches a prompt that is found whole: there would be no logits to go on from."""
    pool, cache = made()
    entered(pool, cache, range(16))
    assert len(cache.match(range(length), leave=leave)) == expected


@pytest.mark.parametrize(
    "other",
    [
        extra_keys(lora="a"), extra_keys(salt="tenant"), extra_keys(scheme="int4"), extra_keys(scheme="int8", lora="a"),
    ],
)  # fmt: skip
def test_other_keys_find_nothing(other: ExtraKeys) -> None:
    """Catches quantized blocks reused under another scheme, adapter or tenant."""
    pool, cache = made()
    mine = extra_keys(scheme="int8")
    entered(pool, cache, range(8), mine)
    assert len(ids_found(cache, range(8), mine)) == 2
    assert ids_found(cache, range(8), other) == []
    assert ids_found(cache, range(8)) == []


WEAK: dict[str, Callable[[bytes | None, tuple[int, ...], ExtraKeys], bytes]] = {
    "everything is one": lambda *_content: b"x",
    "no parent": lambda _parent, tokens, extra: block_digest(None, tokens, extra),
    "no extra keys": lambda parent, tokens, _extra: block_digest(parent, tokens, ()),
    "low byte of tokens": lambda parent, tokens, extra: block_digest(
        parent, tuple(token & 255 for token in tokens), extra
    ),
}


@pytest.mark.parametrize("weak", WEAK)
@settings(max_examples=50)
@given(
    texts=st.lists(
        st.tuples(
            st.lists(
                st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 2), (257, 1, 1, 1)]),
                min_size=1,
                max_size=3,
            ),
            st.sampled_from([(), extra_keys(lora="a"), extra_keys(salt="a")]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_colliding_hash_gives_no_wrong_block(
    weak: str, texts: list[tuple[list[tuple[int, ...]], ExtraKeys]]
) -> None:
    """Catches a hit that is believed: whatever is found has the same keys and the same tokens before it."""
    pool, cache = made(40, digest=WEAK[weak])
    written: dict[int, tuple[tuple[int, ...], ExtraKeys]] = {}
    for number, (parts, extra) in enumerate(texts):
        tokens = [token for part in parts for token in part]
        found = ids_found(cache, tokens, extra)
        blocks = entered(pool, cache, tokens, extra, name=f"r{number}")
        assert blocks[: len(found)] == found
        for place, block in enumerate(blocks):
            content = tuple(tokens[: (place + 1) * PAGE]), extra
            if place < len(found):
                assert written[block] == content
            written[block] = content
        pool.free(blocks)


def test_collisions_are_counted() -> None:
    """Catches a second content that silently replaces the first under its digest."""
    pool, cache = made(digest=WEAK["everything is one"])
    first = entered(pool, cache, range(4))
    entered(pool, cache, range(4, 8))
    assert cache.stats.collisions == 1
    assert len(cache) == 1
    assert ids_found(cache, range(4)) == first


def test_eviction_clears_the_digest() -> None:
    """Catches a stale hash after reuse (kvcached#362): the block is someone else's now."""
    pool, cache = made(4)
    pool.free(entered(pool, cache, range(12)))
    assert len(ids_found(cache, range(12))) == 3
    taken = pool.take(1)
    assert cache.entry_of(taken[0]) is None
    assert len(ids_found(cache, range(12))) == 2
    assert cache.stats.evictions == 1
    pool.take(2)
    assert ids_found(cache, range(12)) == []
    assert len(cache) == 0


def test_leaves_go_before_their_parents() -> None:
    """Catches an evicted root whose children can't be found and aren't free either."""
    pool, cache = made(6)
    stem = [1, 2, 3, 4, 5, 6, 7, 8]
    long = entered(pool, cache, [*stem, 9, 9, 9, 9], name="a")
    short = entered(pool, cache, [*stem, 8, 8, 8, 8], name="b")
    pool.free(short)
    pool.free(long)
    # The stem was last used longest ago by neither: it goes when both its children have gone.
    assert pool.take(1) == [5]  # blank
    assert pool.take(4) == [short[2], long[2], long[1], long[0]]


def test_a_parent_that_is_idle_longer_than_its_child_stays_longer() -> None:
    """Catches recency before the tree: the parent's own reader left first, its child's later."""
    pool, cache = made(6)
    first, second = pool.take(1), pool.take(2)
    root = cache.insert(None, first[0], [1, 2, 3, 4], source="first")
    cache.insert(root, second[1], [5, 6, 7, 8], source="second")
    pool.free(first)
    pool.free(second)
    pool.take(3)  # all blank ones
    assert pool.take(1) == [second[1]]
    assert pool.take(1) == first


def test_what_is_used_again_is_no_candidate_any_more() -> None:
    """Catches a victim that was idle once: it is used now, and the other one has to go."""
    pool, cache = made(4)
    one, other = (
        entered(pool, cache, range(4), name="a"),
        entered(pool, cache, range(9, 13), name="b"),
    )
    pool.free(one)
    cache.acquire(range(5), source="again")
    pool.free(other)
    pool.take(1)  # the blank one
    assert pool.take(1) == other
    with pytest.raises(PoolExhaustedError):
        pool.take(1)
    assert ids_found(cache, range(4)) == one


def test_without_an_idle_leaf_the_deepest_goes_first() -> None:
    """Catches a root that takes idle blocks with it although they could have been found."""
    pool, cache = made(6)
    chain, below = pool.take(2), pool.take(1)
    root = cache.insert(None, chain[0], [1, 1, 1, 1], source="first")
    middle = cache.insert(root, chain[1], [2, 2, 2, 2], source="first")
    cache.insert(middle, below[0], [3, 3, 3, 3], source="second")
    pool.free(chain)
    pool.take(2)  # the blank ones
    assert pool.take(1) == [chain[1]]
    assert ids_found(cache, [1] * 4 + [2] * 4) == [chain[0]]
    assert pool.take(1) == [chain[0]]
    assert (cache.stats.evictions, len(cache)) == (2, 0)


def test_what_is_used_is_never_given_up() -> None:
    """Catches the policy's choice of a block with a reference."""
    pool, cache = made(5)
    busy = entered(pool, cache, range(8), name="busy")
    idle = entered(pool, cache, range(50, 58), name="idle")
    pool.free(idle)
    assert pool.take(2) == idle[::-1]
    assert ids_found(cache, range(8)) == busy
    assert not pool.can_take(1)


def test_a_text_computed_twice_is_entered_once() -> None:
    """And what hangs below the other's copy stays right when that copy has to go."""
    pool, cache = made(6)
    first = pool.take(1) + pool.take(1)
    second = pool.take(1) + pool.take(1)
    root = cache.insert(None, first[0], [1, 2, 3, 4], source="first")
    again = cache.insert(None, second[0], [1, 2, 3, 4], source="second")
    assert again is root
    assert cache.entry_of(second[0]) is None
    cache.insert(again, second[1], [5, 6, 7, 8], source="second")
    pool.free(first)  # the root is idle, its child is used, and no leaf is idle
    assert ids_found(cache, range(1, 9)) == [first[0], second[1]]
    # Two blank ones first; then the root must go, and its child can't be found any more.
    assert sorted(pool.take(3)) == sorted([first[1], 5, first[0]])
    assert ids_found(cache, range(1, 9)) == []
    assert pool.ref_cnt(second[1]) == 1
    assert not root.alive
    below = cache.insert(root, second[0], [5, 5, 5, 5], source="second")
    assert not below.alive
    assert not cache.insert(below, second[0], [5, 5, 5, 5], source="second").alive
    assert len(cache) == 0


def test_a_page_that_the_cache_keeps_is_copied_before_it_is_written() -> None:
    """Catches a write that changes what a digest names."""
    pool, cache = made()
    block = entered(pool, cache, range(4))[0]
    new, source = pool.writable(block)
    assert source == block != new
    assert ids_found(cache, range(4)) == [block]


def test_clear_forgets_all_and_frees_nothing_that_is_used() -> None:
    """Catches keys and values of the weights before an update."""
    pool, cache = made()
    used = entered(pool, cache, range(8))
    pool.free(entered(pool, cache, range(50, 58)))
    cache.clear()
    assert len(cache) == 0
    assert ids_found(cache, range(8)) == ids_found(cache, range(50, 58)) == []
    assert [pool.ref_cnt(block) for block in used] == [1, 1]
    assert len(pool.take(7)) == 7


def test_bad_input(tmp_path: Path) -> None:
    """Catches a partial block that is entered and then grows."""
    pool, cache = made()
    block = pool.take(1)[0]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: PrefixCache(BlockPool(4), 0), "page_size must be at least 1"),
        (lambda: PrefixCache(pool, 4), "the pool has a keeper already"),
        (lambda: cache.insert(None, block, [1, 2, 3], source="r"), "3 of 4 tokens"),
        (lambda: cache.insert(None, 5, [1, 2, 3, 4], source="r"), "used by nobody"),
        (lambda: cache.match([1], leave=-1), "leave must be at least 0"),
        (lambda: cache.stats.hit_rate, "no block has been asked for"),
    ]
    for step, message in cases:
        with pytest.raises(ValueError, match=message):
            step()
    cache.insert(None, block, [1, 2, 3, 4], source="r")
    with pytest.raises(ValueError, match="entered already"):
        cache.insert(None, block, [5, 6, 7, 8], source="r")
    late = BlockPool(4)
    late.take(1)
    with pytest.raises(ValueError, match="1 blocks are used"):
        PrefixCache(late, 4)
