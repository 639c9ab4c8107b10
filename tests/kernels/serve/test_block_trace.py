"""Traces: recorded, written, replayed; hit rates of policies between nothing and the oracle's."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quantwatch_kernels.serve
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_trace import (
    BlockTrace,
    TracedRequest,
    TraceRecorder,
    load_trace,
    save_trace,
)
from quantwatch_kernels.serve.eviction import LRU, POLICIES, EvictionPolicy, make_policy
from quantwatch_kernels.serve.trace_policies import belady_of, hit_rates, simulate
from quantwatch_kernels.serve.trace_replay import replay
from quantwatch_kernels.serve.trace_workload import record_workload

RECORDED = Path(quantwatch_kernels.serve.__file__).parent / "traces"


@cache
def recorded(name: str) -> BlockTrace:
    return load_trace(RECORDED / f"{name}.json")


@st.composite
def traces(draw: st.DrawFn, most_blocks: int = 7, most_requests: int = 6) -> BlockTrace:
    """A small tree, requests that are paths in it, at most two at a time."""
    parents: list[int] = []
    for block in range(draw(st.integers(1, most_blocks))):
        parents.append(draw(st.integers(-1, block - 1)))
    tree = BlockTrace(2, tuple(parents), (), ())
    requests, events, running = list[TracedRequest](), list[int](), list[int]()
    for number in range(draw(st.integers(1, most_requests))):
        # Answers are new, and nobody asks for one before it exists.
        pending = {requests[one].whole for one in running} - {
            requests[one].prompt for one in running
        }
        prompt = draw(st.sampled_from([b for b in range(len(parents)) if b not in pending]))
        answer = draw(st.booleans()) and draw(st.booleans())
        whole = prompt
        if answer:
            whole = len(parents)
            parents.append(prompt)
        requests.append(TracedRequest(prompt, whole))
        events.append(number)
        running.append(number)
        while len(running) > 1 or (running and draw(st.booleans())):
            events.append(-1 - running.pop(draw(st.integers(0, len(running) - 1))))
    events += [-1 - number for number in running]
    assert tree.path(0)
    return BlockTrace(2, tuple(parents), tuple(requests), tuple(events))


def room(trace: BlockTrace) -> int:
    """Blocks that always suffice: the two longest requests together."""
    sizes = sorted(len(trace.path(request.whole)) for request in trace.requests)
    return max(1, sum(sizes[-2:]))


def most_in_use(trace: BlockTrace) -> int:
    """Blocks that the requests running at one time use, at most."""
    running: dict[int, list[int]] = {}
    most = 0
    for event in trace.events:
        if event >= 0:
            running[event] = trace.path(trace.requests[event].prompt)
        else:
            running[-1 - event] = trace.path(trace.requests[-1 - event].whole)
        most = max(most, len({block for path in running.values() for block in path}))
        if event < 0:
            del running[-1 - event]
    return most


def best_by_trying_everything(trace: BlockTrace, capacity: int) -> int:
    """The most hits over all choices of idle victims, leaf or not."""
    paths = {n: (trace.path(r.prompt), trace.path(r.whole)) for n, r in enumerate(trace.requests)}

    @cache
    def go(at: int, step: int, resident: frozenset[int], used: tuple[int, ...]) -> int:
        if at == len(trace.events):
            return 0
        event = trace.events[at]
        number = event if event >= 0 else -1 - event
        prompt, whole = paths[number]
        wanted = prompt if event >= 0 else whole[len(prompt) :]
        if step == len(wanted):
            busy = (*used, number) if event >= 0 else tuple(n for n in used if n != number)
            return go(at + 1, 0, resident, busy)
        block = wanted[step]
        if block in resident:
            return (event >= 0) + go(at, step + 1, resident, used)
        if len(resident) < capacity:
            return go(at, step + 1, resident | {block}, used)
        pinned = {b for n in (*used, number) for b in paths[n][0]} | set(wanted[:step])
        idle = resident - pinned
        return max(go(at, step + 1, resident - {victim} | {block}, used) for victim in idle)

    return go(0, 0, frozenset(), ())


@settings(max_examples=60)
@given(trace=traces(), less=st.integers(0, 4))
def test_belady_is_the_best_there_is(trace: BlockTrace, less: int) -> None:
    """Catches an oracle that isn't: no choice of victims has more hits, leaves or not."""
    longest = max(len(trace.path(request.whole)) for request in trace.requests)
    for capacity in sorted({max(longest, room(trace) - less), room(trace)}):
        if capacity < most_in_use(trace):
            with pytest.raises(ValueError, match="use more at a time"):
                simulate(trace, capacity, belady_of(trace))
            continue
        found = simulate(trace, capacity, belady_of(trace))
        assert found.hits == best_by_trying_everything(trace, capacity)


@settings(max_examples=60)
@given(trace=traces(most_blocks=12, most_requests=14))
def test_no_policy_beats_belady(trace: BlockTrace) -> None:
    """A law, on any trace; and with room for everything all hit whatever was there before."""
    found = hit_rates(trace, room(trace))
    assert {*found} == {*POLICIES, "belady"}
    assert len({result.queries for result in found.values()}) == 1
    assert all(result.hits <= found["belady"].hits for result in found.values())
    for name in POLICIES:
        everything = simulate(trace, len(trace.parents), make_policy(name, len(trace.parents)))
        assert everything.evictions == 0
        assert everything == simulate(trace, len(trace.parents), belady_of(trace))


