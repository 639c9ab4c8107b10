"""Where weights, KV pages and activations live: the placement with the shortest step, exactly.

Tiers (gpu, host, disk) have capacities; links between them are α–β fits of measured copies
(`alpha_beta`). An item that isn't on the compute tier is moved `moves` times per step, over the
path that is fastest for its size; a hop at a time, every hop paying its latency and bytes. Moves
over one link queue. Overlapped, a step takes max(compute, busiest link); else compute + all links.

Equal items form a group; the search chooses how many of a group go to each tier. It goes group by
group and drops a state if another one uses the same room and keeps no link longer. So it is exact;
beyond `_MOST_STATES` it refuses instead of guessing. Given up: splitting one item over tiers, and
contention beyond a link's own queue.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantwatch_kernels.planning.topology import Topology

__all__ = ["Group", "Placement", "place"]

_MOST_STATES = 200_000


@dataclass(frozen=True, slots=True)
class Group:
    """`count` equal items of `num_bytes` each, moved `moves` times per step when not at hand."""

    name: str
    count: int
    num_bytes: int
    moves: float = 1.0


class Placement(NamedTuple):
    """How many of each group are on each tier, in order, and what a step takes."""

    counts: tuple[tuple[int, ...], ...]
    step_s: float
    link_s: Mapping[tuple[str, str], float]


class _State(NamedTuple):
    used: tuple[int, ...]
    busy: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...] = ()


def place(
    groups: Sequence[Group], topology: Topology, compute_s: float, *, overlap: bool = True
) -> Placement:
    """Return the fastest placement; among equals the one with more on the earlier tiers.

    Raises ValueError for impossible sizes, for items that fit nowhere, and for a search too large.
    """
    _check(groups, compute_s)

    def step(busy: Sequence[float]) -> float:
        return max((compute_s, *busy)) if overlap else compute_s + sum(busy)

    tiers, links = len(topology.capacity), len(topology.links)
    states = [_State((0,) * tiers, (0.0,) * links)]
    for group in groups:
        costs = [_link_seconds(group, topology, tier) for tier in topology.capacity]
        following = (n for state in states for n in _next(state, group, topology, costs))
        states = _undominated(following)
        if not states:
            raise ValueError(f"{group.name}: {group.count} × {group.num_bytes} bytes fit nowhere.")
    earlier = {s: tuple(tuple(-n for n in counts) for counts in s.counts) for s in states}
    best = min(states, key=lambda s: (step(s.busy), earlier[s]))
    busy = dict(zip(topology.links, best.busy, strict=True))
    return Placement(best.counts, step(best.busy), busy)


def _check(groups: Sequence[Group], compute_s: float) -> None:
    for group in groups:
        if group.count < 1 or group.num_bytes < 1 or not 0 <= group.moves < float("inf"):
            raise ValueError(f"a group needs count ≥ 1, bytes ≥ 1 and moves ≥ 0: {group}.")
    if not 0 <= compute_s < float("inf"):
        raise ValueError(f"compute_s must be finite and not negative; it is {compute_s!r}.")


def _link_seconds(group: Group, topology: Topology, tier: str) -> list[float]:
    """Return what one item on this tier costs each link per step."""
    way = topology.path(tier, group.num_bytes)
    return [
        group.moves * fit.seconds(group.num_bytes) * (link in way)
        for link, fit in topology.links.items()
    ]


def _next(
    state: _State, group: Group, topology: Topology, costs: Sequence[Sequence[float]]
) -> Iterator[_State]:
    """Yield the states after each way of spreading a group over the tiers that have room."""
    capacities = topology.capacity.values()
    rooms = [(c - u) // group.num_bytes for c, u in zip(capacities, state.used, strict=True)]
    for counts in _spread(group.count, rooms):
        used = tuple(u + n * group.num_bytes for u, n in zip(state.used, counts, strict=True))
        busy = tuple(
            before + sum(n * cost[link] for n, cost in zip(counts, costs, strict=True))
            for link, before in enumerate(state.busy)
        )
        yield _State(used, busy, (*state.counts, counts))


def _spread(count: int, rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to put `count` items into these rooms, the first one filled first."""
    if len(rooms) == 1:
        if count <= rooms[0]:
            yield (count,)
        return
    for here in range(min(count, rooms[0]), -1, -1):
        for rest in _spread(count - here, rooms[1:]):
            yield (here, *rest)


def _undominated(states: Iterator[_State]) -> list[_State]:
    """Of the states that use the same room, keep those that no other beats on every link."""
    by_room: dict[tuple[int, ...], list[_State]] = {}
    for number, state in enumerate(states):
        if number >= _MOST_STATES:
            raise ValueError(f"over {_MOST_STATES:,} placements to compare; use larger items.")
        kept = by_room.setdefault(state.used, [])
        if not any(_no_slower(other, state) for other in kept):
            kept[:] = [*(other for other in kept if not _no_slower(state, other)), state]
    return [state for kept in by_room.values() for state in kept]


def _no_slower(a: _State, b: _State) -> bool:
    return all(x <= y for x, y in zip(a.busy, b.busy, strict=True))
