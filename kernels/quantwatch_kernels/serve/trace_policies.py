"""What a policy would have hit on a recorded trace, without any tensor or token.

At its start a request asks for the full blocks of its prompt: those that are resident from the
first one on are hits, the others are computed and take blocks, if need be those of victims. Until
its end it uses them all; at its end its answer's blocks are added. The hit rate counts prompt
blocks only: nobody asks for an answer before it exists. A block that two requests compute at the
same time counts once here; a pool then holds two copies until the second request ends.

`Belady` is the ceiling: the victim is the content that is asked for again last. It needs the
future, so it is an oracle and no policy to serve with. It is optimal here, too: a parent is asked
for whenever its child is, so the farthest content is a leaf, and blocks in use are asked for now.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from quantwatch_kernels.serve.block_trace import BlockTrace
from quantwatch_kernels.serve.eviction import POLICIES, EvictionPolicy, Rank, make_policy
from quantwatch_kernels.serve.victims import Victims

__all__ = ["Belady", "TraceResult", "belady_of", "hit_rates", "simulate"]


class Belady(EvictionPolicy):
    """Farthest next use goes first. `uses`: the times each content is asked for, ascending."""

    def __init__(self, uses: Mapping[Hashable, Sequence[float]]) -> None:
        super().__init__()
        self._uses = uses
        self._now = -inf

    def rank(self, key: Hashable) -> Rank:
        """Return minus the next use; −∞ if there is none."""
        times = self._uses.get(key, ())
        later = bisect_right(times, self._now)
        return (-times[later] if later < len(times) else -inf, self._last[key])

    def reference(self, key: Hashable, now: float, source: Hashable = None) -> tuple[Hashable, ...]:
        """Move on in time."""
        self._now = max(self._now, now)
        return (*super().reference(key, now, source),)


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Prompt blocks asked for, found, and contents given up."""

    queries: int
    hits: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits ÷ queries. Raises ValueError if no block was asked for."""
        if self.queries == 0:
            raise ValueError("the trace asks for no full block, so there is no hit rate.")
        return self.hits / self.queries


@dataclass(slots=True)
class _Residents:
    """Resident contents, who uses them, and which could go."""

    capacity: int
    parents: Sequence[int]
    victims: Victims
    users: dict[int, int] = field(default_factory=dict)
    children: dict[int, int] = field(default_factory=dict)
    evictions: int = 0

    def use(self, block: int, now: float, source: int) -> bool:
        """Take a reference, bringing the content in if need be; say whether it was there."""
        found = block in self.users
        if not found:
            self._bring_in(block)
        self.users[block] += 1
        self.victims.discard(block)
        self.victims.reference(block, now, source)
        return found

    def leave(self, block: int, now: float) -> None:
        """Drop a reference."""
        self.users[block] -= 1
        if self.users[block] == 0:
            self.victims.policy.release(block, now)
            self._consider(block)

    def _bring_in(self, block: int) -> None:
        if len(self.users) == self.capacity:
            if not len(self.victims):
                raise ValueError(
                    f"{self.capacity} blocks are too few: the trace's requests use more at a time."
                )
            victim = self.victims.pop()
            assert isinstance(victim, int)
            self._evict(victim)
        self.users[block], self.children[block] = 0, 0
        if self.parents[block] >= 0:
            self.children[self.parents[block]] += 1
            self.victims.discard(self.parents[block])

    def _evict(self, block: int) -> None:
        del self.users[block], self.children[block]
        self.victims.policy.evicted(block)
        self.evictions += 1
        if self.parents[block] >= 0:
            self.children[self.parents[block]] -= 1
            self._consider(self.parents[block])

    def _consider(self, block: int) -> None:
        if self.users[block] == 0 and self.children[block] == 0:
            self.victims.add(block)


def simulate(trace: BlockTrace, capacity: int, policy: EvictionPolicy) -> TraceResult:
    """Return what a pool of `capacity` blocks hits. Time is the number of requests so far.

    Raises ValueError when requests that run at the same time use more blocks than there are.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1 block; it is {capacity}.")
    residents = _Residents(capacity, trace.parents, Victims(policy))
    queries = hits = now = 0
    for event in trace.events:
        if event >= 0:
            now += 1
            residents.victims.advance(now)
            found = [
                residents.use(block, now, event)
                for block in trace.path(trace.requests[event].prompt)
            ]
            queries, hits = queries + len(found), hits + sum(found)
        else:
            _end(trace, residents, -1 - event, now)
    return TraceResult(queries, hits, residents.evictions)


def _end(trace: BlockTrace, residents: _Residents, number: int, now: int) -> None:
    request = trace.requests[number]
    path = trace.path(request.whole)
    for block in path[len(trace.path(request.prompt)) :]:
        residents.use(block, now, number)
    for block in reversed(path):
        residents.leave(block, now)


def belady_of(trace: BlockTrace) -> Belady:
    """Return the oracle of a trace."""
    uses: dict[Hashable, list[float]] = {}
    for now, number in enumerate((event for event in trace.events if event >= 0), start=1):
        for block in trace.path(trace.requests[number].prompt):
            uses.setdefault(block, []).append(now)
    return Belady(uses)


def hit_rates(trace: BlockTrace, capacity: int) -> dict[str, TraceResult]:
    """Return the result of every policy, and of the oracle as "belady"."""
    found = {name: simulate(trace, capacity, make_policy(name, capacity)) for name in POLICIES}
    return {**found, "belady": simulate(trace, capacity, belady_of(trace))}