@settings(max_examples=60)
@given(trace=traces(most_blocks=10, most_requests=12), name=st.sampled_from([*POLICIES, "belady"]))
def test_the_real_cache_hits_what_was_simulated(trace: BlockTrace, name: str) -> None:
    """Catches two rules under one name: pool and prefix cache against sets of numbers."""
    capacity = room(trace) + 1  # a prompt's unfinished page must fit, too

    def policy() -> EvictionPolicy:
        return belady_of(trace) if name == "belady" else make_policy(name, capacity)

    expected = simulate(trace, capacity, policy())
    if name == "belady":
        return  # its keys are the trace's numbers, the cache's are digests
    found = replay(trace, capacity, policy())
    assert (found.queries, found.hits, found.evictions) == (
        *(expected.queries, expected.hits, expected.evictions),
    )


FIGURES = {
    ("applications", 982): {"lru": 14712, "lru-k": 15176, "slru": 14031, "belady": 18787},
    ("chat", 2009): {"lru": 89504, "lru-k": 89910, "slru": 87471, "belady": 93252},
}


@pytest.mark.parametrize("capacity", [982, 1637, 3275, 4912])
def test_lru_k_lies_between_lru_and_belady(capacity: int) -> None:
    """The issue's figure, on the recorded trace of applications, at 6, 10, 20 and 30 % of its blocks."""
    found = {
        name: result.hit_rate
        for name, result in hit_rates(recorded("applications"), capacity).items()
    }
    assert found["lru"] < found["lru-k"] < found["belady"]


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("applications", 982),
        pytest.param("chat", 2009, marks=pytest.mark.slow),
    ],
)
def test_hit_rates_of_recorded_traces(name: str, capacity: int) -> None:
    """Catches a policy that changed: hits to the block, by simulation and by the real cache."""
    trace, expected = recorded(name), FIGURES[name, capacity]
    assert {key: result.hits for key, result in hit_rates(trace, capacity).items()} == expected
    assert replay(trace, capacity, make_policy("lru-k", capacity)).hits == expected["lru-k"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["applications", "chat"])
def test_recorded_traces_come_from_their_seed(name: str) -> None:
    """Catches a file that its own description doesn't make."""
    assert record_workload(name, 7) == recorded(name)


def test_a_recording_is_what_happened() -> None:
    """Catches answers counted as prompts, requests that never end, and forks as requests."""
    recorder = TraceRecorder(2)
    manager = BlockManager(20, 2, LRU(), recorder=recorder)
    for name, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [1, 2, 9])):
        known = manager.start(name, prompt)
        manager.reserve(name, len(prompt) - known)
        manager.commit(name, prompt[known:])
    manager.reserve("a", 1)
    manager.commit("a", [6])
    manager.fork("a", "fork of a")
    manager.finish("fork of a")
    manager.finish("a")
    manager.start("cancelled", [1, 2, 3, 4, 7])
    manager.finish("cancelled")
    found = recorder.trace("by hand")
    # 1 2 | 3 4 | 5 6 are blocks 0, 1 and 2; the answer made the last one full. b still runs.
    assert found.parents == (-1, 0, 1)
    assert found.requests == ((1, 2), (0, 0), (1, 1))
    assert found.events == (0, 1, -1, 2, -3)


@given(trace=traces())
def test_written_and_read(trace: BlockTrace, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Catches segments that are cut wrongly."""
    path = tmp_path_factory.mktemp("trace") / "t.json"
    save_trace(trace, path)
    assert load_trace(path) == trace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _text: "", "no block trace"),
        (lambda text: text[:-20], "no block trace"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2"),
        (lambda text: text.replace('"events"', '"event"'), "events"),
        (lambda text: text.replace("[-1, 0, 2]", "[-1, 1, 2]"), "doesn't begin at 0"),
        (lambda text: text.replace("[[1, 1]]", "[[1, 5]]"), "aren't there"),
        (lambda text: text.replace("[[1, 1]]", "[[1, 0]]"), "isn't the beginning"),
        (lambda text: text.replace("[0, -1]", "[0, 0]"), "out of order"),
        (lambda text: text.replace("[0, -1]", "[-1]"), "out of order"),
        (lambda text: text.replace("[0, -1]", "[1]"), "names no request"),
        (lambda text: text.replace("[-1, 0, 2]", "[0, 0, 2]"), "isn't before it"),
    ],
)
def test_other_files_are_refused(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    """Catches figures made from half a file; the message names it."""
    path = tmp_path / "t.json"
    save_trace(BlockTrace(16, (-1, 0), (TracedRequest(1, 1),), (0, -1)), path)
    load_trace(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=rf"t\.json: no block trace.*{message}|no block trace"):
        load_trace(path)


def test_bad_input() -> None:
    """Catches hit rates of nothing, and pools that the trace's requests don't fit in."""
    trace = BlockTrace(2, (-1, 0, 1), (TracedRequest(2, 2),), (0, -1))
    empty = BlockTrace(2, (), (TracedRequest(-1, -1),), (0, -1))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: simulate(trace, 0, LRU()), "capacity must be at least 1"),
        (lambda: simulate(trace, 2, LRU()), "2 blocks are too few"),
        (lambda: simulate(empty, 2, LRU()).hit_rate, "asks for no full block"),
        (lambda: record_workload("chats", 0), "no workload 'chats'; there are applications, chat"),
        (lambda: record_workload("chat", 0, num_sessions=0), "num_sessions must be at least 1"),
    ]
    for step, message in cases:
        with pytest.raises(ValueError, match=message):
            step()
