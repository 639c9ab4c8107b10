"""The scheduler as a state machine: who gets which tokens, over pages that are only counted."""

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.serve.engine.fake_blocks import CountedBlocks

from quantwatch_kernels.serve.engine.batch import Batch, Limits
from quantwatch_kernels.serve.engine.request import Outcome, Request
from quantwatch_kernels.serve.engine.scheduler import Scheduler


def request(name: str, length: int, new: int = 4, priority: int = 0) -> Request:
    return Request(name, tuple(range(length)), new, priority=priority)


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    return [(row.name, row.start, len(row.tokens)) for row in batch.rows]


def step(scheduler: Scheduler, token: int = 7) -> tuple[list[tuple[str, int, int]], list[Outcome]]:
    batch = scheduler.schedule()
    ended = scheduler.update(batch, {row.name: token for row in batch.rows if row.samples})
    return shape(batch), ended


def drain(scheduler: Scheduler, most: int = 2000) -> dict[str, Outcome]:
    ended: dict[str, Outcome] = {}
    for _ in range(most):
        if not scheduler.running and not scheduler.waiting:
            return ended
        ended |= {outcome.name: outcome for outcome in step(scheduler)[1]}
    raise AssertionError(f"still there: {scheduler.running}, {scheduler.waiting}")


def test_needs_no_torch() -> None:
    """Catches a tensor in what decides: it must be testable and readable by itself."""
    code = "import sys, quantwatch_kernels.serve.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_comes_in_chunks_and_decodes_go_first() -> None:
    """A long prompt never stalls who decodes; only its last chunk is sampled from."""
    scheduler = Scheduler(CountedBlocks(100), Limits(8, 4))
    scheduler.add(request("a", 3))
    assert step(scheduler)[0] == [("a", 0, 3)]
    scheduler.add(request("b", 17))
    batch = scheduler.schedule()
    assert shape(batch) == [("a", 3, 1), ("b", 0, 7)]
    assert [row.samples for row in batch.rows] == [True, False]
    scheduler.update(batch, {"a": 7})
    assert step(scheduler)[0] == [("a", 4, 1), ("b", 7, 7)]
    assert step(scheduler)[0] == [("a", 5, 1), ("b", 14, 3)]
    assert step(scheduler)[0] == [("b", 17, 1)]


def test_what_the_first_prompt_leaves_goes_to_the_next() -> None:
    scheduler = Scheduler(CountedBlocks(100), Limits(8, 4))
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 5))
    assert step(scheduler)[0] == [("a", 0, 5), ("b", 0, 3)]
    assert step(scheduler)[0] == [("a", 5, 1), ("b", 3, 2), ("c", 0, 5)]


def test_priority_then_arrival() -> None:
    scheduler = Scheduler(CountedBlocks(100), Limits(2, 2))
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        scheduler.add(request(name, 1, priority=priority))
    assert scheduler.waiting == ("urgent", "first", "second", "late")
    assert step(scheduler)[0] == [("urgent", 0, 1), ("first", 0, 1)]


@pytest.mark.parametrize(
    ("eos", "new", "tokens", "reason"),
    [({7}, 4, (7,), "eos"), (set(), 2, (7, 7), "length"), ({7}, 1, (7,), "eos")],
    ids=["eos is kept", "length", "eos at the last"],
)
def test_ends(eos: set[int], new: int, tokens: tuple[int, ...], reason: str) -> None:
    blocks = CountedBlocks(10)
    scheduler = Scheduler(blocks, Limits(8, 4))
    scheduler.add(Request("a", (1, 2), new, frozenset(eos)))
    outcome = drain(scheduler)["a"]
    assert (outcome.tokens, outcome.reason) == (tokens, reason)
    assert blocks.tokens == {}


@pytest.mark.parametrize(
    ("length", "new", "fits"),
    [(40, 1, True), (41, 1, False), (37, 4, True), (37, 5, False), (400, 1, False)],
    ids=str,
)
def test_what_the_pool_cannot_hold_is_refused(length: int, new: int, fits: bool) -> None:
    """Prompt longer than the pool; the last new token needs no slot. Others go on."""
    scheduler = Scheduler(CountedBlocks(10), Limits(8, 4))
    scheduler.add(request("other", 5))
    if fits:
        scheduler.add(request("a", length, new))
    else:
        with pytest.raises(ValueError, match=rf"'a': a prompt of {length} tokens .* has 10"):
            scheduler.add(request("a", length, new))
    assert set(drain(scheduler)) == {"other", *(["a"] if fits else [])}


def test_the_last_in_order_is_preempted_and_computed_again() -> None:
    """Its new tokens are kept: they become prompt."""
    scheduler = Scheduler(CountedBlocks(5), Limits(8, 4, reserve=0))
    scheduler.add(request("a", 8, 8))
    step(scheduler)
    scheduler.add(request("b", 7, 6))
    assert step(scheduler)[0] == [("a", 8, 1), ("b", 0, 7)]
    assert step(scheduler)[0] == [("a", 9, 1), ("b", 7, 1)]
    assert step(scheduler)[0] == [("a", 10, 1)], "b's ninth token has no block"
    assert (scheduler.running, scheduler.waiting) == (("a",), ("b",))
    ended = drain(scheduler)
    assert ended["a"].num_preempted == 0
    assert (ended["b"].num_preempted, len(ended["b"].tokens)) == (1, 6)
    assert scheduler.stats.recomputed == 1


