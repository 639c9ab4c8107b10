"""LRU, LRU-K, SLRU and the heap of victims, on hand-made references."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch_kernels.serve.eviction import LRU, LRUK, POLICIES, SLRU, EvictionPolicy, make_policy
from quantwatch_kernels.serve.victims import Victims


def play(policy: EvictionPolicy, text: str) -> Victims:
    """Refer to each letter at time 1, 2, …, let go at once; "-" lets time pass."""
    victims = Victims(policy)
    for now, key in enumerate(text, start=1):
        victims.advance(now)
        if key == "-":
            continue
        victims.discard(key)
        victims.reference(key, now, f"request {now}")
        policy.release(key, now)
        victims.add(key)
    return victims


def order(victims: Victims) -> str:
    """Evict everything; say in what order it went."""
    gone = ""
    while len(victims):
        key = str(victims.pop())
        victims.policy.evicted(key)
        gone += key
    return gone


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (LRU, "abcab", "cab"),
        (lambda: LRUK(2), "abcab", "cab"),
        # d and e were asked for once, later than all others: they go first under LRU-2 only.
        (LRU, "aabbde", "abde"),
        (lambda: LRUK(2), "aabbde", "deab"),
        # By the second-last reference (b: 2, a: 3), not by the last one (a: 4, b: 5).
        (LRU, "cbaab", "cab"),
        (lambda: LRUK(2), "cbaab", "cba"),
        (lambda: LRUK(1), "cbaab", "cab"),
        # K = 3: none has three, so by last use.
        (lambda: LRUK(3), "cbaab", "cab"),
        (lambda: SLRU(2), "aabbde", "deab"),
        # Three were asked for twice and two are protected: a is demoted, and newest there.
        (lambda: SLRU(2), "aabbdecc", "deabc"),
        (lambda: SLRU(0), "aabbde", "abde"),
    ],
    ids=[
        "lru",
        "lru-2",
        "lru scan",
        "lru-2 scan",
        "lru by last",
        "lru-2 by second",
        "lru-1 is lru",
        "lru-3",
        "slru",
        "slru overflow",
        "slru without protection",
    ],
)
def test_order_of_victims(make: Callable[[], EvictionPolicy], text: str, expected: str) -> None:
    """Catches a policy that is another one."""
    assert order(play(make(), text)) == expected


def test_correlated_references_are_one() -> None:
    """Catches a burst that counts as K references (sglang#24075): a's three are one, b's two aren't."""
    victims = play(LRUK(2, correlated=1), "b--b-aaa---------")
    assert order(victims) == "ab"
    assert order(play(LRUK(2), "b--b-aaa---------")) == "ba"


def test_references_of_one_request_are_one() -> None:
    """Catches several touches inside one request as K references."""
    policy = LRUK(2)
    for now in (1, 5, 9):
        policy.reference("a", now, "the same request")
    assert policy.rank("a")[:2] == (0, float("-inf"))
    policy.reference("a", 10, "another")
    assert policy.rank("a")[:2] == (0, 9.0)  # 1, and the burst lasted for 8
    policy.reference("a", 11, "the same request")
    assert policy.rank("a")[:2] == (0, 9.0)


def test_the_length_of_a_burst_is_taken_out() -> None:
    """O'Neil's step: history 1 … 4 of one burst counts as a reference at its end."""
    policy = LRUK(2, correlated=2)
    for now in (1, 2, 4, 20):
        policy.reference("a", now)
    policy.advance(40)
    assert policy.rank("a")[:2] == (0, 4.0)


def test_history_is_retained_after_eviction() -> None:
    """Catches an LRU-K that forgets: content that returns later than it is kept never reaches K."""
    for retained, second in ((1, 1.0), (0, float("-inf"))):
        policy = LRUK(2, retained=retained)
        policy.reference("a", 1)
        policy.evicted("a")
        assert policy.num_retained == retained
        policy.reference("a", 9)
        assert policy.rank("a")[1] == second
        assert policy.num_retained == 0


def test_retained_history_is_bounded() -> None:
    """Catches a memory leak of one history per text ever seen; the oldest goes."""
    policy = LRUK(2, retained=2)
    for now, key in enumerate("abc"):
        policy.reference(key, now)
        policy.evicted(key)
    assert policy.num_retained == 2
    policy.reference("a", 9)
    policy.reference("c", 9)
    assert policy.rank("a")[1] == float("-inf")
    assert policy.rank("c")[1] == 2.0


def test_within_its_correlated_period_content_goes_last() -> None:
    """Catches newcomers that leave before they can be asked for again; later they go first."""
    assert order(play(LRUK(2, correlated=3), "a----a----bc")) == "abc"
    assert order(play(LRUK(2, correlated=3), "a----a----bc----")) == "bca"


def test_a_release_is_no_reference() -> None:
    """Catches the end of a request as a second use, under LRU-K and SLRU."""
    policies: list[EvictionPolicy] = [LRUK(2), SLRU(4)]
    for policy in policies:
        policy.reference("a", 1, "r1")
        policy.release("a", 5)
        policy.reference("b", 2, "r2")
        policy.reference("b", 3, "r3")
        assert policy.rank("a") < policy.rank("b")


@given(
    text=st.text("abcdef-", max_size=60), k=st.integers(1, 3), correlated=st.sampled_from([0, 2])
)
def test_heap_is_a_sorted_list(text: str, k: int, correlated: float) -> None:
    """Catches stale entries: whatever happened, the next victim is the lowest rank there is."""
    policies: list[EvictionPolicy] = [LRU(), LRUK(k, correlated=correlated), SLRU(2)]
    for policy in policies:
        victims = play(policy, text)
        while len(victims):
            keys = [key for key in "abcdef" if key in victims]
            lowest = min(keys, key=policy.rank)
            assert victims.pop() == lowest
            policy.evicted(lowest)


@given(text=st.text("abcd", max_size=40))
def test_lru_1_is_lru(text: str) -> None:
    """A law: with K = 1 and nothing correlated the last reference is all."""
    assert order(play(LRUK(1), text)) == order(play(LRU(), text))


def test_bad_input() -> None:
    """Catches a policy whose name or size means nothing."""
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: make_policy("lfu", 4), "no eviction policy 'lfu'; there are lru, lru-k, slru"),
        (lambda: make_policy("lru", 0), "num_blocks must be at least 1"),
        (lambda: LRUK(0), "k must be at least 1"),
        (lambda: LRUK(2, correlated=float("nan")), "correlated must be at least 0"),
        (lambda: LRUK(2, retained=-1), "retained must be at least 0"),
        (lambda: SLRU(-1), "protected must be at least 0"),
        (lambda: Victims(LRU()).pop(), "no candidate"),
    ]
    for step, message in cases:
        with pytest.raises(ValueError, match=message):
            step()
    assert [type(make_policy(name, 10)) for name in POLICIES] == [LRU, LRUK, SLRU]
