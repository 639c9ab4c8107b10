"""Multi-turn workloads, drawn from a seed and run through the real block manager to record traces.

Sessions arrive at random. Each belongs to an application (popularity as 1 ÷ rank), whose system
prompt it begins with, and is one of three kinds:

    chat       a few turns; each prompt is the whole conversation so far, minutes apart
    document   one long text and a question, rarely a second one: read once, never again
    agent      many short turns within seconds of each other

Now and then a request is sent again at once (a retry). Lengths are log-normal, gaps exponential;
the medians below are ours, chosen to look like served traffic, and are no measurement of any.
Requests overlap: an answer takes its length × 20 ms, and its blocks are in use until then.

Two mixes, because policies are told apart by what returns and when:

    applications   48 of them; most sessions are short, so what returns is prompts, some seldom
    chat           4 of them; long conversations, so what returns is what was just said
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import log
from random import Random
from typing import NamedTuple

from quantwatch_kernels.serve.block_hash import extra_keys
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_trace import BlockTrace, TraceRecorder

__all__ = ["MIXES", "record_workload"]

_VOCABULARY = 49152
_SYSTEM_TOKENS = 700
_SECONDS_PER_TOKEN = 0.02
_RETRY = 0.04


@dataclass(frozen=True, slots=True)
class _Kind:
    """Medians of tokens, mean turns and mean seconds between them."""

    name: str
    weight: float
    opening: int
    question: int
    answer: int
    turns: float
    gap_s: float


class _Mix(NamedTuple):
    applications: int
    kinds: tuple[_Kind, ...]


MIXES = {
    "applications": _Mix(
        48,
        (
            _Kind("chat", 0.60, 40, 40, 150, 1.5, 30.0),
            _Kind("document", 0.30, 1800, 40, 120, 1.15, 30.0),
            _Kind("agent", 0.10, 120, 90, 60, 4.0, 3.0),
        ),
    ),
    "chat": _Mix(
        4,
        (
            _Kind("chat", 0.60, 40, 40, 180, 4.0, 60.0),
            _Kind("document", 0.28, 1800, 40, 120, 1.15, 30.0),
            _Kind("agent", 0.12, 120, 90, 60, 9.0, 3.0),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class _Session:
    kind: _Kind
    salt: str
    turns_left: int
    tokens: list[int]


class _Due(NamedTuple):
    """What happens at a time: a session's turn, or (without one) the end of a request."""

    time: float
    number: int
    name: str
    session: _Session | None
    tokens: list[int]


def record_workload(
    mix: str, seed: int, *, num_sessions: int = 200, page_size: int = 16, gap_s: float = 12.0
) -> BlockTrace:
    """Return the trace of a drawn workload, `gap_s` between sessions; same arguments, same trace.

    Raises ValueError for fewer than one session, or a mix that doesn't exist.
    """
    if mix not in MIXES:
        raise ValueError(f"no workload {mix!r}; there are {', '.join(MIXES)}.")
    if num_sessions < 1:
        raise ValueError(f"num_sessions must be at least 1; it is {num_sessions}.")
    recorder = TraceRecorder(page_size)
    manager = BlockManager(1 << 18, page_size, recorder=recorder)
    for event in _events(Random(seed), MIXES[mix], num_sessions, gap_s):
        _run(manager, *event)
    return recorder.trace(
        f"record_workload({mix!r}, {seed}, num_sessions={num_sessions}, page_size={page_size}, "
        f"gap_s={gap_s:g})"
    )


def _run(manager: BlockManager, name: str, session: _Session | None, tokens: list[int]) -> None:
    """Start a request with its prompt, or (without a session) finish one with its answer."""
    if session is not None:
        manager.start(name, tokens, extra_keys(salt=session.salt))
    done = manager.table(name).num_tokens
    manager.reserve(name, len(tokens) - done)
    manager.commit(name, tokens[done:])
    if session is None:
        manager.finish(name)


def _events(
    random: Random, mix: _Mix, num_sessions: int, gap_s: float
) -> Iterator[tuple[str, _Session | None, list[int]]]:
    """Yield starts and ends of requests in the order of time."""
    systems = [_text(random, _length(random, _SYSTEM_TOKENS, 0.7)) for _ in range(mix.applications)]
    queue: list[_Due] = []
    now, numbers = 0.0, count(1)
    for _ in range(num_sessions):
        now += random.expovariate(1 / gap_s)
        heapq.heappush(queue, _Due(now, next(numbers), "", _session(random, mix, systems), []))
    while queue:
        due = heapq.heappop(queue)
        if due.session is None:
            yield due.name, None, due.tokens
            continue
        ends = list[_Due]()
        for again in range(2 if random.random() < _RETRY else 1):
            ends.append(_answer(random, due, again, next(numbers)))
            heapq.heappush(queue, ends[-1])
            yield ends[-1].name, due.session, list(due.session.tokens)
        if due.session.turns_left > 1:
            heapq.heappush(queue, _next_turn(random, due.session, ends[-1], next(numbers)))


def _answer(random: Random, due: _Due, again: int, number: int) -> _Due:
    """Return the end of a request: its whole text, when it has been generated."""
    assert due.session is not None
    answer = _text(random, _length(random, due.session.kind.answer, 0.7))
    end = due.time + again + _SECONDS_PER_TOKEN * len(answer)
    return _Due(end, number, f"r{number}", None, due.session.tokens + answer)


def _next_turn(random: Random, session: _Session, end: _Due, number: int) -> _Due:
    question = _text(random, _length(random, session.kind.question, 1.0))
    later = replace(session, turns_left=session.turns_left - 1, tokens=end.tokens + question)
    gap = random.expovariate(1 / session.kind.gap_s)
    return _Due(end.time + gap, number, "", later, [])


def _session(random: Random, mix: _Mix, systems: list[list[int]]) -> _Session:
    kind = random.choices(mix.kinds, [kind.weight for kind in mix.kinds])[0]
    popularity = [1 / (rank + 1) for rank in range(len(systems))]
    application = random.choices(range(len(systems)), popularity)[0]
    opening = _text(random, _length(random, kind.opening, 0.6))
    # Geometric with the mean the kind has.
    turns = 1
    while random.random() < 1 - 1 / kind.turns:
        turns += 1
    return _Session(kind, f"application {application}", turns, systems[application] + opening)


def _length(random: Random, median: int, sigma: float) -> int:
    return max(1, round(random.lognormvariate(log(median), sigma)))


def _text(random: Random, length: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(length)]