@pytest.mark.parametrize(("host", "swapped"), [(0, 0), (2, 1)], ids=["no host", "host"])
def test_swapped_requests_come_back_where_they_were(host: int, swapped: int) -> None:
    blocks = CountedBlocks(5, host=host)
    scheduler = Scheduler(blocks, Limits(8, 4, reserve=0))
    scheduler.add(request("a", 8, 8))
    scheduler.add(request("b", 7, 6))
    ended = drain(scheduler)
    assert {len(ended["a"].tokens), len(ended["b"].tokens)} == {8, 6}
    assert scheduler.stats.swapped == swapped
    # Each stored token is computed once, or once more by whoever was computed again.
    once = 8 + 7 + 7 + 5
    assert (scheduler.stats.computed_tokens == once) == bool(swapped)


def test_who_was_preempted_does_not_come_back_at_once() -> None:
    """Catches thrash: in and out again at every token while the pool is nearly full."""
    scheduler = Scheduler(CountedBlocks(20), Limits(16, 8))
    for number in range(6):
        scheduler.add(request(str(number), 9, 24))
    ended = drain(scheduler)
    assert sum(outcome.num_preempted for outcome in ended.values()) <= 12


def test_nobody_is_admitted_into_what_running_prompts_still_need() -> None:
    scheduler = Scheduler(CountedBlocks(10), Limits(8, 4))
    scheduler.add(request("long", 32))  # 8 pages, 2 of them in the first step
    scheduler.add(request("next", 8))
    step(scheduler)
    step(scheduler)
    assert scheduler.running == ("long",)


def test_pages_behind_the_window_are_given_back() -> None:
    """The next query, at position n, sees n − W + 1 … n."""
    blocks = CountedBlocks(20)
    scheduler = Scheduler(blocks, Limits(64, 4), window=6)
    scheduler.add(request("a", 12, 4))
    for computed, pages in ((12, 1), (13, 2), (14, 2), (15, 2)):
        batch = scheduler.schedule()
        scheduler.update(batch, {"a": 7})
        if computed < 15:
            assert blocks.dropped["a"] == pages, computed


def void(_: object) -> None:
    return None


STATES: dict[str, Callable[[Scheduler], None]] = {
    "waiting": void,
    "in the middle of its prompt": lambda scheduler: void(step(scheduler)),
    "decoding": lambda scheduler: void([step(scheduler) for _ in range(4)]),
}


@pytest.mark.parametrize("state", STATES)
def test_cancel_from_anywhere(state: str) -> None:
    """Its pages are free at once, and the other's tokens are what they would have been."""
    blocks = CountedBlocks(20)
    scheduler = Scheduler(blocks, Limits(6, 4))
    scheduler.add(request("a", 10, 6))
    scheduler.add(request("b", 3, 2))
    STATES[state](scheduler)
    outcome = scheduler.cancel("a")
    assert (outcome.name, outcome.reason) == ("a", "cancelled")
    assert "a" not in blocks.tokens
    assert len(drain(scheduler)["b"].tokens) == 2 if "b" in scheduler.waiting else True
    with pytest.raises(ValueError, match="no request 'a'"):
        scheduler.cancel("a")


def test_cancel_in_the_host_gives_its_room_back() -> None:
    blocks = CountedBlocks(5, host=5)
    scheduler = Scheduler(blocks, Limits(8, 4, reserve=0))
    scheduler.add(request("a", 8, 8))
    scheduler.add(request("b", 7, 6))
    while not blocks.away:
        step(scheduler)
    kept = scheduler.cancel("b").tokens
    assert kept
    assert blocks.away == {}
    assert "discard b" in blocks.log
    assert set(drain(scheduler)) == {"a"}


def test_cancelled_while_a_batch_is_computed() -> None:
    """Its part of the batch is ignored; the others' isn't."""
    scheduler = Scheduler(CountedBlocks(20), Limits(8, 4))
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    batch = scheduler.schedule()
    scheduler.cancel("a")
    assert scheduler.update(batch, {"a": 7, "b": 7}) == []
    assert (scheduler.running, scheduler.waiting) == (("b",), ())
    scheduler.add(request("a", 3))  # the name is free again
    assert set(drain(scheduler)) == {"a", "b"}


def test_logits_that_are_not_finite_fail_one_request() -> None:
    scheduler = Scheduler(CountedBlocks(20), Limits(8, 4))
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    ended = scheduler.update(scheduler.schedule(), {"a": None, "b": 7})
    assert [(one.name, one.reason) for one in ended] == [("a", "failed")]
    assert ended[0].error == "the logits after token 3 aren't finite."
    assert len(drain(scheduler)["b"].tokens) == 4


def test_a_step_that_raised_is_done_again() -> None:
    blocks = CountedBlocks(20)
    scheduler = Scheduler(blocks, Limits(8, 4))
    scheduler.add(request("a", 3))
    step(scheduler)
    scheduler.add(request("b", 12))
    scheduler.abandon(scheduler.schedule())
    assert (scheduler.running, scheduler.waiting, blocks.tokens) == ((), ("a", "b"), {})
    ended = drain(scheduler)
    assert [len(ended[name].tokens) for name in "ab"] == [4, 4]


@pytest.mark.parametrize("call", ["start", "resume", "reserve", "preempt"])
@pytest.mark.parametrize("after", range(6))
def test_pages_that_raise_lose_nobody(
    call: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches who was taken from a queue before its pages came, and slots of a batch that isn't."""

    def serve(*, broken: bool) -> dict[str, tuple[int, ...]]:
        blocks = CountedBlocks(6, host=8)
        scheduler = Scheduler(blocks, Limits(16, 3, reserve=0))
        for name in ("a", "b", "c"):
            scheduler.add(request(name, 5, new=9))
        calls, real, ended = count(), getattr(blocks, call), dict[str, Outcome]()

        def fails(*args: Any) -> Any:
            if next(calls) == after:
                raise RuntimeError("the device is gone")
            return real(*args)

        if broken:
            monkeypatch.setattr(blocks, call, fails)
        for _ in range(100):
            try:
                ended |= {outcome.name: outcome for outcome in step(scheduler)[1]}
            except RuntimeError:
                assert len({*scheduler.running, *scheduler.waiting, *ended}) == 3
        assert blocks.num_free == blocks.num_usable
        assert not blocks.away
        return {name: outcome.tokens for name, outcome in ended.items()}

    assert serve(broken=True) == serve(broken=False)


def test_shared_pages_cost_nothing_and_are_not_computed() -> None:
    scheduler = Scheduler(CountedBlocks(20, known=8), Limits(64, 4))
    scheduler.add(request("a", 11, 1))
    assert step(scheduler)[0] == [("a", 8, 3)]
    assert scheduler.stats.cached_tokens == 8


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Request("a", (), 1), "'a': the prompt is empty"),
        (lambda: Request("a", (1, -1), 1), "'a': token 1 is -1"),
        (lambda: Request("a", (1,), 0), "max_new_tokens must be at least 1; it is 0"),
        (lambda: Limits(4, 8), "max_batch_tokens is 4; with 8 running"),
        (lambda: Limits(4, 0), "max_running must be at least 1"),
        (lambda: Limits(reserve=1.0), "reserve is a share"),
    ],
    ids=[
        "empty prompt",
        "negative id",
        "nothing new",
        "budget below one each",
        "nobody",
        "reserve",
    ],
)
def test_bad_input(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_name_is_there_once() -> None:
    scheduler = Scheduler(CountedBlocks(20), Limits(8, 4))
    scheduler.add(request("a", 3))
    with pytest.raises(ValueError, match="'a' is there already"):
        scheduler.add(request("a", 3))


def test_an_empty_engine_has_an_empty_batch() -> None:
    assert Scheduler(CountedBlocks(20), Limits(8, 4)).schedule().rows == ()


ASKED = st.lists(
    st.tuples(
        st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 6), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@given(
    asked=ASKED,
    usable=st.integers(8, 14),
    host=st.sampled_from([0, 3, 50]),
    budget=st.integers(3, 20),
    known=st.integers(0, 12),
    window=st.sampled_from([None, 3, 9]),
)
def test_laws(
    asked: list[tuple[int, int, int, int, bool]],
    usable: int, host: int, budget: int, known: int, window: int | None,
) -> None:  # fmt: skip
    """Within budget and pool, each token computed in its order, the first never preempted, all end."""
    blocks = CountedBlocks(usable, host=host, known=known)
    scheduler = Scheduler(blocks, Limits(budget, 3), window)
    coming = sorted(enumerate(asked), key=lambda one: one[1][3])
    ended: dict[str, Outcome] = {}
    for tick in range(3000):
        while coming and coming[0][1][3] <= tick:
            number, (length, new, priority, _, _) = coming.pop(0)
            scheduler.add(request(str(number), length, new, priority))
        if tick == 9:
            for name in scheduler.running + scheduler.waiting:
                if asked[int(name)][4]:
                    ended[name] = scheduler.cancel(name)
        if not coming and not scheduler.running and not scheduler.waiting:
            break
        first = scheduler.running[:1]
        batch = scheduler.schedule()
        assert batch.num_tokens <= budget
        assert blocks.num_free >= 0
        assert set(first) <= set(scheduler.running), "the first in order was preempted"
        assert batch.rows or not scheduler.waiting, "nobody moves on"
        sampled = {row.name: 7 for row in batch.rows if row.samples}
        ended |= {one.name: one for one in scheduler.update(batch, sampled)}
    assert len(ended) == len(asked)
    assert (blocks.tokens, blocks.away) == ({}, {})
    for number, (_, new, _, _, may_cancel) in enumerate(asked):
        outcome = ended[str(number)]
        assert outcome.reason == "length" or may_cancel
        assert len(outcome.tokens) == new or outcome.reason == "cancelled"
